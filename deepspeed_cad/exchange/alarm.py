"""What stops a transport, kept once for all of them: a wait that did not end, or ranks that run different exchanges.

The watchdog's thread sounds the alarm, the training thread raises it at its next call. The error board tells the other
ranks.
"""

from __future__ import annotations

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.liveness import LOST, Liveness


class Alarm:
    """Of one transport on one rank."""

    def __init__(self, rank: int, liveness: Liveness | None, timeout_s: float) -> None:
        self.rank, self.liveness, self.timeout_s = rank, liveness, timeout_s
        self._waited_for, self._sign, self._reason = "", "", ""
        self.told = False
        """Whether the training thread has had an error of it."""

    @property
    def sounded(self) -> bool:
        """Whether the transport has stopped."""
        return bool(self._waited_for or self._reason)

    @property
    def goes_on(self) -> bool:
        """Whether the others go on without a server that is lost; the same on all ranks of an exchange."""
        return self.liveness is not None and self.liveness.losses is not None

    @property
    def may_change(self) -> bool:
        """Whether they will go on without one, once training has begun; known when a transport is made."""
        return self.liveness is not None and self.liveness.may_change

    def lost(self) -> str:
        """Why no exchange of the present group can end, where the others go on; else ""."""
        return "" if self.liveness is None or self.liveness.losses is None else self.liveness.losses.why()

    def stop(self, reason: str) -> None:
        """Ranks run different exchanges: say so here and, by the board, on every rank."""
        if not self.sounded:
            self._reason = reason
            if self.liveness is not None:
                self.liveness.stop(reason)

    def time_out(self, waited_for: str, sign: str = "") -> None:
        """Something did not end in time, or by `sign` will not: who is missing is found out when this is raised."""
        if not self.sounded:
            self._waited_for, self._sign = waited_for, sign or f"no sign of it within {self.timeout_s:g} s"
            if self.liveness is not None:
                # Now, and not when it is raised: the training thread may be stuck with its GPU, and the others must not
                # take this rank for the one that died.
                self.liveness.report(f"{LOST} in {waited_for}")

    def wait_no_more(self, waited_for: str, found: str) -> None:
        """Waiting cannot end, for a reason that `in_vain` gave."""
        if self.liveness is not None and self.liveness.only_lost():
            # They do not say whom they lost, which is what a user needs to know.
            self.time_out(waited_for, found)
        else:
            self.stop(f"waited for {waited_for}: {found}")

    def heard(self) -> str:
        """Why another rank stopped all, or ""."""
        return "" if self.liveness is None else self.liveness.stopped()

    def in_vain(self, exchange: int | None = None) -> str:
        """Why waiting for the other ranks in the exchange of this number cannot end, or ""; None: before the next."""
        if self.liveness is None:
            return ""
        return self.liveness.why_hopeless(self.liveness.started() + 1 if exchange is None else exchange)

    def why(self) -> str:
        """What the alarm was sounded for, as far as it is known now."""
        if self._reason or self.liveness is None:
            return f"rank {self.rank} stopped: {self._reason or f'{self._waited_for} did not end in time'}"
        return str(self.liveness.explain(self._waited_for, RuntimeError(self._sign), patience_s=0.0))

    def check(self) -> None:
        """Raise if the alarm was sounded."""
        self.told = self.told or self.sounded
        if self._reason:
            raise CADPeerError(f"rank {self.rank} stopped: {self._reason}")
        if self._waited_for:
            raise self.explain(self._waited_for, RuntimeError(self._sign))

    def explain(self, waited_for: str, error: BaseException) -> CADPeerError:
        """The error for something that failed while this rank waited for others; ServerLostError where a server that
        is lost did that, and the others go on."""
        # An alarm that was sounded has told the others that this rank stopped.
        if self.goes_on and not self.sounded and self.liveness is not None:
            return self.liveness.explain(waited_for, error, with_servers=True)
        self.told = True
        if self._reason:
            return CADPeerError(f"rank {self.rank} stopped: {self._reason}")
        if self.liveness is None:
            return CADPeerError(f"rank {self.rank} waited for {waited_for}: {error}")
        return self.liveness.explain(waited_for, error)
