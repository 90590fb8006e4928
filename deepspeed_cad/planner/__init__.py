"""The planner: a tick and costs in, a plan out. Pure: the same question gets the same answer on every rank.

Python asks, tries and judges; the compiled core (csrc/planner*.cpp, called by `core.py`) moves rows. `answer.make_plan`
is the way through: it checks the question (`checks.py`), asks the core for an even plan from one start or several
(`starts.py`), for others where links are slow (`search.py`), and times each (`finish.py`).

The heuristic, in words. Names in capitals are numbers in `constants.py`, names like kSlack are in
csrc/planner_constants.h; each number stands with where it comes from.

1. *Start at home.* Every rank runs its own rows. If all ranks would then finish within the tolerance of the mean, that
   is the plan. The mean is the time at which all work is done if every rank starts at its base load, works at its own
   speed, and all stop together (planner_levels.cpp).
2. *Levels.* Otherwise ranks are to end within BAND of the tolerance. A rank above its level gives what is above, a rank
   below takes what is missing. Levels are set so that both sums agree and no more moves than must: one side ends at
   the edge of the band, the other as far in as that needs. Then what is still out on one side alone is moved, first
   from ranks above, then to ranks below. Rounds repeat with a looser aim (kAims) until every rank is within the
   tolerance or the aims are used up (`balance` in planner.cpp).
3. *Moves.* In a round the donor whose best move is cheapest goes first (planner_round.cpp). A move is a number of head
   groups times the last rows of a document, because those have the most pairs for each row sent; it goes on with rows
   before them on other donors, so that K and V travel once for all; or it is the first rows of a segment, for a server
   that holds the keys before them. A rank without own rows to give hands on rows that it was given.
4. *Price.* The cheapest move is that of the fewest bytes per unit of load (planner_offer.cpp). Bytes are Q and O of the
   rows that leave home, and K and V that the server does not hold yet, those between hosts weighted. What a move leaves
   of the donor's surplus is charged at the price of a typical move (kMoveShares, kLeftoverPrice) over the nearest link
   on which anyone takes, so that many small cheap moves do not win over one that ends the matter.
5. *Where cuts are too coarse*, the smallest possible step is taken if its server then finishes before the donor does
   now. A rank of speed 0 hands everything over.
6. *Slow links.* Where links have a cost, each plan is timed with its transfers (`finish.py`): in each pass what goes
   out, what is computed on it and what comes back follow one another, beside the rank's own work. If the even plan
   waits, less is moved (`search.py`), and at two levels where ranks share hosts. Hosts that would end above a level
   come down to it and no further: their fullest ranks give, the emptiest of hosts that end early take (`bring_down` in
   planner.cpp). Then each host's ranks are made even as in 2. Also tried with hosts made even first, so that all of
   their links send, and with ranks instead of hosts. A lower level means less work for the slowest and longer
   transfers; the search follows both to where they meet (TRIES). Where two ticks take turns beside reserved servers,
   what the other one hides is no waiting (`alternation.py`).
7. *Documents on many ranks.* Where a document's last rows read keys of READ_FROM ranks or more, plans are also made
   from another start: its rows are dealt out by head groups, so that every rank reads keys of few of them instead of
   the last ranks all keys of all (planner_spread.cpp). All rows are, or all but its first segment, which reads no other
   keys (KEPT). Of the plans that end alike the lightest is taken: by what lands in memory and what reaches a rank
   (`starts.py`). Layers with one head group begin at home. Rows that find at home all that they read are tasks of their
   own (`own_rows.py`).
8. *Never worse.* If the slowest rank finishes later than if all rows stayed at home, nothing is moved. What was held
   back, and why, is in the plan's notes.

The core works on `Columns` (planner.h, planner_columns.cpp): for each (document, head group) a list of cells, rows
[begin, end) with who runs them and where their tokens are. `Columns::move` is the only step that changes them, beside
`place`, which deals out in 7; both keep each rank's load and the bytes that reach it. In the end equal neighbours
become tasks, and planner_flows.cpp counts what they move (`Flows` in plan.py).

To change it: change the C++, run `make native`, then tests/unit/test_planner*.py and `python benchmarks/planner.py`.
The tests know nothing of how a plan is found: they check that it is one (tests/plan_checks.py: each row of each head
group once, loads, bytes and what waits, all counted again from the tasks), that it is near the best where a solver
finds that (test_planner_optimum.py), and that every compiler gets the same one (test_planner.py, whose
fingerprints are made anew where plans change on purpose). All ranks plan for themselves, so sums are taken in rank
order and the compiler must not fuse or reorder them.

Evidence: the kernels' measured costs say what a task takes (cost.py, benchmarks/results/kernels-h200.md); few head
groups with many rows need about half of the bytes of the published planner on its own 18 inputs, and both sides of the
tolerance hold there (benchmarks/results/planner.md); on small inputs an exact optimum is near, of bytes on one host and
of time on two (tests/unit/test_planner_optimum.py). The model of transfers follows what attention/ does step by step,
between two ticks as a sum of what each of them does; it was not compared with GPUs. benchmarks/links.py prints what
plans can reach by it.
"""

from deepspeed_cad.planner.answer import make_plan
from deepspeed_cad.planner.plan import HeadShape, Plan, PlanInput

__all__ = ["HeadShape", "Plan", "PlanInput", "make_plan"]
