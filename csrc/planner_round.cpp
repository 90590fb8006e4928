// One round of moves towards fixed levels: the donor whose best move is cheapest goes first.
#include "planner_round.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <tuple>

#include "planner_constants.h"

namespace cad {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

void run_round(Columns* columns, const Levels& levels, const Ranks& pool) { Round(columns, levels, pool).run(); }

void Round::run() {
    using Entry = std::pair<double, int32_t>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> heap;
    for (const int32_t rank : pool_)
        if (state.load[rank] - at.give[rank] > at.slack[rank]) {
            const Move move = choose(rank);
            if (move.server >= 0) heap.emplace(move.rate, rank);
        }
    while (!heap.empty()) {
        const auto [rate, rank] = heap.top();
        heap.pop();
        if (state.load[rank] - at.give[rank] <= at.slack[rank]) continue;
        const Move move = choose(rank);
        if (move.server < 0) continue;
        if (!heap.empty() && move.rate > heap.top().first * kDearer && move.rate > rate) {
            heap.emplace(move.rate, rank);
            continue;
        }
        apply(move);
        follow(rank, move);
        heap.emplace(move.rate, rank);
    }
}

void Round::apply(const Move& move) {
    Column cells;
    for (int32_t group = move.group_begin; group < move.group_end; ++group) {
        int32_t count;
        const Cell* column = state.column(move.document, group, &count);
        cells.assign(column, column + count);
        for (const Cell& cell : cells) {
            const int64_t low = std::max(cell.begin, move.begin), high = std::min(cell.end, move.end);
            if (low >= high) continue;
            state.move(move.document, group, low, high, move.server);
            pool_loads_.load_changed(cell.server);
        }
    }
    pool_loads_.load_changed(move.server);
}

void Round::follow(int32_t donor, const Move& move) {
    const int32_t server = move.server;
    if (move.end - move.begin > kShortSteps * p.granularity || move.group_end - move.group_begin < p.groups) return;
    if (!is_whole(state.segment_of(move.document, move.begin), 0)) return;
    for (const int32_t index : state.of_rank[donor]) {
        const Segment segment = state.segments[index];
        const int64_t rows = (segment.end - segment.begin) * p.groups;
        if (segment.end > move.end || !is_whole(index, rows)) continue;
        const double amount = state.cost_of(segment.begin, segment.end) * real(p.groups);
        const double surplus = state.load[donor] - at.give[donor], deficit = at.take[server] - state.load[server];
        if (amount > std::min(surplus, deficit)) return;
        for (int64_t group = 0; group < p.groups; ++group)
            state.move(segment.document, group, segment.begin, segment.end, server);
        pool_loads_.load_changed(donor);
        pool_loads_.load_changed(server);
    }
}

bool Round::is_whole(int32_t index, int64_t left) const {
    const Segment& segment = state.segments[index];
    const Document& document = state.documents[segment.document];
    if (state.left[index] != left || segment.begin != 0 || document.keys != 1) return false;
    const KeySegment& key = state.keys[document.first_key];
    return key.begin == 0 && key.end == segment.end && key.home == segment.home;
}

void Round::find_longest(int32_t rank) {
    items_.clear();
    size_t seen = 0;
    for (const int32_t index : state.of_rank[rank]) {
        if (state.left[index] == 0) continue;
        add_own_rows(index);
        if (++seen == kLongest) break;
    }
    sort_items();
}

void Round::add_shortest(int32_t rank) {
    const auto& own = state.of_rank[rank];
    size_t seen = 0;
    for (auto index = own.rbegin(); index != own.rend() && seen < kShortest; ++index) {
        if (state.left[*index] == 0) continue;
        add_own_rows(*index);
        ++seen;
    }
}

void Round::add_own_rows(int32_t index) {
    const Segment& segment = state.segments[index];
    state.classes(segment.document, &runs_);
    for (const auto& run : runs_) {
        int32_t count;
        const Cell* column = state.column(segment.document, run.first, &count);
        const Cell* cell = std::lower_bound(column, column + count, segment.begin,
                                            [](const Cell& one, int64_t begin) { return one.begin < begin; });
        for (; cell != column + count && cell->begin < segment.end; ++cell)
            if (cell->server == segment.home && cell->home == segment.home) {
                items_.push_back({segment.document, run.first, run.second, cell->begin, cell->end});
                break;
            }
    }
}

void Round::find_received(int32_t rank) {
    items_.clear();
    for (const int32_t document : state.served[rank]) {
        state.classes(document, &runs_);
        for (const auto& run : runs_) {
            int32_t count;
            const Cell* column = state.column(document, run.first, &count);
            for (int32_t cell = 0; cell < count; ++cell)
                if (column[cell].server == rank && column[cell].home != rank)
                    items_.push_back({document, run.first, run.second, column[cell].begin, column[cell].end});
        }
    }
    sort_items();
}

void Round::sort_items() {
    std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
        return std::tie(b.end, a.document, a.begin, a.group_begin) < std::tie(a.end, b.document, b.begin, b.group_begin);
    });
}

int64_t Round::water_level(double surplus) const {
    int64_t low = 0, high = items_[0].end;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        double shed = 0.0;
        for (const Item& item : items_) {
            if (item.end <= middle) break;
            const int64_t cut = std::max(item.begin, middle);
            shed += real(item.group_end - item.group_begin) *
                    (state.cost_of(item.begin, item.end) - state.cost_of(item.begin, cut));
        }
        if (shed >= surplus)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

void Round::find_emptiest(int32_t donor) {
    const int32_t best = pool_loads_.of_all(donor), near = pool_loads_.on_host_of(donor);
    emptiest_.clear();
    if (best >= 0) emptiest_.push_back(best);
    if (near >= 0) emptiest_.push_back(near);
}

void Round::find_receivers(int32_t donor, const Item& item) {
    receivers_ = emptiest_;
    const Document& document = state.documents[item.document];
    const KeySegment* keys = state.keys.data() + document.first_key;
    size_t found = 0;
    for (int32_t key = 0; key < document.keys && found < kNear; ++key)
        if (keys[key].home != donor && takes(keys[key].home)) {
            receivers_.push_back(keys[key].home);
            ++found;
        }
    found = 0;
    for (int32_t key = document.keys - 1; key >= 0 && found < kNear; --key)
        if (keys[key].home != donor && takes(keys[key].home)) {
            receivers_.push_back(keys[key].home);
            ++found;
        }
    int32_t count;
    const Cell* column = state.column(item.document, item.group_begin, &count);
    found = 0;
    for (int32_t cell = count - 1; cell >= 0 && found < kNear; --cell) {
        const Cell& one = column[cell];
        if (one.server != one.home && one.server != donor && takes(one.server)) {
            receivers_.push_back(one.server);
            ++found;
        }
    }
    std::sort(receivers_.begin(), receivers_.end());
    receivers_.erase(std::unique(receivers_.begin(), receivers_.end()), receivers_.end());
}

Move Round::choose(int32_t donor) {
    find_emptiest(donor);
    for (const bool own : {true, false}) {
        own ? find_longest(donor) : find_received(donor);
        if (items_.empty()) continue;
        Move move = cheapest(donor);
        if (move.server < 0) {
            if (own) add_shortest(donor);
            move = smallest_step(donor);
        }
        if (move.server >= 0) return move;
    }
    return kNoMove;
}

Move Round::cheapest(int32_t donor) {
    const double surplus = state.load[donor] - at.give[donor];
    const int64_t level = water_level(surplus);
    const Item& longest = items_[0];
    const int64_t both = p.query_bytes + p.output_bytes;
    double generic = kInfinity;
    for (const double part : kMoveShares) {
        const int64_t rows = std::max(static_cast<int64_t>(real(longest.end - longest.begin) * part), int64_t{1});
        const double amount = state.cost_of(longest.end - rows, longest.end);
        const int64_t size = rows * both + longest.end * p.key_value_bytes;
        if (amount > 0.0) generic = std::min(generic, real(size) / amount);
    }
    const double floor = state.density(level);
    const bool near = std::any_of(emptiest_.begin(), emptiest_.end(),
                                  [&](int32_t rank) { return p.host[rank] == p.host[donor]; });
    const double link = near ? p.inside : p.between;
    double fallback = generic * kLeftoverPrice * link;
    if (floor > 0.0) fallback = std::max(fallback, real(both) * link / floor);
    const Prices prices{surplus, level, fallback, real(longest.end * p.key_value_bytes) * link, link};
    Move best = kNoMove;
    int32_t seen[kDocuments];
    size_t seen_count = 0;
    for (const Item& item : items_) {
        if (std::find(seen, seen + seen_count, item.document) == seen + seen_count) {
            if (seen_count == kDocuments) break;
            seen[seen_count++] = item.document;
        }
        find_receivers(donor, item);
        for (const int32_t server : receivers_) offer_.search(donor, item, server, prices, &best);
    }
    return best;
}

Move Round::smallest_step(int32_t donor) {
    Move best = kNoMove;
    double least = kInfinity;
    for (const Item& item : items_) {
        const int64_t cut = std::max((item.end - p.granularity) / p.granularity * p.granularity, item.begin);
        const double amount = state.cost_of(cut, item.end);
        if (amount >= least) continue;
        find_receivers(donor, item);
        for (const int32_t server : receivers_)
            if (finish(server, amount) < finish(donor, 0.0)) {
                least = amount;
                best = {kInfinity, item.document, item.group_end - 1, item.group_end, cut, item.end, server};
                break;
            }
    }
    return best;
}

double Round::finish(int32_t rank, double more) const {
    if (p.speed[rank] <= 0.0) return kInfinity;
    return p.base[rank] + (state.load[rank] + more) / p.speed[rank];
}

}  // namespace cad
