// The slices of all ranks: which rows go from which home to which server, where each lies there, and which sequences a
// server runs on them. Columns and order of every table are those of `Slices` in deepspeed_cad/schedule/__init__.py, which
// says what a schedule is. The steps of `build`:
//
// 1. A task whose rows and keys its server holds, each in one segment, runs in place: `local`.
// 2. All others run head group by head group (`Remote`). Where all rows are the server's own, and many, they stay in place
//    and only keys lie side by side: `half_local`.
// 3. Keys: for each (server, document, head group) the union of what its sequences read lands once (`Held`).
// 4. Queries land in an order in which those that read a whole held range come first, one behind the other as their keys
//    do, so that they fuse into one batch.
// 5. Each landing run of rows is cut at the segments of its homes: one slice for each.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <tuple>
#include <vector>

#include "last_error.h"
#include "window.h"

namespace cad {
namespace {

using std::size_t;

constexpr int64_t kQuery = 0, kKey = 1;

struct Home {
    int64_t document, begin, end, rank, offset;
};

struct Slice {
    int64_t kind, home, server, group, home_row, server_row, rows, stage_row;
};

struct Sequence {
    int64_t server, q_row, q_rows, k_row, k_rows;
};

struct Local {
    int64_t server, group_begin, group_end, q_row, q_rows, k_row, k_rows;
};

struct Task {
    int64_t document, begin, end, group_begin, group_end, server;
};

// Head groups of a task of which a rank runs own rows, in place, with keys of others.
struct HalfLocal {
    int64_t server, group_begin, group_end, q_row, q_rows, k_row, k_rows, k_step;
};

// Step 2: one head group of a task that reads or computes rows of other ranks.
struct Remote {
    int64_t server, document, group, start, begin, end, task, q_row, held;
    bool stays, whole;
};

// Step 3: keys [start, end) that lie side by side at a server; `behind`: only rows that stay in place read them.
struct Held {
    int64_t server, document, group, start, end, row;
    bool behind;
};

struct Slices {
    std::vector<Slice> table;
    std::vector<Sequence> sequences;
    std::vector<Local> local;
    std::vector<HalfLocal> half_local;
    std::vector<int64_t> served, landed;  // [ranks][2]
};

std::vector<Home> by_document(int64_t count, const int64_t* columns) {
    std::vector<Home> homes(count);
    for (int64_t at = 0; at < count; ++at)
        homes[at] = {columns[at], columns[count + at], columns[2 * count + at], columns[3 * count + at],
                     columns[4 * count + at]};
    const auto less = [](const Home& a, const Home& b) {
        return std::tie(a.document, a.begin) < std::tie(b.document, b.begin);
    };
    if (!std::is_sorted(homes.begin(), homes.end(), less)) std::stable_sort(homes.begin(), homes.end(), less);
    return homes;
}

// The last home that begins at or before a position; one before the first where there is none.
size_t home_of(const std::vector<Home>& homes, int64_t document, int64_t position) {
    const auto after = std::upper_bound(homes.begin(), homes.end(), std::tie(document, position),
                                        [](const std::tuple<const int64_t&, const int64_t&>& at, const Home& home) {
                                            return at < std::tie(home.document, home.begin);
                                        });
    return static_cast<size_t>(after - homes.begin()) - 1;
}

// Buffer row of `begin` on `rank` if that rank holds all of [begin, end) in one segment, else -1.
int64_t home_row(const std::vector<Home>& homes, int64_t document, int64_t begin, int64_t end, int64_t rank) {
    const size_t at = home_of(homes, document, begin);
    if (at >= homes.size()) return -1;
    const Home& home = homes[at];
    const bool inside = home.document == document && home.rank == rank && home.begin <= begin && end <= home.end;
    return inside ? home.offset + begin - home.begin : -1;
}

// Step 5: rows [begin, end) on their way to a server.
void cut(int64_t kind, const std::vector<Home>& homes, int64_t document, int64_t begin, int64_t end, int64_t group,
         int64_t server, int64_t server_row, std::vector<Slice>* table) {
    for (size_t at = home_of(homes, document, begin); at < homes.size(); ++at) {
        const Home& home = homes[at];
        if (std::tie(home.document, home.begin) >= std::tie(document, end)) break;
        const int64_t low = std::max(begin, home.begin), high = std::min(end, home.end);
        table->push_back({kind, home.rank, server, group, home.offset + low - home.begin, server_row + low - begin,
                          high - low, 0});
    }
}

// Head groups of one task whose keys follow each other side by side run together.
std::vector<HalfLocal> join_groups(const std::vector<Remote>& remote, const std::vector<Held>& held) {
    std::vector<const Remote*> runs;
    for (const Remote& one : remote)
        if (one.stays) runs.push_back(&one);
    std::stable_sort(runs.begin(), runs.end(), [](const Remote* a, const Remote* b) {
        return std::tie(a->server, a->task, a->group) < std::tie(b->server, b->task, b->group);
    });
    std::vector<HalfLocal> joined;
    int64_t task = -1, next_row = 0;
    for (const Remote* run : runs) {
        const Held& keys = held[run->held];
        const int64_t k_row = keys.row + run->start - keys.start, step = keys.end - keys.start;
        if (task == run->task && k_row == next_row && step == joined.back().k_step)
            joined.back().group_end = run->group + 1;
        else
            joined.push_back({run->server, run->group, run->group + 1, run->q_row, run->end - run->begin, k_row,
                              run->end - run->start, step});
        task = run->task;
        next_row = k_row + step;
    }
    return joined;
}

Slices build(int64_t ranks, int64_t window, int64_t in_place, const std::vector<Home>& query, const std::vector<Home>& key,
             int64_t task_count, const Task* tasks) {
    Slices slices;
    slices.served.assign(2 * ranks, 0);
    slices.landed.assign(2 * ranks, 0);
    std::vector<Remote> remote;
    std::vector<int64_t> own(ranks, 0);
    for (const Home& home : query) own[home.rank] += home.end - home.begin;
    for (int64_t at = 0; at < task_count; ++at) {
        const Task& task = tasks[at];
        const int64_t start = window_start(task.begin, window);
        const int64_t q_row = home_row(query, task.document, task.begin, task.end, task.server);
        const int64_t k_row = q_row < 0 ? -1 : home_row(key, task.document, start, task.end, task.server);
        if (q_row >= 0 && k_row >= 0) {
            slices.local.push_back({task.server, task.group_begin, task.group_end, q_row, task.end - task.begin, k_row,
                                    task.end - start});
            continue;
        }
        const bool stays = q_row >= 0 && (task.end - task.begin) * in_place >= own[task.server];
        for (int64_t group = task.group_begin; group < task.group_end; ++group)
            remote.push_back(
                {task.server, task.document, group, start, task.begin, task.end, at, q_row, 0, stays, false});
    }
    std::stable_sort(slices.local.begin(), slices.local.end(), [](const Local& a, const Local& b) {
        return std::tie(a.server, a.group_begin, a.group_end, a.q_row) <
               std::tie(b.server, b.group_begin, b.group_end, b.q_row);
    });
    std::stable_sort(remote.begin(), remote.end(), [](const Remote& a, const Remote& b) {
        return std::tie(a.server, a.document, a.group, a.start, b.end) <
               std::tie(b.server, b.document, b.group, b.start, a.end);
    });

    // Keys: one copy per (server, document, group) of the union of what its sequences read.
    std::vector<Held> held;
    for (Remote& one : remote) {
        const bool joins = !held.empty() && held.back().server == one.server && held.back().document == one.document &&
                           held.back().group == one.group && held.back().end >= one.start;
        if (!joins) held.push_back({one.server, one.document, one.group, one.start, one.end, 0, true});
        held.back().end = std::max(held.back().end, one.end);
        held.back().behind = held.back().behind && one.stays;
        one.held = static_cast<int64_t>(held.size()) - 1;
        one.whole = !joins;  // if its end is the end of the union, too
    }
    // Those that only rows in place read lie behind the others, which fuse into one batch with the rows that land.
    for (const bool behind : {false, true})
        for (Held& one : held) {
            if (one.behind != behind) continue;
            one.row = slices.served[2 * one.server + kKey];
            slices.served[2 * one.server + kKey] += one.end - one.start;
        }
    for (Remote& one : remote) one.whole = one.whole && one.end == held[one.held].end;

    // Queries: sequences that read a whole held range first, in its order, so that they fuse into one batch.
    slices.sequences.reserve(remote.size());
    for (size_t first = 0; first < remote.size();) {
        size_t last = first;
        while (last < remote.size() && remote[last].server == remote[first].server) ++last;
        int64_t& rows = slices.served[2 * remote[first].server + kQuery];
        for (const bool whole : {true, false})
            for (size_t at = first; at < last; ++at) {
                Remote& one = remote[at];
                if (one.stays || one.whole != whole) continue;
                one.q_row = rows;
                rows += one.end - one.begin;
                const Held& keys = held[one.held];
                slices.sequences.push_back({one.server, one.q_row, one.end - one.begin, keys.row + one.start - keys.start,
                                            one.end - one.start});
            }
        first = last;
    }

    slices.half_local = join_groups(remote, held);

    slices.table.reserve(2 * remote.size());
    for (const Remote& one : remote)
        if (!one.stays)
            cut(kQuery, query, one.document, one.begin, one.end, one.group, one.server, one.q_row, &slices.table);
    for (const Held& one : held)
        cut(kKey, key, one.document, one.start, one.end, one.group, one.server, one.row, &slices.table);
    std::stable_sort(slices.table.begin(), slices.table.end(), [](const Slice& a, const Slice& b) {
        return std::tie(a.kind, a.home, a.server, a.server_row) < std::tie(b.kind, b.home, b.server, b.server_row);
    });
    for (Slice& slice : slices.table) {
        if (slice.home == slice.server) continue;
        int64_t& landed = slices.landed[2 * slice.home + slice.kind];
        slice.stage_row = landed;
        landed += slice.rows;
    }
    return slices;
}

template <typename Row>
int64_t* copy(const std::vector<Row>& rows, int64_t* target) {
    const auto* first = reinterpret_cast<const int64_t*>(rows.data());
    return std::copy(first, first + rows.size() * (sizeof(Row) / sizeof(int64_t)), target);
}

}  // namespace
}  // namespace cad

#define CAD_EXPORT extern "C" __attribute__((visibility("default")))

// Builds the slices of all ranks. `sizes`: ranks, window (0: none), number of query segments, of key segments and of
// tasks, and IN_PLACE of planner/constants.py. `query` and `key`: document, begin, end, rank and offset of every segment, [5][segments]. `tasks`: [tasks][6].
// Returns 0, a handle to be freed, and in `counts` the rows of the table, of the sequences, of the local tasks and of the
// half-local runs.
CAD_EXPORT int cad_schedule_build(const int64_t* sizes, const int64_t* query, const int64_t* key, const int64_t* tasks,
                                  void** handle, int64_t* counts) try {
    static_assert(sizeof(cad::Task) == 6 * sizeof(int64_t), "a task is six numbers");
    auto slices = std::make_unique<cad::Slices>(
        cad::build(sizes[0], sizes[1], sizes[5], cad::by_document(sizes[2], query), cad::by_document(sizes[3], key),
                   sizes[4], reinterpret_cast<const cad::Task*>(tasks)));
    counts[0] = static_cast<int64_t>(slices->table.size());
    counts[1] = static_cast<int64_t>(slices->sequences.size());
    counts[2] = static_cast<int64_t>(slices->local.size());
    counts[3] = static_cast<int64_t>(slices->half_local.size());
    *handle = slices.release();
    return 0;
} catch (const std::bad_alloc&) {
    return cad::fail(1, "no memory is left to build the schedules");
}

// Copies the slices out and frees them: table [][8], sequences [][5], local [][7], half-local [][8], served and landed
// rows [ranks][2]. Returns 0.
CAD_EXPORT int cad_schedule_take(void* handle, int64_t* table, int64_t* sequences, int64_t* local, int64_t* half_local,
                                 int64_t* served, int64_t* landed) {
    const std::unique_ptr<cad::Slices> slices(static_cast<cad::Slices*>(handle));
    cad::copy(slices->table, table);
    cad::copy(slices->sequences, sequences);
    cad::copy(slices->local, local);
    cad::copy(slices->half_local, half_local);
    cad::copy(slices->served, served);
    cad::copy(slices->landed, landed);
    return 0;
}
