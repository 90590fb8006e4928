"""The session: the one object per process that ties the rooms together.

It owns the groups, the transport, the look-ahead thread and the statistics. Host frameworks (engine/ and
integrations/) talk to nothing else of the core. Its groups are opened in groups.py, and what it says is in words.py.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.ahead.feed import Feed
from deepspeed_cad.ahead.gather import Gatherer, Subject, What
from deepspeed_cad.ahead.linear import Linear
from deepspeed_cad.ahead.loader import LookAheadLoader
from deepspeed_cad.ahead.memory import ALL, SHARE, Memory
from deepspeed_cad.ahead.pace import Pace, allowance
from deepspeed_cad.ahead.plan import Plans
from deepspeed_cad.ahead.plan import Reserved as Planning
from deepspeed_cad.ahead.step import allow_exchange
from deepspeed_cad.ahead.traffic import Traffic
from deepspeed_cad.ahead.worker import Worker
from deepspeed_cad.attention.microbatch import MaskDescriptor, MicroBatch
from deepspeed_cad.attention.parking import Parking
from deepspeed_cad.attention.setup import CallCounts, Modes
from deepspeed_cad.config import NOT_GLOBAL, CADConfig
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.exchange.group import Group
from deepspeed_cad.exchange.links import Links
from deepspeed_cad.exchange.opening import DETERMINISTIC, open_transport
from deepspeed_cad.exchange.transfers import Transfers
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.groups import open_groups
from deepspeed_cad.kernels.interface import Kernel, KernelNeed
from deepspeed_cad.kernels.registry import choose
from deepspeed_cad.profiles.speed import find_speeds
from deepspeed_cad.server.crew import transports_of
from deepspeed_cad.server.idle import EVERY
from deepspeed_cad.server.regroup import Opened
from deepspeed_cad.shared_cost import share_cost
from deepspeed_cad.statistics import Statistics
from deepspeed_cad.trace.record import open_tracer
from deepspeed_cad.unused import unused_keys
from deepspeed_cad.words import Words

logger = logging.getLogger("deepspeed_cad")

_sessions: list[Session] = []


class Session:
    """CAD in this process: one per process, for any number of models.

    `group`: ranks that exchange attention, default all of torch.distributed's world. Raises CADConfigError where the
    configuration asks for what this machine lacks.
    """

    def __init__(self, config: CADConfig, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.config, self.device = config, device
        self.ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self._statistics = Statistics()
        self._read: dict[str, Statistics] = {}
        self._words = Words(self)
        self.counts = CallCounts()
        self.bindings: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
        """What integrations attached to which model."""
        self.transport: Transport | None = None
        self.hosts: np.ndarray | None = None
        """Number of each rank's host ([ranks of the CAD group]), the same on all; None where there is one rank."""
        self.links = Links(None, None, "not used")
        """Speeds that this session began with."""
        self.traffic: Traffic | None = None
        self.groups = open_groups(config, device, group, self.rank, self.ranks)
        self.liveness, self.reserved = self.groups.liveness, self.groups.reserved
        self.pace = Pace(self.ranks, self.counts.waits.take, 0.0, torch.are_deterministic_algorithms_enabled)
        self.gatherer = Gatherer(self.groups.cpu, self.rank, self.ranks, self.liveness, self.pace)
        self.worker = Worker(device, config.timeout_s)
        if self.groups.exchange is not None:
            self._open_transport(self.groups.exchange)
        self._watch_for_standstill()
        self.tracer = self.counts.tracer = open_tracer(
            config.trace, config.trace_steps, device, self.rank, self.group_ranks
        )
        self.cost = share_cost(config, device, self.groups.cpu, self.group_ranks > 1)
        self.speeds = find_speeds(
            config.speeds, self.group_ranks, device, config.kernel, self._numbers,
            torch.are_deterministic_algorithms_enabled(), self.cost,
        )  # fmt: skip
        """[ranks of the CAD group] in attention, beside what the costs say; None: all are equal."""
        self._watch_traffic()
        self.linear = Linear(self.ranks, self._take_linear, torch.are_deterministic_algorithms_enabled)
        if self.reserved is not None:
            self.gatherer.linear = self.linear
        elif self.cost.unit == "seconds":
            self.pace.most = allowance(config.straggler_relief, self.speeds)
        self.warn(unused_keys(config, self.cost))
        self.aside: torch.cuda.Stream | None = None
        if device.type == "cuda" and self.transport is not None and config.overlap_used == "local_first":
            self.aside = torch.cuda.Stream(device, priority=-1)
        self.memory = self._watch_memory()
        self.parking = Parking(device) if config.keep == "host" else None
        """Where what attention keeps waits for backward; None: on the device."""
        self._kernels: dict[KernelNeed, Kernel] = {}
        # "auto" finds costs on the machine, so ranks compare them beside the configuration.
        self.gatherer.settings = f"{config.fingerprint()} {self.cost.figures}"
        self.plans = Plans(
            config, device, self.gatherer, self.worker, self.cost, self.pace, self.counts, lambda: self.transport,
            self.hosts, lambda: self.aside, self.traffic, self.speeds, self._planning(), self.memory,
        )  # fmt: skip
        if self.reserved is not None and self.reserved.changes is not None:
            changes = self.reserved.changes
            self.gatherer.newcomers, self.plans.admit = lambda: changes.newcomers, changes.admit
            changes.begin(self.transport, self._change_servers)

    # Opening and closing

    def _open_transport(self, group: Group) -> None:
        given = self.config.links if isinstance(self.config.links, Mapping) else None
        self.transport, hosts, self.links = open_transport(
            self.config.transport, group, self.device, self._numbers, self.liveness, self.config.timeout_s, given,
            transports_of(self.config, self.device),
        )  # fmt: skip
        self.hosts = np.array(hosts, np.int64)

    def _change_servers(self, opened: Opened | None) -> None:
        """Other servers than before: micro-batches are planned for these. Runs while the training thread is halted."""
        assert self.reserved is not None
        self.groups = replace(self.groups, exchange=None if opened is None else opened.group)
        self.transport = self.hosts = None
        if opened is not None:
            self.transport, self.hosts = opened.transport, np.array(opened.hosts, np.int64)
            if self.traffic is not None and self.links.source == "measured":
                self.transport.transfers = self._count_transfers(opened.hosts)
                self.traffic.watch(self.transport.transfers)
        self.plans.reserved = self._planning()

    def _planning(self) -> Planning | None:
        if self.reserved is None:
            return None
        return self.reserved.planning(self.rank, self.linear.seconds, self.speeds, self.hosts, self.transport)

    def _numbers(self, value: int) -> list[int]:
        """One number of every rank of the CAD group. Collective."""
        if self.reserved is not None:
            return self.reserved.group.numbers(value, self.liveness)
        if self.ranks == 1:
            return [value]
        return self.worker.run(lambda: self.gatherer.numbers(value, Subject(What.CHOICE)))

    def _count_transfers(self, hosts: list[int]) -> Transfers:
        return Transfers(self.rank, hosts, self.links.inside, self.links.between)

    def _watch_traffic(self) -> None:
        """Links for the planner: what was measured or given; where plans must not depend on times, what is fixed.

        Waits are weighed against gains where both are seconds.
        """
        if self.transport is None or self.hosts is None:
            return
        profile = Links(self.cost.inside, self.cost.between, f"of the profile {self.cost.name}")
        rule = self.links if self.links.source == "given" else profile
        if self.links.source == DETERMINISTIC and (profile.inside or profile.between):
            self.links = Links(profile.inside, profile.between, f"{profile.source}; {DETERMINISTIC}")
        elif self.links.source == "measured":
            self.transport.transfers = self._count_transfers(self.hosts.tolist())
        # Trainers also wait for reserved servers that are busy: such waits do not say what exchanges cost.
        weighs = self.cost.unit == "seconds" and self.reserved is None
        self.traffic = Traffic(
            self.links, rule, self.transport.transfers, self.counts.waits if weighs else None,
            self.groups.host_names(), torch.are_deterministic_algorithms_enabled,
        )  # fmt: skip
        self.gatherer.traffic = self.traffic
        logger.info("%s", self.links)

    def _watch_memory(self) -> Memory | None:
        """The limit of what exchanges take; None where nothing is exchanged."""
        if self.transport is None:
            return None
        given = None if isinstance(self.config.memory, str) else self.config.memory
        share, pauses = SHARE if self.reserved is None else ALL, torch.are_deterministic_algorithms_enabled
        self.gatherer.memory = Memory(given, self.device, lambda: self.counts.backwards > 0, pauses, share)
        return self.gatherer.memory

    def _take_linear(self, model: int) -> tuple[list[float], list[float]]:
        times = self.counts.linear.get(model)
        return ([], []) if times is None else times.take()

    def _watch_for_standstill(self) -> None:
        """Let ranks see where one waits for lengths or a plan, and the others for it in an exchange."""
        if self.liveness is None or self.transport is None:
            return
        liveness = self.liveness

        def tell() -> None:
            if (inside := self.gatherer.inside) is not None:
                liveness.block(inside[0], str(inside[1]))

        # Servers may change, and the transport with them.
        liveness.started = lambda: 0 if self.transport is None else self.transport.exchanges
        liveness.idle_after = lambda: self.gatherer.begun if self.worker.is_idle else None
        self.worker.while_blocked = tell
        # A line from the beginning: what the job's store holds does not grow with what happens in a run.
        liveness.block(0, "nothing yet")

    def close(self) -> None:
        """Release communicators and buffers; the models go back to local attention."""
        self.say_last()
        if self.reserved is not None and self.reserved.changes is not None:
            self.reserved.changes.close()
        if self.liveness is not None:
            self.liveness.close()
        self.worker.close()
        if self.tracer is not None:
            self.tracer.finish()
        try:
            if self.transport is not None:
                self.transport.close()
        finally:
            self.leave_servers("")
            self.groups.close()

    def leave_servers(self, reason: str) -> None:
        """This process ends, or its session; `reason` is empty where all is well. Only the first word counts."""
        if self.reserved is not None:
            self.reserved.link.leave(reason)

    @property
    def group_ranks(self) -> int:
        """Ranks that run attention: trainers and reserved servers."""
        if self.reserved is None:
            return self.ranks
        return self.reserved.role.ranks if self.reserved.changes is None else self.reserved.changes.crew.ranks

    # Models and their loaders

    def bind(self, model: torch.nn.Module, binding: Any) -> None:
        """Remember what an integration attached to a model; it has a `feed`."""
        self.bindings[model] = binding

    def open_feed(self, fingerprint: str) -> Feed:
        """The feed of a model for which CAD is turned on now; `fingerprint` is compared between ranks."""
        return Feed(self.plans, fingerprint, number=len(self.bindings))

    def find_binding(self, model: torch.nn.Module) -> Any:
        """What was bound to a model, through any wrapper, or None."""
        return next((self.bindings[module] for module in model.modules() if module in self.bindings), None)

    def look_ahead(
        self, loader: Any, model: torch.nn.Module, *, accumulation: int | None = None, global_loss: bool = False
    ) -> LookAheadLoader:
        """A loader for a training loop of one's own that arranges and announces each step while the one before trains.

        `accumulation`: micro-batches per optimizer step; None: what a DeepSpeed engine says, else 1. With
        `"documents": "exchange"` documents change ranks; `global_loss` states that the loss is a sum over tokens
        divided by one number for the whole step of all ranks. Raises CADConfigError where that is not stated, and
        CADUnsupportedError for a model whose loss is no sum over tokens.
        """
        binding = self.find_binding(model)
        if binding is None:
            raise CADConfigError(f"CAD is not on for {type(model).__name__}: call deepspeed_cad.apply(model) first")
        if self.config.documents == "exchange":
            if not global_loss:
                raise CADConfigError(NOT_GLOBAL)
            allow_exchange(binding.feed, model)
        says, engine = getattr(model, "gradient_accumulation_steps", lambda: 1), cast(Any, model)
        if accumulation is None:
            accumulation = int(says()) if callable(says) else 1
        trained = (lambda: int(engine.micro_steps)) if hasattr(model, "micro_steps") else None
        return LookAheadLoader(loader, binding.feed, accumulation, trained)

    # Statistics

    def count(self, micro_batch: MicroBatch) -> None:
        """Count a micro-batch that is about to be trained."""
        if self.reserved is not None and self.rank == 0 and self._statistics.micro_batches % EVERY == 0:
            self._words.look_for_idle()
        self._statistics.add(micro_batch)
        if self.tracer is not None:
            if self.reserved is not None:
                self.reserved.trace_next(self.tracer)
            self.tracer.next_micro_batch()

    @property
    def statistics(self) -> Statistics:
        """Sums since the session opened, on this rank."""
        late = self.pace.late
        latest = int(late.argmax())
        now = self._statistics.copy()
        now.late_s, now.late_rank = max(0.0, float(late[latest])), latest if late[latest] > 0 else -1
        now.waited_s = self.counts.waits.seconds()
        if self.reserved is not None:
            now.served_s, now.servers_s = self.reserved.link.busy()
        transport = self.transport
        if self.memory is not None and transport is not None:
            now.landing_bytes = transport.landing_bytes or int(self.memory.most_needed)
        now.bytes_sent = 0 if transport is None else transport.bytes_sent
        if self.reserved is not None and self.reserved.changes is not None:
            now.bytes_sent += self.reserved.changes.bytes_sent
        return now

    def take_statistics(self, reader: str) -> Statistics:
        """What happened since this reader last asked."""
        now = self.statistics
        earlier = self._read.get(reader, Statistics())
        self._read[reader] = now
        return now.since(earlier)

    # What it says

    def warn(self, lines: Iterable[str]) -> None:
        """Warn of what a user set in vain: each line once, and on rank 0 only."""
        self._words.warn(lines)

    def describe(self) -> str:
        """How the session is set up, as one line for the log."""
        return self._words.describe()

    def report(self) -> str:
        """What CAD did since the session opened, on this rank, as one line."""
        return self._words.report()

    def say_first(self) -> None:
        """When the first micro-batch was planned: that CAD is on. Once, and on rank 0 only."""
        self._words.say_first()

    def say_last(self) -> None:
        """Where the session closes or the process ends: what CAD did. Once, and on rank 0 only."""
        self._words.say_last()

    # Kernels and modes

    def kernel(self, need: KernelNeed) -> Kernel:
        """The kernel for a layer, chosen once per need."""
        if need not in self._kernels:
            self._kernels[need] = choose(self.config.kernel, need)
        return self._kernels[need]

    @property
    def kernel_names(self) -> list[str]:
        """The kernels that were chosen, in the order in which layers needed them."""
        return list(dict.fromkeys(kernel.name for kernel in self._kernels.values()))

    def descriptor(self, micro_batch: MicroBatch, window: int | None, checkpointed: bool) -> MaskDescriptor:
        """What a model's layers receive as their mask."""
        # Without gradients no backward comes: nothing is kept for one.
        backward = torch.is_grad_enabled()
        keep = self.config.backward == "keep" or (self.config.backward == "auto" and not checkpointed)
        modes = Modes(
            self.config.overlap != "none", self.config.recompute_attention or not backward, keep and backward,
            sinks_travel=self.reserved is not None, returns=backward, parking=self.parking,
        )  # fmt: skip
        return MaskDescriptor(micro_batch, window, self.kernel, modes)


def current_session() -> Session | None:
    """The session of this process, or None where CAD is off."""
    return _sessions[-1] if _sessions else None


def open_session(config: CADConfig, device: torch.device, group: dist.ProcessGroup | None = None) -> Session:
    """The session of this process: opened now, or the open one if its config is the same."""
    if _sessions:
        if _sessions[-1].config != config:
            raise CADConfigError(
                "CAD is already on in this process with another configuration; all models of a process share one"
            )
        return _sessions[-1]
    _sessions.append(Session(config, device, group))
    return _sessions[-1]


@atexit.register
def _say_last() -> None:
    for session in _sessions:
        session.say_last()
        # Set by the interpreter when it has shown what ended the script.
        error = getattr(sys, "last_value", None)
        session.leave_servers("" if error is None else f"{type(error).__name__}: {error}")


def close_session() -> None:
    """Close the session of this process, if there is one."""
    while _sessions:
        _sessions.pop().close()


def find_binding(model: torch.nn.Module) -> Any:
    """What an integration bound to a model, through any wrapper; None where CAD is off for it."""
    session = current_session()
    return None if session is None else session.find_binding(model)
