"""Ranks that wait for each other in two places: one for lengths or a plan, another one for it in an exchange.

A forward that only one rank runs asks the others for their documents, and they wait for that rank in an exchange which
it starts after that forward: neither ends. In: what a rank whose training thread is blocked has left on the board. Out:
whether this rank, which waits in an exchange, is the one that it waits for.

Why this is never said of a rank that is only slow. Rank B is blocked: it waits for collective n of its look-ahead
thread, and has started s exchanges. Rank A waits in exchange e > s, and its look-ahead thread is done with all that it
was asked for, fewer than n collectives. Ranks that run the same program run the same collectives and exchanges, and in
the same order: B waits for collective n before it starts exchange s + 1, so A asked for collective n before it started
exchange s + 1, let alone e. It did not, however long anything took. Where the host waits in exchanges it cannot end,
either: collective n needs A, whose training thread is kept by exchange e, which needs B, whose training thread is kept
by collective n. Where only a stream waits A may come to collective n yet; its order is another one all the same.

No clock is compared, and what was left on the board may be old: a rank is past collective n only after all ranks came
to it, and then A has begun n of them. Loaders that are slow, plans that are late, ranks that compute something else
meanwhile are on the way to what they are waited for, and A has asked for no less than B.
"""

from __future__ import annotations

from dataclasses import dataclass

REMEDY = (
    "Every rank must run the same forwards and backwards, in the same order: look for a forward without gradients, a "
    "skipped batch, or an exception that the script caught, on some rank only"
)


@dataclass(frozen=True)
class Blocked:
    """A training thread that waits for its look-ahead thread, which is in a collective."""

    exchanges: int
    """Exchanges that the rank has started."""
    collectives: int
    """Collectives that its look-ahead thread has begun, the one that it is in included."""
    subject: str
    """What that one is about."""

    def to_text(self) -> str:
        """One line for the board."""
        return f"{self.exchanges} {self.collectives} {self.subject}"

    @classmethod
    def from_text(cls, text: str) -> Blocked:
        """The inverse of `to_text`."""
        exchanges, collectives, subject = text.split(" ", 2)
        return cls(int(exchanges), int(collectives), subject)

    def needs(self, exchange: int, collectives: int) -> bool:
        """Whether it waits for a rank that waits in this exchange, and whose look-ahead thread has nothing to do after
        so many collectives."""
        return self.exchanges < exchange and self.collectives > collectives

    def describe(self, rank: int, waiting: int) -> str:
        """In words: `rank` is blocked, `waiting` is the rank that waits for it in an exchange."""
        return (
            f"rank {rank} waits for the other ranks' {self.subject} before it starts exchange {self.exchanges + 1}, "
            f"which rank {waiting} started without asking for that. {REMEDY}"
        )
