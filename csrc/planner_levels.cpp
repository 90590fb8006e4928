// How much attention each rank should run.
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

struct Interval {
    double low, high;
};

// Two times so close that between them lies where `too_early` ends to hold.
template <typename TooEarly>
Interval bisect(double low, double high, const TooEarly& too_early) {
    for (int step = 0; step < kBisections; ++step) {
        const double middle = 0.5 * (low + high);
        (too_early(middle) ? low : high) = middle;
    }
    return {low, high};
}

}  // namespace

double finish_time(double work, const Pace& p) {
    double latest = 0.0, total_speed = 0.0;
    for (size_t rank = 0; rank < p.base.size(); ++rank)
        if (p.speed[rank] > 0.0) {
            total_speed += p.speed[rank];
            latest = std::max(latest, p.base[rank]);
        }
    if (total_speed <= 0.0) return 0.0;
    return bisect(0.0, latest + work / total_speed, [&](double time) {
               double done = 0.0;
               for (size_t rank = 0; rank < p.base.size(); ++rank) done += work_of(rank, time, p);
               return done < work;
           }).high;
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
        const auto takes_too_little = [&](double time) { return below(load, work_until(time, p)) < shed; };
        *give = work_until(upper, p);
        *take = work_until(bisect(lower, finish, takes_too_little).high, p);
    } else {
        const auto gives_enough = [&](double time) { return above(load, work_until(time, p)) >= need; };
        *give = work_until(bisect(finish, upper, gives_enough).low, p);
        *take = work_until(lower, p);
    }
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
    const double lower = bisect(0.0, upper, [&](double time) {
                             const auto until = work_until(time, p);
                             double room = 0.0;
                             for (size_t number = 0; number < units.size(); ++number) {
                                 const double under = sum_of(until, units[number]) - work[number];
                                 if (under > 0.0) room += under;
                             }
                             return room < shed;
                         }).high;
    const auto at_lower = work_until(lower, p);
    for (size_t number = 0; number < units.size(); ++number) {
        const Ranks& unit = units[number];
        const double under = sum_of(at_lower, unit) - work[number];
        if (over[number] > 0.0) {
            double latest = upper;
            for (const int32_t rank : unit)
                if (p.speed[rank] > 0.0) latest = std::max(latest, p.base[rank] + load[rank] / p.speed[rank]);
            const double time = bisect(upper, latest, [&](double until) {
                                    double given = 0.0;
                                    for (const int32_t rank : unit)
                                        given += std::max(load[rank] - work_of(rank, until, p), 0.0);
                                    return given >= over[number];
                                }).low;
            for (const int32_t rank : unit) levels->give[rank] = work_of(rank, time, p);
        } else if (under > 0.0) {
            const double time = bisect(0.0, lower, [&](double until) {
                                    double room = 0.0;
                                    for (const int32_t rank : unit)
                                        room += std::max(work_of(rank, until, p) - load[rank], 0.0);
                                    return room < under;
                                }).high;
            for (const int32_t rank : unit) {
                levels->take[rank] = work_of(rank, time, p);
                levels->most[rank] = std::max(levels->take[rank], at_upper[rank]);
            }
        }
    }
}

}  // namespace cad
