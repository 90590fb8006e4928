// Which rank of a pool lacks most load, in few steps: the best of every block of ranks is remembered until a load changes.
// It finds the rank that a scan of the whole pool would find: of ranks that lack equally much, the first in the pool.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "planner.h"

namespace cad {

class Emptiest {
public:
    Emptiest(const Columns& columns, const Levels& levels, const Ranks& pool)
        : state_(columns), at_(levels), pool_(pool), best_(pool.size() / kBlock + 1), stale_(best_.size(), true) {
        block_of_.assign(columns.load.size(), -1);
        for (size_t place = 0; place < pool.size(); ++place) {
            block_of_[pool[place]] = static_cast<int32_t>(place / kBlock);
            by_host_.emplace_back(columns.p.host[pool[place]], static_cast<int32_t>(place));
        }
        std::sort(by_host_.begin(), by_host_.end());
        one_host_ = by_host_.empty() || by_host_.front().first == by_host_.back().first;
    }

    void load_changed(int32_t rank) {
        if (block_of_[rank] >= 0) stale_[block_of_[rank]] = true;
    }

    // Of all ranks but one; -1: none takes anything.
    int32_t of_all(int32_t without) {
        int32_t best = -1;
        for (size_t block = 0; block < best_.size(); ++block) {
            if (stale_[block]) {
                best_[block] = of_block(block, -1);
                stale_[block] = false;
            }
            const int32_t found = best_[block] == without ? of_block(block, without) : best_[block];
            if (found >= 0 && (best < 0 || lacks(found) > lacks(best))) best = found;
        }
        return best;
    }

    // Of those on a rank's host, without it.
    int32_t on_host_of(int32_t rank) {
        if (one_host_) return of_all(rank);
        const auto host = state_.p.host[rank];
        int32_t best = -1;
        auto one = std::lower_bound(by_host_.begin(), by_host_.end(), std::make_pair(host, int32_t{-1}));
        for (; one != by_host_.end() && one->first == host; ++one) better(pool_[one->second], rank, &best);
        return best;
    }

private:
    static constexpr size_t kBlock = 64;

    double lacks(int32_t rank) const { return at_.take[rank] - state_.load[rank]; }

    void better(int32_t rank, int32_t without, int32_t* best) const {
        if (rank == without || lacks(rank) <= at_.slack[rank]) return;
        if (*best < 0 || lacks(rank) > lacks(*best)) *best = rank;
    }

    int32_t of_block(size_t block, int32_t without) const {
        int32_t best = -1;
        const size_t end = std::min((block + 1) * kBlock, pool_.size());
        for (size_t place = block * kBlock; place < end; ++place) better(pool_[place], without, &best);
        return best;
    }

    const Columns& state_;
    const Levels& at_;
    const Ranks& pool_;
    std::vector<int32_t> best_;
    std::vector<bool> stale_;
    std::vector<int32_t> block_of_;
    std::vector<std::pair<int64_t, int32_t>> by_host_;  // host, place in the pool
    bool one_host_ = true;
};

}  // namespace cad
