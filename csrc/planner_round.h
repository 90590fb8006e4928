// One round of moves towards fixed levels: class Round of planner/reference.py.
#pragma once

#include "planner.h"

namespace cad {

struct Item {
    int32_t document, group_begin, group_end;
    int64_t begin, end;
};

struct Move {
    double rate;
    int32_t document, group_begin, group_end;
    int64_t cut, end;
    int32_t server;  // -1: none
};

struct PathCell {
    int64_t begin, end;
    int32_t owner, home;
};

class Round {
public:
    Round(Columns* columns, const Levels& levels) : state(*columns), p(columns->p), at(levels) {}
    void run();

private:
    struct Prices {
        double surplus, fallback, fixed;
        int64_t level;
    };

    Move choose(int32_t donor);
    void find_own(int32_t rank);
    void find_received(int32_t rank);
    void sort_items();
    int64_t water_level(double surplus) const;
    double density(int64_t position) const;
    void find_emptiest(int32_t donor);
    void find_receivers(int32_t donor, const Item& item);
    bool takes(int32_t rank) const { return at.take[rank] - state.load[rank] > at.slack[rank]; }
    Move cheapest(int32_t donor);
    Move smallest_step(int32_t donor);
    double finish(int32_t rank, double more) const;
    bool fits(int32_t donor, int32_t server, const Item& item, int64_t cut) const;
    void best_cut(int32_t donor, const Item& item, int32_t server, const Prices& prices, Move* best);
    double freed(int32_t document, const Cell* column, int32_t count, int64_t begin, int32_t owner);
    void find_path(const Cell* column, int32_t count, const Item& item, int32_t donor, int32_t server);
    void find_cuts(int64_t begin, int64_t end, double most_loss, double most_gain, int64_t level);
    void apply(const Move& move);

    Columns& state;
    const Problem& p;
    const Levels& at;
    std::vector<Item> items_;
    std::vector<int32_t> emptiest_, receivers_;
    std::vector<PathCell> path_;
    std::vector<int64_t> cuts_;
    std::vector<std::pair<int32_t, int32_t>> runs_;
    Spans theirs_, with_cut_, now_, then_;
};

}  // namespace cad
