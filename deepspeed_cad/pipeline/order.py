"""Which micro-batch of a step comes when: heavy ones meet heavy ones in a tick. Pure.

In: attention of every micro-batch of every replica. Out: an order per replica. A tick holds one micro-batch per stage,
consecutive ones of each replica; the more alike these are, the fewer bytes move to even them out. In the first and the
last rounds some stages have none, and all that they serve is moved to them, so the lightest come first and last.
"""

from __future__ import annotations

from collections.abc import Sequence


def order_micro_batches(work: Sequence[Sequence[float]]) -> list[list[int]]:
    """`work[r][m]`: attention of replica r's micro-batch m. Gives for each replica its micro-batches in order."""
    orders = []
    for own in work:
        rising = sorted(range(len(own)), key=lambda m: (own[m], m))
        orders.append(rising[0::2] + rising[1::2][::-1])
    return orders
