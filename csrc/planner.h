// The planner's shared types: the question, the columns that a plan is made on, and the answer. What it does is told in
// words in deepspeed_cad/planner/__init__.py, which also says which file here does what.
#pragma once

// Every rank makes the plan by itself, and all must make the same one, whatever their processor and compiler: so sums are
// taken in rank order, and no multiplication and addition are fused into one rounding. Before the includes, so that the
// standard library's templates can be inlined.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__) && (!defined(__x86_64__) || defined(__FMA__))
#pragma GCC optimize("fp-contract=off")
#endif

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "window.h"

namespace cad {

using std::size_t;

using Ranks = std::vector<int32_t>;

struct Problem {
    int64_t ranks, groups, window, granularity;
    int64_t query_bytes, output_bytes, key_value_bytes;
    double pair, row, key, task;  // CostModel
    double inside, between;       // weight of a byte
    double band;                  // BAND, READ_FROM and IN_PLACE of planner/constants.py, where Python reads them, too
    int64_t read_from, in_place;
    const double *base, *speed;  // of each rank
    int64_t hosts;
    const int64_t* host;  // of each rank, numbered in the order in which hosts first appear
    int64_t query_count, key_count;
    const int64_t *query_document, *query_begin, *query_end, *query_rank;
    const int64_t *key_document, *key_begin, *key_end, *key_rank;
};

// Rows [begin, end) of a document's head group: who runs them, and where their tokens are.
struct Cell {
    int64_t begin, end;
    int32_t server, home;
    bool operator==(const Cell& other) const {
        return begin == other.begin && end == other.end && server == other.server && home == other.home;
    }
};

// Rows [begin, end), without their server.
using Span = std::pair<int64_t, int64_t>;
using Spans = std::vector<Span>;
// One head group of a document: cells ordered by begin, which together cover its query rows once.
using Column = std::vector<Cell>;

// Query rows of a document on one rank; segments that continue each other on one rank are joined.
struct Segment {
    int32_t document;  // index into Columns::documents
    int64_t begin, end;
    int32_t home;
};

struct KeySegment {
    int64_t begin, end;
    int32_t home;
};

struct Document {
    int64_t id;
    int32_t first_segment, segments, first_key, keys;
    int32_t touched;  // index into Columns::touched, or -1 while every head group is at home
};

// Rows [begin, end) and their server.
struct Run {
    int64_t begin, end;
    int32_t server;
};

struct Task {
    int64_t document, begin, end, group_begin, group_end, server;
    bool operator<(const Task& other) const;
};

// What a plan moves in one layer's forward: see Flows in planner/core.py.
struct Flows {
    struct Pair {
        int64_t home, server, with_rows;
        bool operator<(const Pair& other) const;
    };
    std::vector<int64_t> bytes;   // [4][2][ranks]: QKV sent and received, O sent and received; inside and between hosts
    std::vector<double> waiting;  // work of tasks that read anything from another rank
    std::vector<double> parts;    // head groups of documents with such tasks
    std::vector<Pair> pairs;      // ordered
    std::vector<int64_t> served;  // [2][ranks]: query and KV rows times head groups side by side at each server
};

// Who runs which rows of each (document, head group), while a plan is being made. A document that nobody touched yet
// shares one column for all its head groups.
class Columns {
public:
    explicit Columns(const Problem& problem);

    // Query-key pairs of rows [begin, end).
    int64_t pairs(int64_t begin, int64_t end) const;
    // Cost of one head group's rows [begin, end) as one task.
    double cost_of(int64_t begin, int64_t end) const;
    // Cost of one row at a position, without what a task costs as such.
    double density(int64_t position) const {
        const int64_t reach = p.window && p.window < position + 1 ? p.window : position + 1;
        return p.pair * static_cast<double>(reach) + p.row;
    }
    // The first key that a row reads.
    int64_t first_key(int64_t row) const { return window_start(row, p.window); }
    // Weight of a byte between two ranks.
    double link(int32_t home, int32_t server) const {
        if (home == server) return 0.0;
        return p.host[home] == p.host[server] ? p.inside : p.between;
    }
    // The column of one head group: cells ordered by begin.
    const Cell* column(int32_t document, int64_t group, int32_t* count) const;
    // Runs of head groups whose columns are equal.
    void classes(int32_t document, std::vector<std::pair<int32_t, int32_t>>* runs) const;
    // Rows of K and V that a server lacks to run these, weighted by link; `spans` are ordered and do not touch.
    double missing(int32_t document, int32_t server, const Spans& spans) const;
    // Whether a rank has these keys at home in one piece.
    bool holds(int32_t document, int32_t rank, int64_t begin, int64_t end) const;
    // Gives rows [begin, end), which lie in one cell, to another server.
    void move(int32_t document, int64_t group, int64_t begin, int64_t end, int32_t server);
    // Gives rows of a head group that is at home to the servers of `runs`, which are ordered and do not overlap.
    void place(int32_t document, int64_t group, const std::vector<Run>& runs);
    // The segment that holds a row.
    int32_t segment_of(int32_t document, int64_t row) const;
    // The rectangles of all columns, ordered: one for each server's run of rows and run of head groups that are alike.
    std::vector<Task> tasks() const;
    // What the columns as they are would move.
    Flows flows() const;

    const Problem& p;
    std::vector<Segment> segments;
    std::vector<Document> documents;
    std::vector<KeySegment> keys;           // by (document, begin)
    std::vector<std::vector<int32_t>> of_rank;  // segments, those that end last in their document first
    std::vector<int64_t> left;                  // rows times head groups of each segment that are at home
    std::vector<std::vector<int32_t>> served;   // documents of which a rank runs, or ran, rows of others
    std::vector<double> load;                   // work of each rank as a server

private:
    std::vector<Column>& touch(int32_t document);
    void note_served(int32_t server, int32_t document);
    int64_t keys_read(const Spans& spans) const;
    double run_cost(const Spans& spans) const;
    int64_t overlap(const Spans& needed, const KeySegment& key) const;

    std::vector<Cell> base_;                     // one per segment: the column of a document at home
    std::vector<std::vector<Column>> touched_;
    std::vector<int32_t> keys_by_rank_;          // per document, its keys ordered by (host, home, begin)
    std::vector<int64_t> rows_before_;           // key rows of the document before each key segment
    mutable Spans needed_;
};

// The rows of one server in a column, neighbours joined.
void spans_of(const Cell* column, int32_t count, int32_t server, Spans* spans);

// Base loads and speeds of some ranks.
struct Pace {
    std::vector<double> base, speed;
};

// The time at which all work is done if every rank starts at its base load and all stop together.
double finish_time(double work, const Pace& pace);
// Work of every rank that stops at `time`; 0 where the base load is later or the speed is 0.
std::vector<double> work_until(double time, const Pace& pace);
// Work that a rank which gives keeps at least, and that a rank which takes reaches, so that both sums agree. One of the
// two is the bound of the tolerance (what must move in any case), the other lies between the mean and its bound: nothing
// is moved that need not be.
void settle_levels(const std::vector<double>& load, const Pace& pace, double finish, double tolerance,
                   std::vector<double>* give, std::vector<double>* take);

// What a round aims at, of all ranks: work, in the unit of the cost model times speed.
struct Levels {
    explicit Levels(int64_t ranks);  // no rank gives or takes
    std::vector<double> most;        // no more than this
    std::vector<double> give;        // ranks above it give what is above
    std::vector<double> take;        // ranks below it take what is missing
    std::vector<double> slack;       // so much is not worth a move
};

// Levels where units of ranks above `upper` give what is above. Units that take end as early as that allows. Inside a unit
// that gives, the ranks with most go first, inside one that takes those with least: all ranks of a unit above (below) one
// time give (take).
void settle_units(const std::vector<double>& load, const Pace& pace, const std::vector<Ranks>& units, double upper,
                  Levels* levels);

// Deals out documents on many ranks by head groups, but for their first `kept` segments; the largest document first.
void spread(Columns* columns, double tolerance, int64_t kept);

// Moves between the ranks of a pool until none is above its level, or nothing helps.
void run_round(Columns* columns, const Levels& levels, const Ranks& pool);

}  // namespace cad
