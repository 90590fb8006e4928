// What the columns as they are would move between ranks.
#include <algorithm>
#include <tuple>

#include "planner.h"

namespace cad {

bool Flows::Pair::operator<(const Pair& other) const {
    return std::tie(home, server, with_rows) < std::tie(other.home, other.server, other.with_rows);
}

// Keys that rows of a document read.
int64_t Columns::keys_read(const Spans& spans) const {
    int64_t rows = 0, reach = 0;
    for (const Span& span : spans) {
        rows += span.second - std::max(first_key(span.first), reach);
        reach = span.second;
    }
    return rows;
}

Flows Columns::flows() const {
    enum { kQkvSent, kQkvReceived, kOSent, kOReceived };
    Flows found;
    found.bytes.assign(4 * 2 * p.ranks, 0);
    found.waiting.assign(p.ranks, 0.0);
    found.parts.assign(p.ranks, 0.0);
    found.served.assign(2 * p.ranks, 0);
    const auto send = [&](int32_t home, int32_t server, int64_t rows, int64_t key_rows) {
        if (home == server || rows + key_rows == 0) return;
        const int64_t where = p.host[home] == p.host[server] ? 0 : 1;
        const auto count = [&](int what, int32_t rank, int64_t bytes) {
            found.bytes[(what * 2 + where) * p.ranks + rank] += bytes;
        };
        const int64_t out = rows * p.query_bytes + key_rows * p.key_value_bytes;
        count(kQkvSent, home, out);
        count(kQkvReceived, server, out);
        count(kOSent, server, rows * p.output_bytes);
        count(kOReceived, home, rows * p.output_bytes);
        found.pairs.push_back({home, server, rows > 0});
    };
    std::vector<std::pair<int32_t, int32_t>> runs;
    std::vector<std::pair<int32_t, Cell>> reads;
    Spans needed, apart;
    std::vector<int64_t> rows_of(p.ranks, 0);
    for (const Segment& segment : segments) rows_of[segment.home] += segment.end - segment.begin;
    for (size_t at = 0; at < documents.size(); ++at) {
        const Document& document = documents[at];
        const KeySegment* own_keys = keys.data() + document.first_key;
        if (document.touched < 0 && document.segments == 1 && document.keys == 1 &&
            own_keys->home == segments[document.first_segment].home)
            continue;
        classes(static_cast<int32_t>(at), &runs);
        for (const auto& run : runs) {
            const int64_t groups = run.second - run.first;
            int32_t count;
            const Cell* cells = column(static_cast<int32_t>(at), run.first, &count);
            reads.clear();
            for (int32_t cell = 0; cell < count; ++cell) reads.emplace_back(cells[cell].server, cells[cell]);
            std::stable_sort(reads.begin(), reads.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
            for (size_t read = 0; read < reads.size();) {
                const int32_t server = reads[read].first;
                double own = 0.0, others = 0.0;
                int64_t in_place = 0;
                needed.clear();
                apart.clear();
                for (; read < reads.size() && reads[read].first == server; ++read) {
                    const Cell& cell = reads[read].second;
                    const bool goes_on = read + 1 < reads.size() && reads[read + 1].first == server &&
                                         reads[read + 1].second.begin == cell.end;
                    if (!apart.empty() && apart.back().second == cell.begin)
                        apart.back().second = cell.end;
                    else if (goes_on || cell.home != server)
                        apart.emplace_back(cell.begin, cell.end);
                    else if (!holds(static_cast<int32_t>(at), server, first_key(cell.begin), cell.end)) {
                        apart.emplace_back(cell.begin, cell.end);
                        if ((cell.end - cell.begin) * p.in_place >= rows_of[server]) in_place += cell.end - cell.begin;
                    }
                    const int64_t start = first_key(cell.begin);
                    if (!needed.empty() && start <= needed.back().second)
                        needed.back().second = cell.end;
                    else
                        needed.emplace_back(start, cell.end);
                    if (cell.home == server) {
                        own += cost_of(cell.begin, cell.end);
                    } else {
                        others += cost_of(cell.begin, cell.end);
                        send(cell.home, server, (cell.end - cell.begin) * groups, 0);
                    }
                }
                for (const Span& span : apart) found.served[server] += (span.second - span.first) * groups;
                found.served[server] -= in_place * groups;
                found.served[p.ranks + server] += keys_read(apart) * groups;
                bool reached = false;
                for (int32_t key = 0; key < document.keys; ++key) {
                    if (own_keys[key].begin >= needed.back().second) break;
                    const int64_t rows = own_keys[key].home == server ? 0 : overlap(needed, own_keys[key]);
                    if (rows == 0) continue;
                    send(own_keys[key].home, server, 0, rows * groups);
                    reached = true;
                }
                const double waits = reached ? others + own : others;
                found.waiting[server] += waits * static_cast<double>(groups);
                if (waits > 0.0) found.parts[server] += static_cast<double>(groups);
            }
        }
    }
    // Of each two ranks the entry with rows stays, if there is one.
    std::sort(found.pairs.begin(), found.pairs.end());
    std::vector<Flows::Pair> once;
    for (const Flows::Pair& pair : found.pairs) {
        if (!once.empty() && once.back().home == pair.home && once.back().server == pair.server)
            once.back() = pair;
        else
            once.push_back(pair);
    }
    found.pairs = std::move(once);
    return found;
}

}  // namespace cad
