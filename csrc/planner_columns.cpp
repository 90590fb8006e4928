// Who runs which rows of each (document, head group), and what a move would cost.
#include "planner.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace cad {

constexpr int32_t kFewKeys = 8;  // up to here a loop over all key segments of a document is fastest

bool Task::operator<(const Task& other) const {
    return std::tie(document, begin, end, group_begin, group_end, server) <
           std::tie(other.document, other.begin, other.end, other.group_begin, other.group_end, other.server);
}

void spans_of(const Cell* column, int32_t count, int32_t server, Spans* spans) {
    spans->clear();
    for (int32_t at = 0; at < count; ++at) {
        if (column[at].server != server) continue;
        if (!spans->empty() && spans->back().second == column[at].begin)
            spans->back().second = column[at].end;
        else
            spans->emplace_back(column[at].begin, column[at].end);
    }
}

namespace {

std::vector<int32_t> sorted_rows(int64_t count, const int64_t* document, const int64_t* begin, const int64_t* end,
                                 const int64_t* rank) {
    std::vector<int32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    const auto less = [&](int32_t a, int32_t b) {
        return std::tie(document[a], begin[a], end[a], rank[a]) < std::tie(document[b], begin[b], end[b], rank[b]);
    };
    if (!std::is_sorted(order.begin(), order.end(), less)) std::sort(order.begin(), order.end(), less);
    return order;
}

// Cells that continue each other with the same server and home become one.
void join(Column* column) {
    for (size_t next = 1; next < column->size();) {
        Cell& left = (*column)[next - 1];
        const Cell& right = (*column)[next];
        if (left.end == right.begin && left.server == right.server && left.home == right.home) {
            left.end = right.end;
            column->erase(column->begin() + next);
        } else {
            ++next;
        }
    }
}

}  // namespace

Columns::Columns(const Problem& problem)
    : p(problem), of_rank(p.ranks), served(p.ranks), load(p.ranks, 0.0) {
    const auto query = sorted_rows(p.query_count, p.query_document, p.query_begin, p.query_end, p.query_rank);
    const auto key = sorted_rows(p.key_count, p.key_document, p.key_begin, p.key_end, p.key_rank);
    segments.reserve(query.size());
    for (const int32_t at : query) {
        const int64_t id = p.query_document[at], begin = p.query_begin[at], end = p.query_end[at];
        const auto home = static_cast<int32_t>(p.query_rank[at]);
        if (begin == end) continue;
        if (documents.empty() || documents.back().id != id)
            documents.push_back({id, static_cast<int32_t>(segments.size()), 0, 0, 0, -1});
        Document& document = documents.back();
        if (document.segments && segments.back().end == begin && segments.back().home == home) {
            segments.back().end = end;
            continue;
        }
        segments.push_back({static_cast<int32_t>(documents.size()) - 1, begin, end, home});
        ++document.segments;
    }
    size_t next = 0;
    keys.reserve(key.size());
    for (Document& document : documents) {
        while (next < key.size() && p.key_document[key[next]] < document.id) ++next;
        document.first_key = static_cast<int32_t>(keys.size());
        int64_t rows = 0;
        for (; next < key.size() && p.key_document[key[next]] == document.id; ++next) {
            const int32_t at = key[next];
            keys.push_back({p.key_begin[at], p.key_end[at], static_cast<int32_t>(p.key_rank[at])});
            rows_before_.push_back(rows);
            rows += p.key_end[at] - p.key_begin[at];
        }
        document.keys = static_cast<int32_t>(keys.size()) - document.first_key;
    }
    keys_by_rank_.resize(keys.size());
    std::iota(keys_by_rank_.begin(), keys_by_rank_.end(), 0);
    for (const Document& document : documents) {
        if (document.keys <= kFewKeys) continue;
        const auto from = keys_by_rank_.begin() + document.first_key;
        std::stable_sort(from, from + document.keys, [&](int32_t a, int32_t b) {
            const int32_t one = keys[a].home, other = keys[b].home;
            return std::tie(p.host[one], one) < std::tie(p.host[other], other);
        });
    }
    base_.reserve(segments.size());
    for (size_t index = 0; index < segments.size(); ++index) {
        const Segment& segment = segments[index];
        base_.push_back({segment.begin, segment.end, segment.home, segment.home});
        of_rank[segment.home].push_back(static_cast<int32_t>(index));
        load[segment.home] += cost_of(segment.begin, segment.end) * static_cast<double>(p.groups);
    }
    for (auto& own : of_rank)
        std::sort(own.begin(), own.end(), [&](int32_t a, int32_t b) {
            return segments[a].end != segments[b].end ? segments[a].end > segments[b].end : a < b;
        });
    left.reserve(segments.size());
    for (const Segment& segment : segments) left.push_back((segment.end - segment.begin) * p.groups);
}

int64_t Columns::pairs(int64_t begin, int64_t end) const {
    if (p.window == 0) return (end * (end + 1) - begin * (begin + 1)) / 2;
    const int64_t low = std::min(begin, p.window), high = std::min(end, p.window);
    const int64_t ramp = (high * (high + 1) - low * (low + 1)) / 2;
    return ramp + ((end - high) - (begin - low)) * p.window;
}

double Columns::cost_of(int64_t begin, int64_t end) const {
    if (begin >= end) return 0.0;
    const int64_t keys_read = end - first_key(begin);
    double cost = p.pair * static_cast<double>(pairs(begin, end));
    cost += p.row * static_cast<double>(end - begin);
    cost += p.key * static_cast<double>(keys_read);
    return cost + p.task;
}

const Cell* Columns::column(int32_t document, int64_t group, int32_t* count) const {
    const Document& of = documents[document];
    if (of.touched < 0) {
        *count = of.segments;
        return &base_[of.first_segment];
    }
    const Column& column = touched_[of.touched][group];
    *count = static_cast<int32_t>(column.size());
    return column.data();
}

std::vector<Column>& Columns::touch(int32_t document) {
    Document& of = documents[document];
    if (of.touched < 0) {
        of.touched = static_cast<int32_t>(touched_.size());
        const auto from = base_.begin() + of.first_segment;
        touched_.emplace_back(p.groups, Column(from, from + of.segments));
    }
    return touched_[of.touched];
}

void Columns::classes(int32_t document, std::vector<std::pair<int32_t, int32_t>>* runs) const {
    runs->clear();
    const Document& of = documents[document];
    const auto groups = static_cast<int32_t>(p.groups);
    if (of.touched < 0) {
        runs->emplace_back(0, groups);
        return;
    }
    const auto& columns = touched_[of.touched];
    int32_t first = 0;
    for (int32_t group = 1; group <= groups; ++group)
        if (group == groups || columns[group] != columns[first]) {
            runs->emplace_back(first, group);
            first = group;
        }
}

int64_t Columns::overlap(const Spans& needed, const KeySegment& key) const {
    int64_t rows = 0;
    for (const Span& span : needed)
        if (span.first < key.end && key.begin < span.second)
            rows += std::min(span.second, key.end) - std::max(span.first, key.begin);
    return rows;
}

double Columns::missing(int32_t document, int32_t server, const Spans& spans) const {
    Spans& needed = needed_;
    needed.clear();
    int64_t reach = -1;
    for (const Span& span : spans) {
        const int64_t start = first_key(span.first);
        if (start <= reach)
            needed.back().second = span.second;
        else
            needed.emplace_back(start, span.second);
        reach = span.second;
    }
    const Document& of = documents[document];
    int64_t inside = 0, between = 0;
    const int64_t host = p.host[server];
    const KeySegment* own = keys.data() + of.first_key;
    if (of.keys <= kFewKeys) {
        for (int32_t at = 0; at < of.keys; ++at) {
            if (own[at].home == server) continue;
            (p.host[own[at].home] == host ? inside : between) += overlap(needed, own[at]);
        }
    } else {
        const auto below = [&](int64_t position) {
            const KeySegment* after = std::lower_bound(
                own, own + of.keys, position, [](const KeySegment& key, int64_t value) { return key.begin < value; });
            if (after == own) return int64_t{0};
            const KeySegment* last = after - 1;
            return rows_before_[last - keys.data()] + std::min(position, last->end) - last->begin;
        };
        for (const Span& span : needed) between += below(span.second) - below(span.first);
        const auto from = keys_by_rank_.begin() + of.first_key, to = from + of.keys;
        if (p.hosts == 1) {  // all that is not the server's own lies inside
            auto at = std::lower_bound(from, to, server, [&](int32_t key, int32_t rank) { return keys[key].home < rank; });
            for (; at != to && keys[*at].home == server; ++at) between -= overlap(needed, keys[*at]);
            inside = between;
            between = 0;
        } else {
            auto at = std::lower_bound(from, to, host,
                                       [&](int32_t key, int64_t value) { return p.host[keys[key].home] < value; });
            for (; at != to && p.host[keys[*at].home] == host; ++at) {
                const int64_t rows = overlap(needed, keys[*at]);
                between -= rows;
                if (keys[*at].home != server) inside += rows;
            }
        }
    }
    return p.inside * static_cast<double>(inside) + p.between * static_cast<double>(between);
}

double Columns::run_cost(const Spans& spans) const {
    double total = 0.0;
    for (const Span& span : spans) total += cost_of(span.first, span.second);
    return total;
}

bool Columns::holds(int32_t document, int32_t rank, int64_t begin, int64_t end) const {
    const KeySegment* own = keys.data() + documents[document].first_key;
    const KeySegment* after = std::upper_bound(own, own + documents[document].keys, begin,
                                               [](int64_t value, const KeySegment& key) { return value < key.begin; });
    return after != own && end <= after[-1].end && after[-1].home == rank;
}

void Columns::move(int32_t document, int64_t group, int64_t begin, int64_t end, int32_t server) {
    Column& column = touch(document)[group];
    size_t at = 0;
    while (!(column[at].begin <= begin && end <= column[at].end)) ++at;
    const Cell cell = column[at];
    const int32_t old = cell.server, home = cell.home;
    Spans before_old, before_new, after_old, after_new;
    const auto count = [&] { return static_cast<int32_t>(column.size()); };
    spans_of(column.data(), count(), old, &before_old);
    spans_of(column.data(), count(), server, &before_new);
    Column parts;
    if (cell.begin < begin) parts.push_back({cell.begin, begin, old, home});
    parts.push_back({begin, end, server, home});
    if (end < cell.end) parts.push_back({end, cell.end, old, home});
    column.erase(column.begin() + at);
    column.insert(column.begin() + at, parts.begin(), parts.end());
    join(&column);
    spans_of(column.data(), count(), old, &after_old);
    spans_of(column.data(), count(), server, &after_new);
    load[old] += run_cost(after_old) - run_cost(before_old);
    load[server] += run_cost(after_new) - run_cost(before_new);
    if (old != server && (old == home || server == home))
        left[segment_of(document, begin)] += server == home ? end - begin : begin - end;
    if (server != home) note_served(server, document);
}

void Columns::place(int32_t document, int64_t group, const std::vector<Run>& runs) {
    Column& column = touch(document)[group];
    Column placed;
    size_t at = 0;
    for (const Cell& cell : column) {
        for (int64_t row = cell.begin; row < cell.end;) {
            while (at < runs.size() && runs[at].end <= row) ++at;
            if (at == runs.size() || runs[at].begin >= cell.end) {
                placed.push_back({row, cell.end, cell.server, cell.home});
                break;
            }
            if (row < runs[at].begin) {
                placed.push_back({row, runs[at].begin, cell.server, cell.home});
                row = runs[at].begin;
            }
            const int64_t upto = std::min(cell.end, runs[at].end);
            placed.push_back({row, upto, runs[at].server, cell.home});
            row = upto;
        }
    }
    join(&placed);
    Ranks ranks;
    for (const Column* one : {&column, &placed})
        for (const Cell& cell : *one) ranks.push_back(cell.server);
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    Spans before, after;
    for (const int32_t rank : ranks) {
        spans_of(column.data(), static_cast<int32_t>(column.size()), rank, &before);
        spans_of(placed.data(), static_cast<int32_t>(placed.size()), rank, &after);
        load[rank] += run_cost(after) - run_cost(before);
    }
    for (const Cell& cell : placed) {
        if (cell.server == cell.home) continue;
        note_served(cell.server, document);
        left[segment_of(document, cell.begin)] -= cell.end - cell.begin;
    }
    column = std::move(placed);
}

void Columns::note_served(int32_t server, int32_t document) {
    auto& mine = served[server];
    if (std::find(mine.begin(), mine.end(), document) == mine.end()) mine.push_back(document);
}

int32_t Columns::segment_of(int32_t document, int64_t row) const {
    const auto first = segments.begin() + documents[document].first_segment;
    const auto found = std::upper_bound(first, first + documents[document].segments, row,
                                        [](int64_t value, const Segment& segment) { return value < segment.end; });
    return static_cast<int32_t>(found - segments.begin());
}

std::vector<Task> Columns::tasks() const {
    struct Open {
        int64_t begin, end;
        int32_t server, group;
    };
    std::vector<Task> tasks;
    tasks.reserve(segments.size() + 8 * touched_.size());
    std::vector<Open> open, still;
    for (size_t at = 0; at < documents.size(); ++at) {
        const Document& document = documents[at];
        const size_t first_task = tasks.size();
        const int64_t groups = document.touched < 0 ? 1 : p.groups;
        open.clear();
        for (int64_t group = 0; group < groups; ++group) {
            int32_t count;
            const Cell* cells = column(static_cast<int32_t>(at), group, &count);
            still.clear();
            for (int32_t cell = 0; cell < count;) {
                Open span{cells[cell].begin, cells[cell].end, cells[cell].server, static_cast<int32_t>(group)};
                for (++cell; cell < count && cells[cell].server == span.server && cells[cell].begin == span.end; ++cell)
                    span.end = cells[cell].end;
                for (size_t other = 0; other < open.size(); ++other)
                    if (open[other].begin == span.begin && open[other].end == span.end &&
                        open[other].server == span.server) {
                        span.group = open[other].group;
                        open.erase(open.begin() + other);
                        break;
                    }
                still.push_back(span);
            }
            for (const Open& span : open) tasks.push_back({document.id, span.begin, span.end, span.group, group, span.server});
            std::swap(open, still);
        }
        for (const Open& span : open)
            tasks.push_back({document.id, span.begin, span.end, span.group, p.groups, span.server});
        std::sort(tasks.begin() + first_task, tasks.end());
    }
    return tasks;
}

}  // namespace cad
