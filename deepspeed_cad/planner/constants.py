"""The numbers of the planner's heuristic that Python reads: what each is for, its unit, and where it comes from.

The heuristic in words: `deepspeed_cad.planner`. Numbers that only C++ reads are in csrc/planner_constants.h, which also
says what *trial* and *spanning trial* mean: plans that were made again with one number changed. BAND, READ_FROM and
IN_PLACE are read on both sides; they go to C++ with every question.
"""

BAND = 0.5
"""Share of the tolerance. If any rank is out of the tolerance, all are brought into this share of it: costs are
predictions, and a plan at the very edge would often miss. Trial: 1.0 moves 0.6 % fewer bytes and ends at max/mean
1.017, 0.25 moves 0.4 % more and ends at 1.005."""
BISECTIONS = 60
"""Halvings of the interval in which a level lies: more than the 53 bits of a double's mantissa."""
HOST_BORDER = 8.0
"""Bytes inside a host that one byte between hosts counts as, where the cost model has no figures. A guess, not
measured. For scale: 362 GB/s by peer copies inside a host (the shipped profiles), 50 GB/s by a link of 400 Gbit/s."""
READ_FROM = 3
"""Ranks. A document is dealt out by head groups if some of its rows read keys of so many. Spanning trial: with 8 KV
heads 2 is the same and 6 burdens the fullest rank by 2 % less; with 32, 2 by 2 % less, 4 by 10 % more."""
KEPT = (1, 0)
"""How many first segments of such a document begin at home: each is tried beside a start at home. Spanning trial: 0
alone burdens the fullest rank by 2 % more with 8 KV heads and by 4 % more with 32, 2 as well by 5 % less with 8. With 1
alone it is the same, but of a document over 64 ranks half again as much lands at the fullest
(benchmarks/results/spanning.md). Each takes three plans more."""
EVEN = (1.0, 0.2, 0.05)
"""Shares of the tolerance to which documents on several ranks are made even, from each start: their rows are many, so
the cut is fine. Spanning trial, 8 KV heads: with the first alone ranks end 1.0 % later and the fullest is burdened by
6 % more, with the second alone they end 0.1 % later, with the third alone it is burdened by 2 % more."""
FEW_EVEN = (1.0, 0.2)
"""The same with many ranks."""
WORTH = 0.02
"""Share of time that is worth as many bytes as a rank's own Q, K, V and O of a layer. Spanning trial: 0.01 to 0.1
differ by 1 %; 0 burdens the fullest rank by 14 % more with 8 KV heads and by 5 % more with 32."""
TRAVELS = 2.0
"""Bytes that a layer moves forward and backward, over those of its forward, which is what plans count and what a byte's
cost is for: backward mirrors forward. What travels again where servers keep nothing is counted apart."""
WAVES = (1, 2, 4, 8)
"""Numbers of waves among which plans choose where there are several hosts. A choice: more gain little by the model."""
WAVES_IN_TURN = (1, 2)
"""The same where two ticks take turns beside reserved servers: as many as go out at once (schedule.waves.OUT). One more
would go out only when its trainer has come back from the other tick."""
WAVE_SECONDS = 150e-6
"""What one wave more costs a rank in a pass, for its exchanges and for kernels that fill the GPU less. A guess: two
exchanges of tiny slices take 56 µs, and the last blocks of a kernel about as long as one of its tiles."""
FORWARD_SHARE = 0.248
"""Share of the forward in the cost of pairs and rows; keys cost in backward only. Measured in training: a forward and a
backward are 0.8014 of two forwards and a backward (the profile of FlashAttention-4 says so in its `source`); by the
runs of benchmarks/results, 0.249."""
IN_PLACE = 32
"""Rows of a rank over the fewest of its own that it runs in place where only their keys come from elsewhere. Each such
run is a kernel call of its own; shorter ones are copied to the rows of other ranks and run with them. A choice, not
measured: at 65536 rows a rank, a run of 2048 rows of 32 heads fills an H200 four times."""
TRIES = 6
"""Plans that are made to find how far the slowest comes down, each way. Trial, 4 to 64 ranks: 4 end up to 4 % later at
5 GB/s between hosts, 8 need 1.3 times the time."""
MANY_RANKS = 128
"""Ranks. Beyond, a plan takes milliseconds: the search is short and goes one way only, and EVEN is FEW_EVEN."""
FEW_TRIES = 3
"""The same with many ranks."""
NARROWING = 0.1
"""Share of what is left to search. Tries stay so far from its ends, or two of them could fall together."""
UNBOUNDED = 1e6
"""Share of the mean. A tolerance at which nothing moves."""
ROUNDING = 1e-9
"""Share of the mean finish time. A rank is called out of the tolerance only beyond this: loads are sums of doubles."""
