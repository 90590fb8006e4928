// How much attention each rank should run: planner/levels.py.
#include "planner.h"
#include "planner_constants.h"

namespace cad {
namespace {

double above(const std::vector<double>& load, const std::vector<double>& level) {
    double total = 0.0;
    for (size_t rank = 0; rank < load.size(); ++rank)
        if (load[rank] > level[rank]) total += load[rank] - level[rank];
    return total;
}

double below(const std::vector<double>& load, const std::vector<double>& level) {
    double total = 0.0;
    for (size_t rank = 0; rank < load.size(); ++rank)
        if (load[rank] < level[rank]) total += level[rank] - load[rank];
    return total;
}

}  // namespace

double finish_time(double work, const Problem& p) {
    double low = 0.0, high = 0.0, total_speed = 0.0;
    for (int64_t rank = 0; rank < p.ranks; ++rank)
        if (p.speed[rank] > 0.0) {
            total_speed += p.speed[rank];
            if (p.base[rank] > high) high = p.base[rank];
        }
    if (total_speed <= 0.0) return 0.0;
    high += work / total_speed;
    for (int step = 0; step < kBisections; ++step) {
        const double middle = 0.5 * (low + high);
        double done = 0.0;
        for (int64_t rank = 0; rank < p.ranks; ++rank)
            if (p.speed[rank] > 0.0 && middle > p.base[rank]) done += p.speed[rank] * (middle - p.base[rank]);
        if (done < work)
            low = middle;
        else
            high = middle;
    }
    return high;
}

std::vector<double> work_until(double time, const Problem& p) {
    std::vector<double> work(p.ranks, 0.0);
    for (int64_t rank = 0; rank < p.ranks; ++rank)
        if (p.speed[rank] > 0.0 && time > p.base[rank]) work[rank] = p.speed[rank] * (time - p.base[rank]);
    return work;
}

void settle_levels(const std::vector<double>& load, const Problem& p, double finish, double tolerance,
                   std::vector<double>* give, std::vector<double>* take) {
    const double upper = finish * (1.0 + tolerance), lower = finish * (1.0 - tolerance);
    const double shed = above(load, work_until(upper, p));
    const double need = below(load, work_until(lower, p));
    if (shed >= need) {
        double low = lower, high = finish;
        for (int step = 0; step < kBisections; ++step) {
            const double middle = 0.5 * (low + high);
            if (below(load, work_until(middle, p)) < shed)
                low = middle;
            else
                high = middle;
        }
        *give = work_until(upper, p);
        *take = work_until(high, p);
        return;
    }
    double low = finish, high = upper;
    for (int step = 0; step < kBisections; ++step) {
        const double middle = 0.5 * (low + high);
        if (above(load, work_until(middle, p)) < need)
            high = middle;
        else
            low = middle;
    }
    *give = work_until(low, p);
    *take = work_until(lower, p);
}

}  // namespace cad
