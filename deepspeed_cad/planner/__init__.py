"""The planner: a tick and costs in, a plan out. Pure: the same question gets the same answer on every rank.

Python asks, tries and judges; the compiled core (csrc/planner*.cpp, called by `core.py`) moves rows. `make_plan`
(`answer.py`) checks the question (`question.py`), asks the core for an even plan from one start or several, for others
where links are slow, and times each (`finish.py`). Names in capitals are numbers in `constants.py`, names
like kSlack are in csrc/planner_constants.h; each number stands with where it comes from.

1. *Start at home.* Every rank runs its own rows. If all would then finish within the tolerance of the mean, that is the
   plan. The mean is when all work is done if all start at their base loads and stop together (planner_levels.cpp).
2. *Levels.* Otherwise ranks are to end within BAND of the tolerance. A rank above its level gives what is above, a rank
   below takes what is missing. Levels are set so that both sums agree and no more moves than must; what is not worth a
   move (kSlack, kLeastMove) stays. Rounds repeat with a looser aim (kAims) until every rank is within the tolerance or
   the aims are used up (`balance` in planner.cpp).
3. *Moves.* In a round the donor whose best move is cheapest goes first (planner_round.cpp). A move is a number of head
   groups times the last rows of a document, because those have the most pairs for each row sent; it goes on with rows
   before them on other donors, so that K and V travel once for all; or it is the first rows of a segment, for a server
   that holds the keys before them. A rank without own rows to give hands on rows that it was given.
4. *Price.* The cheapest move is that of the fewest bytes per unit of load (planner_offer.cpp): Q and O of the rows that
   leave home, and K and V that the server does not hold yet, those between hosts weighted. What a move leaves of the
   donor's surplus is charged, too (kMoveShares, kLeftoverPrice), so that many small moves do not win over one.
5. *Where cuts are too coarse*, the smallest possible step is taken if its server then finishes before the donor does
   now. A rank of speed 0 hands everything over.
6. *Slow links.* Where links have a cost, each plan is timed with its transfers. If the even plan waits, less is moved:
   ranks, or hosts, that would end above a level come down to it and no further (`bring_down` in planner.cpp), then each
   host's ranks are made even as in 2. A lower level means less work for the slowest and longer transfers; the search
   follows both to where they meet (TRIES).
7. *Documents on many ranks.* Where a document's last rows read keys of READ_FROM ranks or more, plans are also made
   from another start: its rows are dealt out by head groups, all or all but the first segment (KEPT), so that every
   rank reads keys of few of them (planner_spread.cpp). From each start ranks are made even to several degrees (EVEN).
   The plan is taken that ends soonest, what it moves and holds counted as time (WORTH).
8. *Never worse.* If the slowest rank finishes later than if all rows stayed at home, nothing is moved. What was held
   back, and why, is in the plan's notes.

To change it: change the C++, run `make native`, then tests/unit/test_planner*.py and `python benchmarks/planner.py`.
The tests count plans again from their tasks (tests/plan_checks.py), compare them with the best of small inputs, and
hold the fingerprints that every compiler must give: sums are taken in rank order, and it must not fuse or reorder them.
"""

from deepspeed_cad.planner.answer import make_plan
from deepspeed_cad.planner.plan import HeadShape, Plan, PlanInput

__all__ = ["HeadShape", "Plan", "PlanInput", "make_plan"]
