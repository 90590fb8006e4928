// The planner's shared types: the question, the columns that a plan is made on, and the answer.
// The same algorithm as deepspeed_cad/planner/, operation by operation, so that both give the same tasks to the row.
#pragma once

// Python has no fused multiply-add: neither may this. Before the includes, so that the standard library's templates can
// be inlined.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__) && (!defined(__x86_64__) || defined(__FMA__))
#pragma GCC optimize("fp-contract=off")
#endif

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace cad {

using std::size_t;

using Ranks = std::vector<int32_t>;

struct Problem {
    int64_t ranks, groups, window, granularity;
    int64_t query_bytes, output_bytes, key_value_bytes;
    double pair, row, key, task, inside, between;
    const double *base, *speed, *memory;
    int64_t hosts;
    const int64_t* host;  // of each rank, numbered in the order in which hosts first appear
    int64_t query_count, key_count;
    const int64_t *query_document, *query_begin, *query_end, *query_rank;
    const int64_t *key_document, *key_begin, *key_end, *key_rank;
};

struct Cell {
    int64_t begin, end;
    int32_t server, home;
    bool operator==(const Cell& other) const {
        return begin == other.begin && end == other.end && server == other.server && home == other.home;
    }
};

using Span = std::pair<int64_t, int64_t>;
using Spans = std::vector<Span>;
using Column = std::vector<Cell>;

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

struct Missing {
    int64_t rows;
    double weighted;
};

struct Task {
    int64_t document, begin, end, group_begin, group_end, server;
    bool operator<(const Task& other) const;
};

// What a plan moves in one layer's forward: planner/flows.py.
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

// Who runs which rows of each (document, head group), while a plan is being made: planner/columns.py.
class Columns {
public:
    explicit Columns(const Problem& problem);

    int64_t pairs(int64_t begin, int64_t end) const;
    double cost_of(int64_t begin, int64_t end) const;
    double density(int64_t position) const {
        const int64_t reach = p.window && p.window < position + 1 ? p.window : position + 1;
        return p.pair * static_cast<double>(reach) + p.row;
    }
    int64_t first_key(int64_t row) const {
        return p.window && row - p.window + 1 > 0 ? row - p.window + 1 : 0;
    }
    double link(int32_t home, int32_t server) const {
        if (home == server) return 0.0;
        return p.host[home] == p.host[server] ? p.inside : p.between;
    }
    // The column of one head group: cells ordered by begin.
    const Cell* column(int32_t document, int64_t group, int32_t* count) const;
    // Runs of head groups whose columns are equal.
    void classes(int32_t document, std::vector<std::pair<int32_t, int32_t>>* runs) const;
    Missing missing(int32_t document, int32_t server, const Spans& spans) const;
    // Whether a rank has these keys at home in one piece.
    bool holds(int32_t document, int32_t rank, int64_t begin, int64_t end) const;
    void move(int32_t document, int64_t group, int64_t begin, int64_t end, int32_t server);
    // Gives rows of a head group that is at home to the servers of `runs`, which are ordered and do not overlap.
    void place(int32_t document, int64_t group, const std::vector<Run>& runs);
    int32_t segment_of(int32_t document, int64_t row) const;
    std::vector<Task> tasks() const;
    Flows flows() const;

    const Problem& p;
    std::vector<Segment> segments;
    std::vector<Document> documents;
    std::vector<KeySegment> keys;           // by (document, begin)
    std::vector<std::vector<int32_t>> of_rank;  // segments, those that end last in their document first
    std::vector<int64_t> left;                  // rows times head groups of each segment that are at home
    std::vector<std::vector<int32_t>> served;   // documents of which a rank runs, or ran, rows of others
    std::vector<double> load;
    std::vector<int64_t> received;

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

void spans_of(const Cell* column, int32_t count, int32_t server, Spans* spans);

// Base loads and speeds of some ranks.
struct Pace {
    std::vector<double> base, speed;
};

double finish_time(double work, const Pace& pace);
std::vector<double> work_until(double time, const Pace& pace);
void settle_levels(const std::vector<double>& load, const Pace& pace, double finish, double tolerance,
                   std::vector<double>* give, std::vector<double>* take);

// What a round aims at, of all ranks.
struct Levels {
    explicit Levels(int64_t ranks);  // no rank gives or takes
    std::vector<double> most, give, take, slack;
};

void settle_units(const std::vector<double>& load, const Pace& pace, const std::vector<Ranks>& units, double upper,
                  Levels* levels);

// Deals out documents on many ranks by head groups, but for the rows of their first `kept` ranks.
void spread(Columns* columns, double tolerance, int64_t kept);

// Moves between the ranks of a pool.
void run_round(Columns* columns, const Levels& levels, const Ranks& pool);

}  // namespace cad
