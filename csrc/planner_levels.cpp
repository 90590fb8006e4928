// How much attention each rank should run: planner/levels.py.
#include "planner.h"

#include <algorithm>
#include <limits>

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

double work_of(size_t rank, double time, const Pace& p) {
    return p.speed[rank] > 0.0 && time > p.base[rank] ? p.speed[rank] * (time - p.base[rank]) : 0.0;
}

double sum_of(const std::vector<double>& values, const Ranks& ranks) {
    double total = 0.0;
    for (const int32_t rank : ranks) total += values[rank];
    return total;
}

}  // namespace

double finish_time(double work, const Pace& p) {
    double low = 0.0, high = 0.0, total_speed = 0.0;
    const size_t ranks = p.base.size();
    for (size_t rank = 0; rank < ranks; ++rank)
        if (p.speed[rank] > 0.0) {
            total_speed += p.speed[rank];
            if (p.base[rank] > high) high = p.base[rank];
        }
    if (total_speed <= 0.0) return 0.0;
    high += work / total_speed;
    for (int step = 0; step < kBisections; ++step) {
        const double middle = 0.5 * (low + high);
        double done = 0.0;
        for (size_t rank = 0; rank < ranks; ++rank)
            if (p.speed[rank] > 0.0 && middle > p.base[rank]) done += p.speed[rank] * (middle - p.base[rank]);
        if (done < work)
            low = middle;
        else
            high = middle;
    }
    return high;
}

std::vector<double> work_until(double time, const Pace& p) {
    std::vector<double> work(p.base.size());
    for (size_t rank = 0; rank < work.size(); ++rank) work[rank] = work_of(rank, time, p);
    return work;
}

void settle_levels(const std::vector<double>& load, const Pace& p, double finish, double tolerance,
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

Levels::Levels(int64_t ranks)
    : most(ranks, 0.0), give(ranks, std::numeric_limits<double>::infinity()), take(ranks, 0.0), slack(ranks, 0.0) {}

void settle_units(const std::vector<double>& load, const Pace& p, const std::vector<Ranks>& units, double upper,
                  Levels* levels) {
    const auto at_upper = work_until(upper, p);
    std::vector<double> work, over;
    double shed = 0.0;
    for (const Ranks& unit : units) {
        work.push_back(sum_of(load, unit));
        over.push_back(work.back() - sum_of(at_upper, unit));
        if (over.back() > 0.0) shed += over.back();
    }
    double low = 0.0, high = upper;
    for (int step = 0; step < kBisections; ++step) {
        const double middle = 0.5 * (low + high);
        const auto until = work_until(middle, p);
        double room = 0.0;
        for (size_t number = 0; number < units.size(); ++number) {
            const double under = sum_of(until, units[number]) - work[number];
            if (under > 0.0) room += under;
        }
        if (room < shed)
            low = middle;
        else
            high = middle;
    }
    const auto at_lower = work_until(high, p);
    const double lower = high;
    for (size_t number = 0; number < units.size(); ++number) {
        const Ranks& unit = units[number];
        const double under = sum_of(at_lower, unit) - work[number];
        if (over[number] > 0.0) {
            double top = upper;
            low = upper;
            for (const int32_t rank : unit)
                if (p.speed[rank] > 0.0) top = std::max(top, p.base[rank] + load[rank] / p.speed[rank]);
            for (int step = 0; step < kBisections; ++step) {
                const double middle = 0.5 * (low + top);
                double given = 0.0;
                for (const int32_t rank : unit) {
                    const double level = work_of(rank, middle, p);
                    if (load[rank] > level) given += load[rank] - level;
                }
                if (given < over[number])
                    top = middle;
                else
                    low = middle;
            }
            for (const int32_t rank : unit) levels->give[rank] = work_of(rank, low, p);
        } else if (under > 0.0) {
            double top = lower;
            low = 0.0;
            for (int step = 0; step < kBisections; ++step) {
                const double middle = 0.5 * (low + top);
                double room = 0.0;
                for (const int32_t rank : unit) {
                    const double level = work_of(rank, middle, p);
                    if (load[rank] < level) room += level - load[rank];
                }
                if (room < under)
                    low = middle;
                else
                    top = middle;
            }
            for (const int32_t rank : unit) {
                levels->take[rank] = work_of(rank, top, p);
                levels->most[rank] = std::max(levels->take[rank], at_upper[rank]);
            }
        }
    }
}

}  // namespace cad
