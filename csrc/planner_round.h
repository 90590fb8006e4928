// One round of moves towards fixed levels (planner_round.cpp), and the search for the best one (planner_offer.cpp).
#pragma once

#include "planner.h"
#include "planner_emptiest.h"

namespace cad {

// Rows [begin, end) that a rank runs of head groups [group_begin, group_end) of a document, which are in the same state.
struct Item {
    int32_t document, group_begin, group_end;
    int64_t begin, end;
};

// Rows of some head groups of a document go to another server.
struct Move {
    double rate;  // bytes per unit of load, what is left to be moved included
    int32_t document, group_begin, group_end;
    int64_t begin, end;
    int32_t server;  // -1: none
};

// What the donor would pay elsewhere for what a move leaves.
struct Prices {
    double surplus;   // load that it has to give
    int64_t level;    // position behind which all its rows must leave for that
    double fallback;  // bytes per unit of load of another move
    double fixed;     // bytes of that move's K and V
    double link;      // weight of a byte of that move: inside a host where a rank of the donor's host takes
};

// The search for the best move of an item to a server; one object serves all searches of a round.
class Offer {
public:
    Offer(const Columns& columns, const Levels& levels) : state(columns), p(columns.p), at(levels) {}
    // Puts the best move into `best` if it is cheaper than what is there.
    void search(int32_t donor, const Item& item, int32_t server, const Prices& prices, Move* best);

private:
    struct PathCell {
        int64_t begin, end;
        int32_t owner, home;
    };

    // The item's rows, and before them rows of the same document on other ranks that give, last first.
    void find_path();
    // The last rows of the item, and of cells before it.
    void try_tails(int64_t groups);
    // The first rows of an item in the middle of a document.
    void try_heads(int64_t groups);
    // Whether neither side moves more than it wants; half a granule more is rounding.
    bool fits(double gain, double loss, double spare, int32_t owner, double half) const;
    // K and V that the server must receive in addition.
    double new_keys(int64_t begin, int64_t end);
    // Bytes of K and V that a server need not receive any more without its cell at `begin`.
    double freed(int64_t begin, int32_t owner);
    // What it costs that rows between the level and the cut must leave later: K and V again, or worse rows.
    double second_trip(int64_t cut) const;
    // Keeps the move if it is the cheapest, with a price on what it leaves to another one.
    void judge(int64_t groups, int64_t begin, int64_t end, double moved, double size);
    // Where last rows may begin: where they are what is wanted, at the water level, at the begin of the cell.
    void find_tail_cuts(int64_t begin, int64_t end, double most_loss, double most_gain, int64_t level);
    // Where first rows may end.
    void find_head_cuts(double most_loss, double most_gain);

    const Columns& state;
    const Problem& p;
    const Levels& at;
    Item item{};
    Prices prices{};
    int32_t donor = 0, server = 0, count = 0;
    const Cell* column = nullptr;
    int64_t row_bytes = 0;
    double limit = 0.0;     // the server takes no more than this
    double wanted = 0.0;    // load that the move should have
    double row_cost = 0.0;  // bytes per unit of load of the item's last row
    double held = 0.0;       // what the server lacks without the move
    Move best_{};
    std::vector<PathCell> path_;
    std::vector<int64_t> cuts_;
    Spans theirs_, with_cut_, now_, then_;
};

class Round {
public:
    Round(Columns* columns, const Levels& levels, const Ranks& pool)
        : state(*columns), p(columns->p), at(levels), pool_(pool), pool_loads_(*columns, levels, pool),
          offer_(*columns, levels) {}
    void run();

private:
    // The move of the fewest bytes per unit of load: of own rows, or where none helps of rows of others.
    Move choose(int32_t donor);
    // Into items_: what a rank still runs of its longest segments, last rows first.
    void find_longest(int32_t rank);
    // Adds the same of its shortest segments.
    void add_shortest(int32_t rank);
    void add_own_rows(int32_t index);
    // Into items_: what the rank runs of other ranks' rows.
    void find_received(int32_t rank);
    void sort_items();
    // The position behind which rows of items_ must leave for the surplus to be gone.
    int64_t water_level(double surplus) const;
    // Into emptiest_: the server farthest below its level, overall and on the donor's host.
    void find_emptiest(int32_t donor);
    // Into receivers_: servers worth looking at, the emptiest and those that hold keys of the document.
    void find_receivers(int32_t donor, const Item& item);
    bool takes(int32_t rank) const { return at.take[rank] - state.load[rank] > at.slack[rank]; }
    Move cheapest(int32_t donor);
    // Where every cut is too coarse: the least that can move, if its server then ends before the donor does now.
    Move smallest_step(int32_t donor);
    // When a rank would stop with so much more load.
    double finish(int32_t rank, double more) const;
    void apply(const Move& move);
    // After a whole short document, further ones to the same server: one search for many.
    void follow(int32_t donor, const Move& move);
    // Whether a segment is a whole document, keys and all, of which so many rows times head groups are at home.
    bool is_whole(int32_t index, int64_t left) const;

    Columns& state;
    const Problem& p;
    const Levels& at;
    const Ranks& pool_;
    Emptiest pool_loads_;
    Offer offer_;
    std::vector<Item> items_;
    std::vector<int32_t> emptiest_, receivers_;
    std::vector<std::pair<int32_t, int32_t>> runs_;
};

inline double real(int64_t value) { return static_cast<double>(value); }

constexpr Move kNoMove{0.0, 0, 0, 0, 0, 0, -1};

}  // namespace cad
