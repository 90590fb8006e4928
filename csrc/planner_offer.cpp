// The best way to move rows of one donor to one server. Two kinds: the last rows of an item, and on with rows before them
// that other ranks above their level have of the same document, so that K and V are sent once for all; or the first rows,
// for whoever holds the keys before them.
#include "planner_round.h"

#include <algorithm>

#include "planner_constants.h"

namespace cad {

void Offer::search(int32_t from, const Item& what, int32_t to, const Prices& elsewhere, Move* best) {
    donor = from, item = what, server = to, prices = elsewhere;
    const double deficit = at.take[server] - state.load[server];
    const double room = at.most[server] - state.load[server];
    limit = deficit < prices.surplus && prices.surplus <= room ? prices.surplus : deficit;
    wanted = std::min(prices.surplus, limit);
    column = state.column(item.document, item.group_begin, &count);
    spans_of(column, count, server, &theirs_);
    held = state.missing(item.document, server, theirs_);
    row_bytes = p.query_bytes + p.output_bytes;
    const double dense = state.density(item.end - 1);
    row_cost = dense > 0.0 ? real(row_bytes) * prices.link / dense : 0.0;
    best_ = kNoMove;
    find_path();
    const int64_t all = item.group_end - item.group_begin;
    for (int64_t groups = 1;; groups = std::min(groups + std::max(int64_t{1}, groups / kGroupSteps), all)) {
        try_tails(groups);
        try_heads(groups);
        if (groups == all) break;
    }
    if (best_.server >= 0 && (best->server < 0 || best_.rate < best->rate)) *best = best_;
}

void Offer::find_path() {
    const Cell* cell = std::lower_bound(column, column + count, item.begin,
                                        [](const Cell& one, int64_t begin) { return one.begin < begin; });
    path_.assign(1, {item.begin, item.end, donor, cell->home});
    while (cell != column) {
        --cell;
        if (cell->end != path_.back().begin || cell->server != cell->home || cell->home == server) break;
        if (state.load[cell->home] - at.give[cell->home] <= at.slack[cell->home]) break;
        path_.push_back({cell->begin, cell->end, cell->home, cell->home});
    }
}

void Offer::try_tails(int64_t groups) {
    const double times = real(groups), key_bytes = real(p.key_value_bytes);
    double gone = 0.0, sent = 0.0, released = 0.0;
    for (size_t step = 0; step < path_.size(); ++step) {
        const auto [begin, end, owner, home] = path_[step];
        const double spare = step == 0 ? prices.surplus : state.load[owner] - at.give[owner];
        const double bytes = real(row_bytes) * (state.link(home, server) - state.link(home, owner));
        const double whole = state.cost_of(begin, end);
        find_tail_cuts(begin, end, spare / times, limit / times - gone, step == 0 ? prices.level : -1);
        for (const int64_t cut : cuts_) {
            const double gain = gone + state.cost_of(cut, end);
            const double loss = whole - state.cost_of(begin, cut);
            const double half =
                cut == begin ? 0.0 : kOvershoot * state.cost_of(cut, std::min(cut + p.granularity, end));
            if (!fits(gain * times, loss * times, spare, owner, half)) continue;
            double size = sent + real(end - cut) * bytes;
            size += new_keys(cut, item.end) * key_bytes;
            size -= released;
            if (cut == begin)
                size -= freed(begin, owner);
            else if (step == 0 && cut > prices.level)
                size += second_trip(cut);
            judge(groups, cut, item.end, gain * times, size * times);
        }
        gone += whole;
        if (gone * times > limit + at.slack[server] || whole * times > spare + at.slack[owner]) break;
        sent += real(end - begin) * bytes;
        released += freed(begin, owner);
    }
}

void Offer::try_heads(int64_t groups) {
    if (item.begin == 0) return;
    const double times = real(groups);
    const int32_t home = path_[0].home;
    const double bytes = real(row_bytes) * (state.link(home, server) - state.link(home, donor));
    const double whole = state.cost_of(item.begin, item.end);
    find_head_cuts(prices.surplus / times, limit / times);
    for (const int64_t cut : cuts_) {
        const double gain = state.cost_of(item.begin, cut);
        const double loss = whole - state.cost_of(cut, item.end);
        const double half = kOvershoot * state.cost_of(std::max(cut - p.granularity, item.begin), cut);
        if (!fits(gain * times, loss * times, prices.surplus, donor, half)) continue;
        const double size = real(cut - item.begin) * bytes + new_keys(item.begin, cut) * real(p.key_value_bytes);
        judge(groups, item.begin, cut, gain * times, size * times);
    }
}

bool Offer::fits(double gain, double loss, double spare, int32_t owner, double half) const {
    return gain <= limit + std::max(at.slack[server], half) && loss <= spare + std::max(at.slack[owner], half);
}

double Offer::new_keys(int64_t begin, int64_t end) {
    with_cut_ = theirs_;
    const Span span{begin, end};
    with_cut_.insert(std::lower_bound(with_cut_.begin(), with_cut_.end(), span), span);
    return state.missing(item.document, server, with_cut_) - held;
}

double Offer::freed(int64_t begin, int32_t owner) {
    const Document& of = state.documents[item.document];
    if (of.keys == 1 && state.keys[of.first_key].home == owner) return 0.0;
    now_.clear();
    then_.clear();
    for (int32_t cell = 0; cell < count; ++cell) {
        if (column[cell].server != owner) continue;
        now_.emplace_back(column[cell].begin, column[cell].end);
        if (column[cell].begin != begin) then_.push_back(now_.back());
    }
    const double now = state.missing(item.document, owner, now_), then = state.missing(item.document, owner, then_);
    return (now - then) * real(p.key_value_bytes);
}

double Offer::second_trip(int64_t cut) const {
    double again = real(row_bytes * (cut - prices.level));
    const double ground = state.density(prices.level);
    if (ground > 0.0) again *= state.density((cut + prices.level) / 2) / ground - 1.0;
    return std::min(again, real(p.key_value_bytes * cut)) * prices.link;
}

void Offer::judge(int64_t groups, int64_t begin, int64_t end, double moved, double size) {
    double left = wanted - moved, price = 0.0;
    if (left > at.slack[server])
        price = std::max(left * prices.fallback, prices.fixed + left * row_cost);
    else if (left < 0.0)
        left = 0.0;
    const double rate = (size + price) / (moved + left);
    if (best_.server < 0 || rate < best_.rate)
        best_ = {rate, item.document, item.group_end - static_cast<int32_t>(groups), item.group_end, begin, end, server};
}

void Offer::find_tail_cuts(int64_t begin, int64_t end, double most_loss, double most_gain, int64_t level) {
    const int64_t step = p.granularity, first = (begin + step - 1) / step + 1, last = end / step - 1;
    const double whole = state.cost_of(begin, end);
    int64_t low = first, high = std::max(first, last + 1);
    while (low < high) {
        const int64_t middle = (low + high) / 2, row = middle * step;
        if (whole - state.cost_of(begin, row) > most_loss || state.cost_of(row, end) > most_gain)
            low = middle + 1;
        else
            high = middle;
    }
    cuts_.assign(1, begin);
    const int64_t places[] = {low - 1, low, level < 0 ? int64_t{0} : (level + step / 2) / step};  // 0 is before first
    for (const int64_t place : places)
        if (first <= place && place <= last) cuts_.push_back(place * step);
}

void Offer::find_head_cuts(double most_loss, double most_gain) {
    const int64_t step = p.granularity, first = (item.begin + step - 1) / step + 1;
    const int64_t last = item.end / step - 1;
    const double whole = state.cost_of(item.begin, item.end);
    int64_t low = first, high = std::max(first, last + 1);
    while (low < high) {
        const int64_t middle = (low + high) / 2, row = middle * step;
        if (whole - state.cost_of(row, item.end) > most_loss || state.cost_of(item.begin, row) > most_gain)
            high = middle;
        else
            low = middle + 1;
    }
    cuts_.clear();
    for (const int64_t place : {low - 1, low})
        if (first <= place && place <= last) cuts_.push_back(place * step);
}

}  // namespace cad
