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
        """Queue something."""
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
        while any(left.values()):
            ready: list[tuple[float, float, Hashable]] = []
            for name, ops in left.items():
                if not ops:
                    continue
                op, start = ops[-1], at[name]
                if op.what == "await":
                    start = max(start, moments.get(op.key, float("inf")))
                elif op.what == "work":
                    start = max(start, free[op.key])
                elif op.what == "meet":
                    others = [other for other in left if other != name and left[other] and left[other][-1] == op]
                    start = max(start, at[others[0]]) if others else float("inf")
                ready.append((start, at[name], name))
            start, _, name = min(ready, key=lambda one: one[:2])
            assert start < float("inf"), f"all wait: {[(one, ops[-1]) for one, ops in left.items() if ops]}"
            op = left[name][-1]
            end = start + op.seconds
            met = [name]
            if op.what == "meet":
                met = [other for other in left if left[other] and left[other][-1] == op]
            for one in met:
                left[one].pop()
                at[one] = end
            if op.what == "work":
                free[op.key] = end
            elif op.what != "await":
                moments[op.key] = end
        return max(at.values())
