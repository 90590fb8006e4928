// The numbers of the planner's heuristic that only C++ reads: what each is for, its unit, and where it comes from. Those
// that Python reads, too, are in deepspeed_cad/planner/constants.py.
//
// None is measured on a GPU: those that are not arithmetic are choices by trial. "Trial" means
// benchmarks/planner_trials.py, which compiles the planner with one number changed: the 18 inputs of
// benchmarks/results/planner.md are planned at tolerance 0.02, once by pairs and once with a KV row at 250 pairs. As the
// numbers are, the plans move 0.494 of the published bytes, 0.357 at the hottest rank, with max/mean 1.009 and min/mean
// 0.992. "Optimum" means the small inputs of tests/unit/test_planner_optimum.py: plans move 1.05 times the least possible
// bytes on average. "Spanning trial" means `planner_trials.py --spanning`: streams of which some documents lie on 2 to 16
// ranks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cad {

// How far ranks are brought

// Shares of the band (BAND of the tolerance). Each round of moves aims at one, ever less strictly, because moves in whole
// granules end beside their aim. Trial: the first is nearly always enough; the others are for coarse granules.
constexpr double kAims[] = {0.8, 0.85, 0.9, 0.95};
// Share of the band, per rank. A smaller difference is not worth a move. Trial: with 0.2 bytes differ by 0.1 %; with 0.02
// plans are the same, because kLeastMove is more.
constexpr double kSlack = 0.1;
// Share of the mean, per rank. A smaller difference is not worth a move either, unless the band is narrower still: it would
// be some hundred rows of a long document, which take all keys before them along and often are a kernel call of their own.
// Spanning trial: 0 makes 5 % more tasks with 8 KV heads, 2 % more with 32, and ends 0.1 % earlier.
constexpr double kLeastMove = 0.001;
// Halvings of the interval in which a level lies: more than the 53 bits of a double's mantissa.
constexpr int kBisections = 60;
// Share of one granule's cost. A cut at the nearest granule misses what was wanted by half a granule at most, so a move may
// be larger by this. Optimum: 0 moves 1.09 times the least possible bytes, 1 likewise.
constexpr double kOvershoot = 0.5;

// What a move costs

// Shares of a document's rows. The cheapest move of the last share x of all rows of a document, by bytes per pair, solves
// x² + 2cx − 2c = 0, where c is the bytes of K and V over those of Q and O in one row of a head group: 0.39 at 8 query heads
// per KV head, 0.5 at 4, 0.73 at 1, 0.83 where K and V are twice as large. 1.0 is for windows, where all rows cost the same.
// Trial: one share alone, 0.5, moves 0.6 % more bytes and 3 % more at the hottest rank.
constexpr double kMoveShares[] = {0.4, 0.5, 0.6, 0.7, 0.85, 1.0};
// Times the bytes per unit of load of the cheapest such move. What a move leaves to be moved is charged at this price: the
// next move will be somewhat worse than the best. Trial: 1.0 needs 1.5 % more tasks and 40 % more time, 1.4 moves 0.8 % more
// bytes and 4 % more at the hottest rank.
constexpr double kLeftoverPrice = 1.2;
// Times the rate of the next donor in turn. A donor whose best move became dearer than this waits until those before it have
// moved. Trial: 1.2 moves 0.2 % more bytes, 1.0 as many.
constexpr double kDearer = 1.02;

// How far is searched

// Every number of head groups up to twice this is tried for a move, then in steps of this share of the number. Trial: 2
// moves as many bytes; inputs with more than 16 head groups would be slow without steps.
constexpr int64_t kGroupSteps = 8;
// Longest documents of a donor that are searched for each move. Trial: 1 and 8 give the same bytes, and 8 takes 10 % more
// time. With windows it is by chance which is better.
constexpr size_t kDocuments = 2;
// Segments of a donor, longest first, whose last rows could be given: they set the price of its load. Trial: 8 and 64 give
// the same; 8 with thousands of documents a rank, 0.2 % more bytes.
constexpr size_t kLongest = 32;
// Segments of a donor, shortest first, that are searched for the least that can move, where every cut of the longest is too
// coarse. Trial: 2 and 32 give the same.
constexpr size_t kShortest = 8;
// Granules. A whole document up to so long takes further ones of its donor along, to the same server, without another
// search. Trial: the same; with 3,000 documents a rank, 2 takes twice the time.
constexpr int64_t kShortSteps = 8;
// Servers that hold keys of the document and are searched beside the emptiest: so many of its first homes, of its last
// homes, and of those that already run rows of it. Trial: 1 and 8 give the same.
constexpr size_t kNear = 4;

// Documents on many ranks

// Share of one head group's work. A rank helps the homes of a document if it has room for so much. Spanning trial: with 8
// KV heads 0.3, 0.5 and 1.0 burden the fullest rank by 1 % more; with 32, 1.0 by 4 % more, and the others are the same.
constexpr double kHelp = 0.1;

}  // namespace cad
