// The numbers of the planner's heuristic: deepspeed_cad/planner/constants.py
// says what each is for, its unit and where it comes from. The same names and
// values (kLeftoverPrice is LEFTOVER_PRICE); a test compares them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cad {

constexpr double kBand = 0.5;
constexpr double kAims[] = {0.8, 0.85, 0.9, 0.95};
constexpr double kSlack = 0.1;
constexpr int kBisections = 60;
constexpr double kOvershoot = 0.5;
constexpr double kMoveShares[] = {0.4, 0.5, 0.6, 0.7, 0.85, 1.0};
constexpr double kLeftoverPrice = 1.2;
constexpr double kDearer = 1.02;
constexpr int64_t kGroupSteps = 8;
constexpr size_t kDocuments = 2;
constexpr size_t kLongest = 32;
constexpr size_t kShortest = 8;
constexpr int64_t kShortSteps = 8;
constexpr size_t kNear = 4;
constexpr size_t kReadFrom = 3;
constexpr double kHelp = 0.1;
constexpr int64_t kInPlace = 32;

} // namespace cad
