// One round of moves towards fixed levels, and the search for the best one: planner/round.py and planner/offers.py.
#pragma once

#include "planner.h"
#include "planner_emptiest.h"

namespace cad {

struct Item {
    int32_t document, group_begin, group_end;
    int64_t begin, end;
};

struct Move {
    double rate;
    int32_t document, group_begin, group_end;
    int64_t begin, end;
    int32_t server;  // -1: none
};

struct Prices {
    double surplus;
    int64_t level;
    double fallback, fixed, link;
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

    void find_path();
    void try_tails(int64_t groups);
    void try_heads(int64_t groups);
    bool fits(double gain, double loss, double spare, int32_t owner, double half) const;
    Missing new_keys(int64_t begin, int64_t end);
    double freed(int64_t begin, int32_t owner);
    double second_trip(int64_t cut) const;
    bool has_room(int32_t owner, int32_t home, int64_t groups, int64_t rows, int64_t keys, int64_t landing) const;
    void judge(int64_t groups, int64_t begin, int64_t end, double moved, double size);
    void find_tail_cuts(int64_t begin, int64_t end, double most_loss, double most_gain, int64_t level);
    void find_head_cuts(double most_loss, double most_gain);

    const Columns& state;
    const Problem& p;
    const Levels& at;
    Item item{};
    Prices prices{};
    int32_t donor = 0, server = 0, count = 0;
    const Cell* column = nullptr;
    int64_t row_bytes = 0;
    double limit = 0.0, wanted = 0.0, row_cost = 0.0;
    Missing held{};
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
    Move choose(int32_t donor);
    void find_longest(int32_t rank);
    void add_shortest(int32_t rank);
    void add_own_rows(int32_t index);
    void find_received(int32_t rank);
    void sort_items();
    int64_t water_level(double surplus) const;
    void find_emptiest(int32_t donor);
    void find_receivers(int32_t donor, const Item& item);
    bool takes(int32_t rank) const { return at.take[rank] - state.load[rank] > at.slack[rank]; }
    Move cheapest(int32_t donor);
    Move smallest_step(int32_t donor);
    double finish(int32_t rank, double more) const;
    bool fits(int32_t donor, int32_t server, const Item& item, int64_t cut) const;
    void apply(const Move& move);
    void follow(int32_t donor, const Move& move);
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
