"""The numbers of the planner's heuristic: what each is for, its unit, and where it comes from.

The heuristic in words: `deepspeed_cad.planner`. csrc/planner_constants.h has those that C++ needs, with the same names
(kLeftoverPrice is LEFTOVER_PRICE) and values; a test compares them.

None is measured on a GPU: those that are not arithmetic are choices by trial. *Trial* below means
benchmarks/planner_trials.py: this number alone is changed, and the 18 inputs of benchmarks/results/planner.md are
planned at tolerance 0.02, once by pairs and once with a KV row at 250 pairs. As the numbers are, the plans move 0.491
of the published bytes, 0.359 at the hottest rank, with max/mean 1.009 and min/mean 0.991. *Optimum* means the 16 small
inputs of tests/unit/test_planner_optimum.py: plans move 1.05 times the least possible bytes on average. *Spanning
trial* means `planner_trials.py --spanning`: streams of which some documents lie on up to 16 ranks.
"""

# How far ranks are brought

BAND = 0.5
"""Share of the tolerance. If any rank is out of the tolerance, all are brought into this share of it: costs are
predictions, and a plan at the very edge would often miss. Trial: 1.0 moves 1 % fewer bytes and ends at max/mean 1.017,
0.25 moves 0.5 % more and ends at 1.005."""
AIMS = (0.8, 0.85, 0.9, 0.95)
"""Shares of that band. Each round of moves aims at one, ever less strictly, because moves in whole granules end beside
their aim. Trial: the first is nearly always enough; the others are for coarse granules."""
SLACK = 0.1
"""Share of that band, per rank. A difference below it is not worth a move. Trial: 0.02 makes 1.4 % more tasks, 0.2 ends
at max/mean 1.0093; bytes differ by 0.2 % at most."""
BISECTIONS = 60
"""Halvings of the interval in which a level lies: more than the 53 bits of a double's mantissa."""
OVERSHOOT = 0.5
"""Share of one granule's cost. A cut at the nearest granule misses what was wanted by half a granule at most, so a move
may be larger by this. Optimum: 0 moves 1.09 times the least possible bytes, 1 likewise."""

# What a move costs

MOVE_SHARES = (0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
"""Shares of a document's rows. The cheapest move of the last share x of all rows of a document, by bytes per pair,
solves x² + 2cx − 2c = 0, where c is the bytes of K and V over those of Q and O in one row of a head group: 0.39 at 8
query heads per KV head, 0.5 at 4, 0.73 at 1, 0.83 where K and V are twice as large. 1.0 is for windows, where all rows
cost the same. Trial: one share alone, 0.5, moves 0.8 % more bytes and 3 % more at the hottest rank."""
LEFTOVER_PRICE = 1.2
"""Times the bytes per unit of load of the cheapest such move. What a move leaves to be moved is charged at this price:
the next move will be somewhat worse than the best. Trial: 1.0 needs 1.2 % more tasks and 40 % more time, 1.4 moves
0.8 % more bytes and 3 % more at the hottest rank."""
DEARER = 1.02
"""Times the rate of the next donor in turn. A donor whose best move became dearer than this waits until those before it
have moved. Trial: 1.2 moves 0.2 to 0.4 % more bytes, 1.0 as many."""
HOST_BORDER = 8.0
"""Bytes inside a host that one byte between hosts counts as, where the cost model has no figures. A guess, not
measured. For scale: 362 GB/s by peer copies inside a host (the shipped profiles), 50 GB/s by a link of 400 Gbit/s."""

# How far is searched

GROUP_STEPS = 8
"""Every number of head groups up to twice this is tried for a move, then in steps of this share of the number. Trial: 2
moves 0.1 % more bytes; inputs with more than 16 head groups would be slow without steps."""
DOCUMENTS = 2
"""Longest documents of a donor that are searched for each move. Trial: 1 and 8 give the same bytes, and 8 takes 10 %
more time. With windows it is by chance which is better."""
LONGEST = 32
"""Segments of a donor, longest first, whose last rows could be given: they set the price of its load. Trial: 8 and 64
give the same; 8 with thousands of documents a rank, 0.2 % more bytes."""
SHORTEST = 8
"""Segments of a donor, shortest first, that are searched for the least that can move, where every cut of the longest is
too coarse. Trial: 2 and 32 give the same."""
SHORT_STEPS = 8
"""Granules. A whole document up to so long takes further ones of its donor along, to the same server, without another
search. Trial: the same; with 3,000 documents a rank, 2 takes twice the time."""
NEAR = 4
"""Servers that hold keys of the document and are searched beside the emptiest: so many of its first homes, of its last
homes, and of those that already run rows of it. Trial: 1 and 8 give the same."""

# Documents on many ranks

READ_FROM = 3
"""Ranks. A document is dealt out by head groups if some of its rows read keys of so many. Spanning trial: 2 burdens the
fullest rank no less and plans more often, 4 burdens it by 2 to 5 % more."""
HELP = 0.1
"""Share of one head group's work. A rank helps the homes of a document if it has room for so much. Spanning trial, 8 KV
heads: 0.3 burdens the fullest rank by 1 % more, 0.5 by 3 %, 1.0 by 5 %; with 32 all are the same."""
KEPT = (1, 0)
"""How many first segments of such a document begin at home: each is tried beside a start at home. Spanning trial: 1
alone burdens the fullest rank by 2 % more with 8 KV heads and by 6 % more with 32, 0 alone by 2 % more with 8; with 2
as well it is 2 % less with 8 and moves 4 % fewer bytes, and planning takes a third more."""
FINER = 0.2
"""Share of the tolerance to which documents on several ranks are made even from a start at home. Their rows are many,
so the cut is fine: 1,048,576 tokens on 4 ranks move 1 % more bytes and end 1.6 % earlier than with the whole tolerance,
524,288 on 2 ranks 1.6 % and 1.6 %; dealt out they are even by themselves."""
WORTH = 0.5
"""Share of time that a share of bytes is worth on two ranks. A choice: inside a host a byte of a long document is
hidden many times over, and short documents, which are cut coarsely, would move half as much again for a tenth of the
time."""
LIGHTER = 0.95
"""Share. A start is taken instead of one before it if it burdens the fullest rank by less than this share of it. A
choice, so that much is not moved for little. Spanning trial: 1.0 is the same; 0.9, with 8 KV heads, burdens it by 3 %
more and moves 1 % fewer bytes."""

# Transfers

TRAVELS = 2.0
"""Bytes that a layer moves forward and backward, over those of its forward, which is what plans count and what a byte's
cost is for: backward mirrors forward. What travels again where servers keep nothing is counted apart."""
WAVES = (1, 2, 4, 8)
"""Numbers of waves among which plans choose where there are several hosts. A choice: more gain little by the model."""
WAVES_IN_TURN = (1, 2)
"""The same where two ticks take turns beside reserved servers: as many as go out at once (OUT in schedule/room.py). One
more would go out only when its trainer has come back from the other tick."""
WAVE_SECONDS = 150e-6
"""What one wave more costs a rank in a pass, for its exchanges and for kernels that fill the GPU less. A guess: two
exchanges of tiny slices take 56 µs, and the last blocks of a kernel about as long as one of its tiles."""
FORWARD_SHARE = 0.26
"""Share of the forward in the cost of attention. Measured: whole documents of 32K at 665 and 598 TFLOP/s, forward and
backward, on an H200 with FlashAttention-4; backward has 2.5 times the work."""

# Rows that stay where they are (also in schedule/)

IN_PLACE = 32
"""Rows of a rank over the fewest of its own that it runs in place where only their keys come from elsewhere. Each such
run is a kernel call of its own; shorter ones are copied to the rows of other ranks and run with them. A choice, not
measured: at 65536 rows a rank, a run of 2048 rows of 32 heads fills an H200 four times."""

# Slow links (in planner/search.py only)

TRIES = 6
"""Plans that are made to find how far the slowest comes down, each way. Trial, 4 to 64 ranks: 4 end up to 4 % later at
5 GB/s between hosts, 8 need 1.3 times the time."""
MANY_RANKS = 128
"""Ranks. Beyond, a plan takes milliseconds, and the search is short and goes one way only."""
FEW_TRIES = 3
"""The same with many ranks."""
NARROWING = 0.1
"""Share of what is left to search. Tries stay so far from its ends, or two of them could fall together."""
UNBOUNDED = 1e6
"""Share of the mean. A tolerance at which nothing moves."""
ROUNDING = 1e-9
"""Share of the mean finish time. A rank is called out of the tolerance only beyond this: loads are sums of doubles."""
