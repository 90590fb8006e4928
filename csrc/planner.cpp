// The planner behind a plain C interface: balance and what surrounds it in planner/reference.py.
#include "planner.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <new>

#include "last_error.h"
#include "planner_constants.h"

namespace cad {
namespace {

int32_t emptiest(const Columns& columns, const std::vector<double>& take) {
    const Problem& p = columns.p;
    int32_t best = -1;
    const auto room = [&](int32_t rank) { return (take[rank] - columns.load[rank]) / p.speed[rank]; };
    for (int32_t rank = 0; rank < p.ranks; ++rank)
        if (p.speed[rank] > 0.0 && (best < 0 || room(rank) > room(best))) best = rank;
    return best;
}

void evacuate(Columns* columns, const std::vector<double>& take) {
    const Problem& p = columns->p;
    Column cells;
    for (int32_t rank = 0; rank < p.ranks; ++rank) {
        if (p.speed[rank] > 0.0) continue;
        for (const int32_t index : columns->of_rank[rank]) {
            const int32_t document = columns->segments[index].document;
            for (int64_t group = 0; group < p.groups; ++group) {
                int32_t count;
                const Cell* column = columns->column(document, group, &count);
                cells.assign(column, column + count);
                for (const Cell& cell : cells)
                    if (cell.server == rank)
                        columns->move(document, group, cell.begin, cell.end, emptiest(*columns, take));
            }
        }
    }
}

struct Answer {
    std::vector<Task> tasks;
    std::vector<double> load, before;
    std::vector<int64_t> sent, received, between;
};

Answer solve(const Problem& p) {
    Answer answer;
    auto columns = std::make_unique<Columns>(p);
    answer.before = columns->load;
    balance(columns.get());
    if (slowest(columns->load, p) > slowest(answer.before, p)) columns = std::make_unique<Columns>(p);
    answer.tasks = columns->tasks();
    answer.load.assign(p.ranks, 0.0);
    for (const Task& task : answer.tasks)
        answer.load[task.server] +=
            columns->cost_of(task.begin, task.end) * static_cast<double>(task.group_end - task.group_begin);
    answer.received = columns->received;
    columns->count_sent(&answer.sent, &answer.between);
    return answer;
}

}  // namespace

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

void balance(Columns* columns) {
    const Problem& p = columns->p;
    const auto& load = columns->load;
    double band = p.tolerance;
    for (const double part : kAims)
        for (int phase = 0; phase < 3; ++phase) {
            double total = 0.0;
            for (const double one : load) total += one;
            const double finish = finish_time(total, p);
            const auto most = work_until(finish * (1.0 + band), p);
            const auto least = work_until(finish * (1.0 - band), p);
            bool too_much = false, too_little = false;
            for (int64_t rank = 0; rank < p.ranks; ++rank) {
                too_much |= load[rank] > most[rank];
                too_little |= load[rank] < least[rank];
            }
            if (!too_much && !too_little) return;
            band = p.tolerance * kBand;
            if ((phase == 1 && !too_much) || (phase == 2 && !too_little)) continue;
            const double aim = band * part;
            Levels levels;
            levels.most = work_until(finish * (1.0 + aim), p);
            if (phase == 0) {
                settle_levels(load, p, finish, aim, &levels.give, &levels.take);
            } else if (phase == 1) {
                levels.give = levels.most;
                levels.take = work_until(finish, p);
            } else {
                levels.give = work_until(finish, p);
                levels.take = work_until(finish * (1.0 - aim), p);
            }
            levels.slack.resize(p.ranks);
            for (int64_t rank = 0; rank < p.ranks; ++rank) levels.slack[rank] = kSlack * band * finish * p.speed[rank];
            run_round(columns, levels);
            evacuate(columns, levels.take);
        }
}

}  // namespace cad

#define CAD_EXPORT extern "C" __attribute__((visibility("default")))

// Makes a plan. `sizes`: ranks, groups, window (0: none), granularity, bytes per row and head group of
// Q, O and K with V, number of query and of key segments. `numbers`: cost per pair, row, key and task, weight of a byte
// inside and between hosts, tolerance. `per_rank`: base loads, speeds and memory, [3][ranks]. `host`: of each rank,
// numbered in the order in which hosts first appear. `query` and `key`:
// document, begin, end and rank of every segment, [4][segments]. Returns 0 and a plan to be freed, or another code.
CAD_EXPORT int cad_planner_solve(const int64_t* sizes, const double* numbers, const double* per_rank, const int64_t* host,
                                 const int64_t* query, const int64_t* key, void** plan, int64_t* task_count) try {
    cad::Problem p{};
    p.ranks = sizes[0], p.groups = sizes[1], p.window = sizes[2], p.granularity = sizes[3];
    p.query_bytes = sizes[4], p.output_bytes = sizes[5], p.key_value_bytes = sizes[6];
    p.query_count = sizes[7], p.key_count = sizes[8];
    p.pair = numbers[0], p.row = numbers[1], p.key = numbers[2], p.task = numbers[3];
    p.inside = numbers[4], p.between = numbers[5], p.tolerance = numbers[6];
    p.base = per_rank, p.speed = per_rank + p.ranks, p.memory = per_rank + 2 * p.ranks;
    p.host = host, p.hosts = p.ranks ? *std::max_element(host, host + p.ranks) + 1 : 0;
    p.query_document = query, p.query_begin = query + p.query_count;
    p.query_end = query + 2 * p.query_count, p.query_rank = query + 3 * p.query_count;
    p.key_document = key, p.key_begin = key + p.key_count;
    p.key_end = key + 2 * p.key_count, p.key_rank = key + 3 * p.key_count;
    auto answer = std::make_unique<cad::Answer>(cad::solve(p));
    *task_count = static_cast<int64_t>(answer->tasks.size());
    *plan = answer.release();
    return 0;
} catch (const std::bad_alloc&) {
    return cad::fail(1, "no memory is left to make a plan");
}

// Copies a plan out and frees it: tasks [n][6], loads [2][ranks] (after, before), bytes [3][ranks] (sent, received,
// received from other hosts).
CAD_EXPORT void cad_planner_take(void* plan, int64_t* tasks, double* loads, int64_t* bytes) {
    const std::unique_ptr<cad::Answer> answer(static_cast<cad::Answer*>(plan));
    static_assert(sizeof(cad::Task) == 6 * sizeof(int64_t), "a task is six numbers");
    const auto* first = reinterpret_cast<const int64_t*>(answer->tasks.data());
    std::copy(first, first + 6 * answer->tasks.size(), tasks);
    loads = std::copy(answer->load.begin(), answer->load.end(), loads);
    std::copy(answer->before.begin(), answer->before.end(), loads);
    bytes = std::copy(answer->sent.begin(), answer->sent.end(), bytes);
    bytes = std::copy(answer->received.begin(), answer->received.end(), bytes);
    std::copy(answer->between.begin(), answer->between.end(), bytes);
}
