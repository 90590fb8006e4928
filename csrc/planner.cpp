// The planner behind a plain C interface: which rounds of moves bring ranks to what is aimed at.
#include "planner.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <numeric>

#include "last_error.h"
#include "planner_constants.h"

namespace cad {
namespace {

// Units and Aim of planner/core.py.
enum Units : int64_t { kNone, kRanks, kHosts, kHostsLast };

struct Aim {
    double tolerance;
    int64_t units;
    double level;
    int64_t kept;
};

struct Answer {
    std::vector<Task> tasks;
    std::vector<double> load, before;
    Flows flows;
};

Pace pace_of(const Problem& p, const Ranks& pool) {
    Pace pace;
    for (const int32_t rank : pool) {
        pace.base.push_back(p.base[rank]);
        pace.speed.push_back(p.speed[rank]);
    }
    return pace;
}

// Who of a pool is farthest below its level; -1: none runs anything.
int32_t emptiest(const Columns& columns, const std::vector<double>& take, const Ranks& pool) {
    const Problem& p = columns.p;
    int32_t best = -1;
    const auto room = [&](int32_t rank) { return (take[rank] - columns.load[rank]) / p.speed[rank]; };
    for (const int32_t rank : pool)
        if (p.speed[rank] > 0.0 && (best < 0 || room(rank) > room(best))) best = rank;
    return best;
}

// What a rank of speed 0 still has goes to whoever of its pool is farthest below its level.
void evacuate(Columns* columns, const std::vector<double>& take, const Ranks& pool) {
    const Problem& p = columns->p;
    if (std::none_of(pool.begin(), pool.end(), [&](int32_t rank) { return p.speed[rank] > 0.0; })) return;
    Column cells;
    for (const int32_t rank : pool) {
        if (p.speed[rank] > 0.0) continue;
        for (const int32_t index : columns->of_rank[rank]) {
            const int32_t document = columns->segments[index].document;
            for (int64_t group = 0; group < p.groups; ++group) {
                int32_t count;
                const Cell* column = columns->column(document, group, &count);
                cells.assign(column, column + count);
                for (const Cell& cell : cells)
                    if (cell.server == rank)
                        columns->move(document, group, cell.begin, cell.end, emptiest(*columns, take, pool));
            }
        }
    }
}

// Brings the ranks of a pool within the tolerance of the time at which all of its work would be done.
void balance(Columns* columns, double tolerance, const Ranks& pool) {
    const Problem& p = columns->p;
    const Pace pace = pace_of(p, pool);
    std::vector<double> load(pool.size()), room, give, take;
    double band = tolerance;
    for (const double part : kAims)
        for (int phase = 0; phase < 3; ++phase) {
            double total = 0.0;
            for (size_t at = 0; at < pool.size(); ++at) total += load[at] = columns->load[pool[at]];
            const double finish = finish_time(total, pace);
            const auto most = work_until(finish * (1.0 + band), pace);
            const auto least = work_until(finish * (1.0 - band), pace);
            bool too_much = false, too_little = false;
            for (size_t at = 0; at < pool.size(); ++at) {
                too_much |= load[at] > most[at];
                too_little |= load[at] < least[at];
            }
            if (!too_much && !too_little) return;
            band = tolerance * p.band;
            if ((phase == 1 && !too_much) || (phase == 2 && !too_little)) continue;
            const double aim = band * part;
            room = work_until(finish * (1.0 + aim), pace);
            if (phase == 0) {
                settle_levels(load, pace, finish, aim, &give, &take);
            } else if (phase == 1) {
                give = room;
                take = work_until(finish, pace);
            } else {
                give = work_until(finish, pace);
                take = work_until(finish * (1.0 - aim), pace);
            }
            Levels levels(p.ranks);
            for (size_t at = 0; at < pool.size(); ++at) {
                const int32_t rank = pool[at];
                levels.most[rank] = room[at], levels.give[rank] = give[at], levels.take[rank] = take[at];
                levels.slack[rank] = std::clamp(kLeastMove, kSlack * band, band) * finish * pace.speed[at];
            }
            run_round(columns, levels, pool);
            evacuate(columns, levels.take, pool);
        }
}

// Units that would end above the level give what is above; those that end first take it.
void bring_down(Columns* columns, const Aim& aim, const std::vector<Ranks>& units, const Ranks& everyone) {
    const Problem& p = columns->p;
    const Pace pace = pace_of(p, everyone);
    double total = 0.0;
    for (const double one : columns->load) total += one;
    const double finish = finish_time(total, pace);
    Levels levels(p.ranks);
    settle_units(columns->load, pace, units, std::max(aim.level, finish), &levels);
    for (const int32_t rank : everyone) levels.slack[rank] = kSlack * aim.tolerance * p.band * finish * p.speed[rank];
    run_round(columns, levels, everyone);
    evacuate(columns, levels.take, everyone);
}

// When the last rank is done; never, where a rank of speed 0 has work.
double slowest(const std::vector<double>& load, const Problem& p) {
    double slowest = 0.0;
    for (int64_t rank = 0; rank < p.ranks; ++rank) {
        if (p.speed[rank] > 0.0)
            slowest = std::max(slowest, p.base[rank] + load[rank] / p.speed[rank]);
        else if (load[rank] > 0.0)
            return std::numeric_limits<double>::infinity();
    }
    return slowest;
}

Answer solve(const Problem& p, const Aim& aim) {
    Answer answer;
    auto columns = std::make_unique<Columns>(p);
    answer.before = columns->load;
    Ranks everyone(p.ranks);
    std::iota(everyone.begin(), everyone.end(), 0);
    std::vector<Ranks> units(aim.units == kRanks ? p.ranks : p.hosts);
    for (const int32_t rank : everyone) units[aim.units == kRanks ? rank : p.host[rank]].push_back(rank);
    if (aim.kept >= 0) spread(columns.get(), aim.tolerance, aim.kept);
    if (aim.units == kNone) {
        balance(columns.get(), aim.tolerance, everyone);
    } else {
        if (aim.units == kHostsLast)
            for (const Ranks& pool : units) balance(columns.get(), aim.tolerance, pool);
        bring_down(columns.get(), aim, units, everyone);
        if (aim.units != kRanks)
            for (const Ranks& pool : units) balance(columns.get(), aim.tolerance, pool);
    }
    if (slowest(columns->load, p) > slowest(answer.before, p)) columns = std::make_unique<Columns>(p);
    answer.tasks = columns->tasks();
    answer.load.assign(p.ranks, 0.0);
    for (const Task& task : answer.tasks)
        answer.load[task.server] +=
            columns->cost_of(task.begin, task.end) * static_cast<double>(task.group_end - task.group_begin);
    answer.flows = columns->flows();
    return answer;
}

}  // namespace
}  // namespace cad

#define CAD_EXPORT extern "C" __attribute__((visibility("default")))

// Makes a plan. `sizes`: ranks, groups, window (0: none), granularity, bytes per row and head group of Q, O and K with V,
// number of query and of key segments, units of the aim and its `kept`, READ_FROM and IN_PLACE. `numbers`: cost per pair,
// row, key and task, weight of a byte inside and between hosts, tolerance and level of the aim, and BAND. `per_rank`: base loads and speeds, [2][ranks].
// `host`: of each rank, numbered in the order in which hosts first appear. `query` and `key`: document, begin, end and
// rank of every segment, [4][segments]. Returns 0, a plan to be freed and its numbers of tasks and of pairs in `counts`,
// or another code.
CAD_EXPORT int cad_planner_solve(const int64_t* sizes, const double* numbers, const double* per_rank, const int64_t* host,
                                 const int64_t* query, const int64_t* key, void** plan, int64_t* counts) try {
    cad::Problem p{};
    p.ranks = sizes[0], p.groups = sizes[1], p.window = sizes[2], p.granularity = sizes[3];
    p.query_bytes = sizes[4], p.output_bytes = sizes[5], p.key_value_bytes = sizes[6];
    p.query_count = sizes[7], p.key_count = sizes[8];
    p.pair = numbers[0], p.row = numbers[1], p.key = numbers[2], p.task = numbers[3];
    p.inside = numbers[4], p.between = numbers[5];
    p.band = numbers[8], p.read_from = sizes[11], p.in_place = sizes[12];
    const cad::Aim aim{numbers[6], sizes[9], numbers[7], sizes[10]};
    p.base = per_rank, p.speed = per_rank + p.ranks;
    p.host = host, p.hosts = p.ranks ? *std::max_element(host, host + p.ranks) + 1 : 0;
    p.query_document = query, p.query_begin = query + p.query_count;
    p.query_end = query + 2 * p.query_count, p.query_rank = query + 3 * p.query_count;
    p.key_document = key, p.key_begin = key + p.key_count;
    p.key_end = key + 2 * p.key_count, p.key_rank = key + 3 * p.key_count;
    auto answer = std::make_unique<cad::Answer>(cad::solve(p, aim));
    counts[0] = static_cast<int64_t>(answer->tasks.size());
    counts[1] = static_cast<int64_t>(answer->flows.pairs.size());
    *plan = answer.release();
    return 0;
} catch (const std::bad_alloc&) {
    return cad::fail(1, "no memory is left to make a plan");
}

// Copies a plan out and frees it: tasks [n][6], loads [4][ranks] (after, before, waiting, parts), bytes [4][2][ranks] (Q, K
// and V sent and received, O sent and received; inside and between hosts), pairs [m][3] (home, server, with rows) and
// served rows [2][ranks] (query and KV rows times head groups). Returns 0.
CAD_EXPORT int cad_planner_take(void* plan, int64_t* tasks, double* loads, int64_t* bytes, int64_t* pairs,
                                int64_t* served) {
    const std::unique_ptr<cad::Answer> answer(static_cast<cad::Answer*>(plan));
    static_assert(sizeof(cad::Task) == 6 * sizeof(int64_t), "a task is six numbers");
    static_assert(sizeof(cad::Flows::Pair) == 3 * sizeof(int64_t), "a pair is three numbers");
    const auto* first = reinterpret_cast<const int64_t*>(answer->tasks.data());
    std::copy(first, first + 6 * answer->tasks.size(), tasks);
    loads = std::copy(answer->load.begin(), answer->load.end(), loads);
    loads = std::copy(answer->before.begin(), answer->before.end(), loads);
    loads = std::copy(answer->flows.waiting.begin(), answer->flows.waiting.end(), loads);
    std::copy(answer->flows.parts.begin(), answer->flows.parts.end(), loads);
    std::copy(answer->flows.bytes.begin(), answer->flows.bytes.end(), bytes);
    const auto* pair = reinterpret_cast<const int64_t*>(answer->flows.pairs.data());
    std::copy(pair, pair + 3 * answer->flows.pairs.size(), pairs);
    std::copy(answer->flows.served.begin(), answer->flows.served.end(), served);
    return 0;
}
