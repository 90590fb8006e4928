"""How long GPUs take for what was queued: streams run in their order, kernels of one GPU one at a time."""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple


class Op(NamedTuple):
    """One entry of a stream."""

    what: str
    """A kernel of the GPU `key` ("work"), a moment ("mark", "await"), a copy ("send"), or a transfer that begins when
    two streams have come to it ("meet"). The last two mark `key` at their end."""
    key: Hashable
    seconds: float = 0.0


@dataclass
class Clock:
    """Streams by name. `current` is the one on which code that knows no name queues."""

    streams: dict[Hashable, list[Op]] = field(default_factory=lambda: defaultdict(list))
    current: Hashable = None
    _marks: int = 0

    def add(self, stream: Hashable, what: str, key: Hashable, seconds: float = 0.0) -> None:
        self.streams[stream].append(Op(what, key, seconds))

    def mark(self) -> Hashable:
        """What the current stream has to do by now."""
        self._marks += 1
        self.add(self.current, "mark", self._marks)
        return self._marks

    def run(self) -> float:
        """When all of it is over."""
        left = {name: list(reversed(ops)) for name, ops in self.streams.items()}
        at: dict[Hashable, float] = dict.fromkeys(left, 0.0)
        free: dict[Hashable, float] = defaultdict(float)
        moments: dict[Hashable, float] = {}
        while heads := {name: ops[-1] for name, ops in left.items() if ops}:
            ready: list[tuple[float, float, Hashable]] = []
            for name, op in heads.items():
                start = at[name]
                if op.what == "await":
                    start = max(start, moments.get(op.key, float("inf")))
                elif op.what == "work":
                    start = max(start, free[op.key])
                elif op.what == "meet":
                    others = [at[other] for other in heads if other != name and heads[other] == op]
                    start = max(start, others[0]) if others else float("inf")
                ready.append((start, at[name], name))
            start, _, name = min(ready, key=lambda one: one[:2])
            assert start < float("inf"), f"all wait: {heads}"
            op = heads[name]
            end = start + op.seconds
            for one in [other for other in heads if heads[other] == op] if op.what == "meet" else [name]:
                left[one].pop()
                at[one] = end
            if op.what == "work":
                free[op.key] = end
            elif op.what != "await":
                moments[op.key] = end
        return max(at.values())
