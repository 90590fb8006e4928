// The first key that a piece of a document reads; deepspeed_cad/cost.py has it once more, for whole tables.
#pragma once

#include <cstdint>

namespace cad {

// For rows from `row` on; `window` 0: none. Kernels read keys in tiles of at most 128 and add tile by tile. Keys begin at a
// whole tile, so that a row has the same bits wherever its document is cut.
inline int64_t window_start(int64_t row, int64_t window) {
    return window == 0 || row < window ? 0 : (row - window + 1) / 128 * 128;
}

}  // namespace cad
