// Documents on many ranks, dealt out by head groups before anything is balanced.
//
// At home the last rank of a long document reads all keys before its rows, for every head group. Where a rank runs few
// head groups over all rows instead, it reads keys of few head groups, every rank as many. So all head groups of the rows
// that are dealt out are laid one behind the other on a line, as long as their work, and each rank takes a stretch of it:
// its share, with which it ends when all others do. A stretch that ends within a head group cuts its rows in two.
#include <algorithm>
#include <tuple>

#include "planner.h"
#include "planner_constants.h"

namespace cad {
namespace {

// Rows [begin, end) of a document that its homes share, of all head groups.
struct Band {
    int32_t document;
    int64_t begin, end;
    int32_t first_segment, last_segment;  // those that hold its rows
    Ranks homes;                          // all that hold rows of the document, in the order of its rows
    double group;                         // work of one head group if one rank runs it
};

// Who takes part in a document, and how much of the work each.
struct Shares {
    Ranks ranks;  // in the order of the line
    std::vector<double> work;
};

// What is dealt out: of documents without gaps, of which the last segment reads keys of READ_FROM ranks.
std::vector<Band> find_bands(const Columns& columns, int64_t kept) {
    std::vector<Band> found;
    if (columns.p.groups == 1) return found;
    std::vector<char> seen(columns.p.ranks, 0);
    for (size_t at = 0; at < columns.documents.size(); ++at) {
        const Document& document = columns.documents[at];
        const int32_t first = document.first_segment, last = first + document.segments - 1;
        if (last - first < std::max(columns.p.read_from - 1, kept + 1)) continue;
        const Segment* segments = columns.segments.data();
        bool whole = true;
        for (int32_t index = first + 1; index <= last; ++index) whole &= segments[index].begin == segments[index - 1].end;
        if (!whole) continue;
        const int64_t reach = columns.first_key(segments[last].begin);
        // Each home once, and of how many keys are read.
        Ranks homes, read;
        for (int32_t index = first; index <= last; ++index) {
            const int32_t home = segments[index].home;
            if (!(seen[home] & 1)) homes.push_back(home);
            if (!(seen[home] & 2) && segments[index].end > reach) read.push_back(home);
            seen[home] |= segments[index].end > reach ? 3 : 1;
        }
        for (const int32_t home : homes) seen[home] = 0;
        if (static_cast<int64_t>(read.size()) < columns.p.read_from) continue;
        const int64_t begin = segments[first + kept].begin, end = segments[last].end;
        found.push_back({static_cast<int32_t>(at), begin, end, first + static_cast<int32_t>(kept), last, homes,
                         columns.cost_of(begin, end)});
    }
    return found;
}

// A document's homes take part, and where they would end after `most`, the emptiest other ranks of their hosts. All end
// together. `others`: what each rank runs besides; `finish`: when all work would be done.
Shares find_shares(const Columns& columns, const Band& band, const std::vector<double>& others, double finish,
                   double most) {
    const Problem& p = columns.p;
    Ranks ranks = band.homes, idle;
    std::vector<char> near(p.hosts, 0), takes_part(p.ranks, 0);
    for (const int32_t rank : ranks) near[p.host[rank]] = takes_part[rank] = 1;
    Pace all;
    all.base.assign(p.base, p.base + p.ranks);
    all.speed.assign(p.speed, p.speed + p.ranks);
    const auto room = work_until(finish, all);
    for (int32_t rank = 0; rank < p.ranks; ++rank)
        if (!takes_part[rank] && near[p.host[rank]] && room[rank] - others[rank] >= kHelp * band.group)
            idle.push_back(rank);
    std::stable_sort(idle.begin(), idle.end(), [&](int32_t a, int32_t b) {
        return others[a] - room[a] < others[b] - room[b];
    });
    const double work = band.group * static_cast<double>(p.groups);
    for (size_t next = 0;; ++next) {
        Pace pace;
        for (const int32_t rank : ranks) {
            pace.speed.push_back(p.speed[rank]);
            pace.base.push_back(p.base[rank] + (p.speed[rank] > 0.0 ? others[rank] / p.speed[rank] : 0.0));
        }
        const double end = finish_time(work, pace);
        if ((end > 0.0 && end <= most) || next == idle.size()) return {ranks, work_until(end, pace)};
        ranks.push_back(idle[next]);
    }
}

// The row, on the granularity, before which rows of the band are nearest to so much work of one head group.
int64_t cut_at(const Columns& columns, const Band& band, double work) {
    const int64_t step = columns.p.granularity;
    const int64_t first = band.begin / step + 1, last = (band.end + step - 1) / step - 1;
    int64_t low = first, high = last + 1;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (columns.cost_of(band.begin, middle * step) < work)
            low = middle + 1;
        else
            high = middle;
    }
    const int64_t before = low == first ? band.begin : (low - 1) * step;
    const int64_t after = low > last ? band.end : low * step;
    return work - columns.cost_of(band.begin, before) <= columns.cost_of(band.begin, after) - work ? before : after;
}

// For each head group the runs of rows that cover the band, by where shares end on the line; none where no rank has a
// share. An end that is nearer than `slack` to one of a head group is moved there.
std::vector<std::vector<Run>> find_stretches(const Columns& columns, const Band& band, const Shares& shares,
                                             double slack) {
    const int64_t groups = columns.p.groups;
    std::vector<std::vector<Run>> runs(groups);
    double total = 0.0;
    size_t last = 0;
    for (size_t at = 0; at < shares.work.size(); ++at) {
        total += shares.work[at];
        if (shares.work[at] > 0.0) last = at;
    }
    if (total <= 0.0) return runs;
    std::pair<int64_t, int64_t> now{0, band.begin};  // head group and row up to which the line is dealt out
    double gone = 0.0;
    for (size_t at = 0; at <= last; ++at) {
        gone += shares.work[at];
        const double place = gone / total * static_cast<double>(groups);
        std::pair<int64_t, int64_t> upto{std::min(static_cast<int64_t>(place), groups), band.begin};
        const double over = (place - static_cast<double>(upto.first)) * band.group;
        if (at == last) {
            upto.first = groups;
        } else if (band.group - over <= slack) {
            upto.first = std::min(upto.first + 1, groups);
        } else if (over > slack && upto.first < groups) {
            upto.second = cut_at(columns, band, over);
            if (upto.second == band.end) upto = {upto.first + 1, band.begin};
        }
        while (now < upto) {
            std::vector<Run>& own = runs[now.first];
            const bool ends = now.first < upto.first;
            own.push_back({now.second, ends ? band.end : upto.second, shares.ranks[at]});
            now = ends ? std::make_pair(now.first + 1, band.begin) : upto;
        }
    }
    return runs;
}

}  // namespace

void spread(Columns* columns, double tolerance, int64_t kept) {
    const Problem& p = columns->p;
    auto bands = find_bands(*columns, kept);
    std::stable_sort(bands.begin(), bands.end(), [](const Band& a, const Band& b) { return a.group > b.group; });
    double total = 0.0;
    for (const double load : columns->load) total += load;
    Pace all;
    all.base.assign(p.base, p.base + p.ranks);
    all.speed.assign(p.speed, p.speed + p.ranks);
    const double finish = finish_time(total, all);
    for (const Band& band : bands) {
        std::vector<double> others = columns->load;
        for (int32_t index = band.first_segment; index <= band.last_segment; ++index) {
            const Segment& segment = columns->segments[index];
            others[segment.home] -= columns->cost_of(segment.begin, segment.end) * static_cast<double>(p.groups);
        }
        const Shares shares = find_shares(*columns, band, others, finish, finish * (1.0 + tolerance * p.band));
        const auto runs = find_stretches(*columns, band, shares, 0.5 * p.band * tolerance * finish);
        for (int64_t group = 0; group < p.groups; ++group) columns->place(band.document, group, runs[group]);
    }
}

}  // namespace cad
