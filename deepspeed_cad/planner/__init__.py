"""The planner: a tick and costs in, a plan out. Pure: the same question gets the same answer on every rank.

The heuristic, in words. Names in capitals are numbers in `constants.py`, which says where each comes from.

1. *Start at home.* Every rank runs its own rows. If all ranks would then finish within the tolerance of the mean, that
   is the plan. The mean is the time at which all work is done if every rank starts at its base load, works at its own
   speed, and all stop together (`levels.py`).
2. *Levels.* Otherwise ranks are to end within BAND of the tolerance. A rank above its level gives what is above, a rank
   below takes what is missing. Levels are set so that both sums agree and no more moves than must: one side ends at
   the edge of the band, the other as far in as that needs. Then what is still out on one side alone is moved, first
   from ranks above, then to ranks below. Rounds repeat with a looser aim (AIMS) until every rank is within the
   tolerance or the aims are used up (`reference.py`).
3. *Moves.* In a round the donor whose best move is cheapest goes first (`round.py`). A move is a number of head groups
   times the last rows of a document, because those have the most pairs for each row sent; it goes on with rows before
   them on other donors, so that K and V travel once for all; or it is the first rows of a segment, for a server that
   holds the keys before them. A rank without own rows to give hands on rows that it was given.
4. *Price.* The cheapest move is that of the fewest bytes per unit of load (`offers.py`). Bytes are Q and O of the rows
   that leave home, and K and V that the server does not hold yet, those between hosts weighted. What a move leaves of
   the donor's surplus is charged at the price of a typical move (MOVE_SHARES, LEFTOVER_PRICE) over the nearest link on
   which anyone takes, so that many small cheap moves do not win over one that ends the matter.
5. *Where cuts are too coarse*, the smallest possible step is taken if its server then finishes before the donor does
   now. A rank of speed 0 hands everything over.
6. *Slow links.* Where links have a cost, each plan is timed with its transfers (`finish.py`): in each pass what goes
   out, what is computed on it and what comes back follow one another, beside the rank's own work. If the even plan
   waits, less is moved (`search.py`), and at two levels where ranks share hosts. Hosts that would end above a level
   come down to it and no further: their fullest ranks give, the emptiest of hosts that end early take. Then each host's
   ranks are made even as in 2. Also tried with hosts made even first, so that all of their links send, and with ranks
   instead of hosts. A lower level means less work for the slowest and longer transfers; the search follows both to
   where they meet (TRIES). Where two ticks take turns beside reserved servers, what the other one hides is no waiting
   (`alternation.py`).
7. *Documents on many ranks.* Where a document's last rows read keys of READ_FROM ranks or more, plans are also made
   from another start: its rows are dealt out by head groups, so that every rank reads keys of few of them instead of
   the last ranks all keys of all (`spread.py`). All rows are, or all but its first segment, which reads no other keys
   (KEPT). Of the plans that end alike the lightest is taken: by what lands in memory and what reaches a rank
   (`starts.py`). Layers with one head group begin at home. With a sliding window, rows that find at home all that they
   read are tasks of their own (`own_rows.py`).
8. *Never worse.* If the slowest rank finishes later than if all rows stayed at home, nothing is moved. What was held
   back, and why, is in the plan's notes.

Evidence: the kernels' measured costs say what a task takes (cost.py, benchmarks/results/kernels-h200.md); few head
groups with many rows need about half of the bytes of the published planner on its own 18 inputs, and both sides of the
tolerance hold there (benchmarks/results/planner.md); on small inputs an exact optimum is near, of bytes on one host and
of time on two (tests/unit/test_planner_optimum.py). The model of transfers follows what attention/ does step by step,
between two ticks as a sum of what each of them does; it was not compared with GPUs. benchmarks/links.py prints what
plans can reach by it.

`reference.py` is the definition, csrc/planner*.cpp gives the same tasks to the row.
"""

from deepspeed_cad.planner import native, reference
from deepspeed_cad.planner.answer import answer
from deepspeed_cad.planner.plan import HeadShape, Plan, PlanInput

__all__ = ["HeadShape", "Plan", "PlanInput", "make_plan"]


def make_plan(problem: PlanInput) -> Plan:
    """Make a plan, natively where the compiled library is there; both ways give the same tasks.

    Raises CADConfigError for impossible input, CADError where memory cannot hold any plan.
    """
    return answer(problem, native.solve if native.is_available() else reference.solve)
