"""The session: the one object per process that ties the rooms together.

It owns the CAD process group, the transport, the look-ahead thread and the statistics. Host frameworks (engine/ and
integrations/) talk to nothing else of the core.
"""

from __future__ import annotations

import atexit
import logging
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.ahead.feed import Feed
from deepspeed_cad.ahead.gather import Gatherer, Subject, What
from deepspeed_cad.ahead.linear import Linear
from deepspeed_cad.ahead.loader import LookAheadLoader
from deepspeed_cad.ahead.pace import Pace, allowance
from deepspeed_cad.ahead.plan import Plans
from deepspeed_cad.ahead.step import allow_exchange
from deepspeed_cad.ahead.traffic import Traffic
from deepspeed_cad.ahead.worker import Worker
from deepspeed_cad.attention.microbatch import MaskDescriptor, MicroBatch, kernel_need
from deepspeed_cad.attention.setup import CallCounts, Modes
from deepspeed_cad.config import NOT_GLOBAL, CADConfig
from deepspeed_cad.errors import CADConfigError, CADError, CADPeerError
from deepspeed_cad.exchange.group import Group, OwnGroup
from deepspeed_cad.exchange.links import Links
from deepspeed_cad.exchange.liveness import Liveness, open_board
from deepspeed_cad.exchange.opening import DETERMINISTIC
from deepspeed_cad.exchange.transfers import Transfers
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.kernels.interface import Kernel, KernelNeed, MaskRule
from deepspeed_cad.meet import meet
from deepspeed_cad.notice import notice
from deepspeed_cad.planner.plan import Floats, HeadShape
from deepspeed_cad.profiles import Profile, choose_profile
from deepspeed_cad.profiles.choice import GENERIC_GPU
from deepspeed_cad.profiles.speed import find_speeds, in_words
from deepspeed_cad.profiles.timed import in_seconds
from deepspeed_cad.server.idle import EVERY, advise
from deepspeed_cad.server.join import Reserved, join_servers
from deepspeed_cad.server.launch import find_role
from deepspeed_cad.server.split import Split
from deepspeed_cad.statistics import Statistics
from deepspeed_cad.trace.record import open_tracer

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
        self._said_first = self._said_last = self._said_idle = False
        self.counts = CallCounts()
        self.bindings: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
        """What integrations attached to which model."""
        self.liveness: Liveness | None = None
        self.transport: Transport | None = None
        self._cpu_group: dist.ProcessGroup | None = None
        self._exchange_group: Group | None = None
        self.reserved: Reserved | None = None
        """Servers that hold no model, where there are any; `ranks` counts trainers."""
        self.hosts: np.ndarray | None = None
        """Number of each rank's host ([ranks of the CAD group]), the same on all; None where there is one rank."""
        self.speeds: Floats | None = None
        """[ranks of the CAD group] in attention, beside what the costs say; None: all are equal."""
        self.links = Links(None, None, "not used")
        """Speeds that this session began with."""
        self.traffic: Traffic | None = None
        role = find_role(config, self.ranks, self.rank)
        if role is not None:
            self._open_with_servers(role, group)
        elif self.ranks > 1:
            self._open_groups(group)
        self.pace = Pace(self.ranks, self.counts.waits.take, 0.0, torch.are_deterministic_algorithms_enabled)
        self.gatherer = Gatherer(self._cpu_group, self.rank, self.ranks, self.liveness, self.pace)
        self.worker = Worker(device, config.timeout_s)
        if self._exchange_group is not None:
            self._open_transport(self._exchange_group)
        self._watch_for_standstill()
        self.tracer = self.counts.tracer = open_tracer(
            config.trace, config.trace_steps, device, self.rank, self.group_ranks
        )
        self.cost = self._choose_cost()
        self.speeds = self._find_speeds()
        self._watch_traffic()
        self.linear = Linear(self.ranks, self._take_linear, torch.are_deterministic_algorithms_enabled)
        if self.reserved is not None:
            self.gatherer.linear = self.linear
            logger.info("slower ranks are not relieved: that is not built for reserved servers")
        elif self.cost.unit == "seconds":
            self.pace.most = allowance(config.straggler_relief, self.speeds)
        elif config.straggler_relief not in (0.0, CADConfig.straggler_relief) and self.rank == 0:
            logger.warning(
                '"straggler_relief" is %s and does nothing: lateness is measured in seconds, and costs are %s. Set '
                '"cost" to a profile that `deepspeed-cad profile` wrote',
                config.straggler_relief, self.cost.name,
            )  # fmt: skip
        self.aside: torch.cuda.Stream | None = None
        if device.type == "cuda" and self.transport is not None and config.overlap_used == "local_first":
            self.aside = torch.cuda.Stream(device, priority=-1)
        self._kernels: dict[KernelNeed, Kernel] = {}
        # "auto" finds costs on the machine, so ranks compare them beside the configuration.
        self.gatherer.settings = f"{config.fingerprint()} {self.cost.figures}"
        self.plans = Plans(
            config, device, self.gatherer, self.worker, self.cost, self.pace, self.counts, lambda: self.transport,
            self.hosts, lambda: self.aside, self.traffic, self.speeds,
            None if self.reserved is None else self.reserved.planning(self.rank, self.linear.seconds, self.speeds),
        )  # fmt: skip

    # Opening and closing

    def _open_groups(self, group: dist.ProcessGroup | None) -> None:
        meet(group, self.config.timeout_s)
        members = dist.get_process_group_ranks(group) if group is not None else None
        timeout = timedelta(seconds=self.config.timeout_s)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        try:
            self._cpu_group = dist.new_group(members, timeout=timeout, backend="gloo")
            self._exchange_group = dist.new_group(members, timeout=timeout, backend=backend)
        except RuntimeError as error:
            raise CADPeerError(
                f"rank {self.rank} on {socket.gethostname()} cannot connect to all other ranks within "
                f"{self.config.timeout_s:g} s ({str(error).strip().splitlines()[0][:300]}). The hosts reach the job's "
                "store, but not all of each other: set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network that "
                "connects them, and look at routes and firewalls"
            ) from error
        self.liveness = open_board(self._cpu_group, self.rank, self.ranks, self.config.timeout_s)

    def _open_with_servers(self, role: Split, group: dist.ProcessGroup | None) -> None:
        if group is not None:
            raise CADConfigError('"servers" reserves ranks beside all of torch.distributed\'s: pass no group')
        if self.ranks > 1:
            meet(None, self.config.timeout_s)
            timeout = timedelta(seconds=self.config.timeout_s)
            self._cpu_group = dist.new_group(timeout=timeout, backend="gloo")
        self.reserved = join_servers(role, self.config, self.device)
        self.liveness, self._exchange_group = self.reserved.liveness, self.reserved.group

    def _open_transport(self, group: Group) -> None:
        from deepspeed_cad.exchange.opening import open_transport

        given = self.config.links if isinstance(self.config.links, Mapping) else None
        self.transport, hosts, self.links = open_transport(
            self.config.transport, group, self.device, self._numbers, self.liveness, self.config.timeout_s, given
        )
        self.hosts = np.array(hosts, np.int64)

    def _numbers(self, value: int) -> list[int]:
        """One number of every rank of the CAD group. Collective."""
        if self.reserved is not None:
            return self.reserved.group.numbers(value, self.liveness)
        if self.ranks == 1:
            return [value]
        return self.worker.run(lambda: self.gatherer.numbers(value, Subject(What.CHOICE)))

    def _find_speeds(self) -> Floats | None:
        """Speeds of ranks as the key "speeds" wants them, beside the costs that all took. Collective."""
        return find_speeds(
            self.config.speeds, self.group_ranks, self.device, self.config.kernel, self._numbers,
            torch.are_deterministic_algorithms_enabled(), self.cost,
        )  # fmt: skip

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
            self.transport.transfers = Transfers(
                self.rank, self.hosts.tolist(), self.links.inside, self.links.between
            )  # fmt: skip
        # What plans promise trainers beside reserved servers depends on their other work, which is not measured.
        weighs = self.cost.unit == "seconds" and self.reserved is None
        self.traffic = Traffic(
            self.links, rule, self.transport.transfers, self.counts.waits if weighs else None,
            self._host_names(), torch.are_deterministic_algorithms_enabled,
        )  # fmt: skip
        self.gatherer.traffic = self.traffic
        logger.info("%s", self.links)

    def _host_names(self) -> list[str]:
        """The name of every rank's host, for messages."""
        if self._cpu_group is None:
            return [socket.gethostname()]
        names = [""] * self.ranks
        with Liveness.watch(self.liveness, "the other ranks' host names"):
            dist.all_gather_object(names, socket.gethostname(), group=self._cpu_group)
        return names

    def _take_linear(self, model: int) -> tuple[list[float], list[float]]:
        times = self.counts.linear.get(model)
        return ([], []) if times is None else times.take()

    def _watch_for_standstill(self) -> None:
        """Let ranks see where one waits for lengths or a plan, and the others for it in an exchange."""
        if self.liveness is None or self.transport is None:
            return
        liveness, transport = self.liveness, self.transport

        def tell() -> None:
            if (inside := self.gatherer.inside) is not None:
                liveness.block(inside[0], str(inside[1]))

        liveness.started = lambda: transport.exchanges
        liveness.idle_after = lambda: self.gatherer.begun if self.worker.is_idle else None
        self.worker.while_blocked = tell
        # A line from the beginning: what the job's store holds does not grow with what happens in a run.
        liveness.block(0, "nothing yet")

    def close(self) -> None:
        """Release communicators and buffers; the models go back to local attention."""
        self.say_last()
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
            for group in (self._cpu_group, self._exchange_group):
                if isinstance(group, OwnGroup):
                    group.close()
                elif group is not None and dist.is_initialized():
                    dist.destroy_process_group(group)

    def leave_servers(self, reason: str) -> None:
        """This process ends, or its session; `reason` is empty where all is well. Only the first word counts."""
        if self.reserved is not None:
            self.reserved.link.leave(reason)

    @property
    def group_ranks(self) -> int:
        """Ranks that run attention: trainers and reserved servers."""
        return self.ranks if self.reserved is None else self.reserved.role.ranks

    # Models and their loaders

    def bind(self, model: torch.nn.Module, binding: Any) -> None:
        """Remember what an integration attached to a model; it has a `feed`."""
        self.bindings[model] = binding

    def open_feed(self, fingerprint: str) -> Feed:
        """The feed of a model for which CAD is turned on now; `fingerprint` is compared between ranks."""
        return Feed(self.plans, fingerprint, number=len(self.bindings))

    def find_binding(self, model: torch.nn.Module) -> Any:
        """What was bound to a model, through any wrapper; None where CAD is off for it."""
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
        engine: Any = model
        if accumulation is None:
            says = getattr(engine, "gradient_accumulation_steps", None)
            accumulation = int(says()) if callable(says) else 1
        trained = (lambda: int(engine.micro_steps)) if hasattr(engine, "micro_steps") else None
        return LookAheadLoader(loader, binding.feed, accumulation, trained)

    # Statistics

    def count(self, micro_batch: MicroBatch) -> None:
        """Count a micro-batch that is about to be trained."""
        if self.reserved is not None and self.rank == 0 and self._statistics.micro_batches % EVERY == 0:
            self._look_for_idle(self.reserved)
        self._statistics.add(micro_batch)
        if self.tracer is not None:
            if self.reserved is not None:
                self.reserved.trace_next(self.tracer)
            self.tracer.next_micro_batch()

    def _look_for_idle(self, reserved: Reserved) -> None:
        """Say once where servers or trainers were idle since this was called last."""
        warm, found = self._statistics.micro_batches > EVERY, self.take_statistics("idle")
        if not warm or self._said_idle or not found.servers_s:
            return
        role = reserved.role
        trainers_idle = found.waited_s * role.servers / found.servers_s
        text = advise(found.servers_idle, trainers_idle, role.servers, role.trainers)
        if text:
            self._said_idle = True
            notice(text)

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
        now.bytes_sent = 0 if self.transport is None else self.transport.bytes_sent
        return now

    def take_statistics(self, reader: str) -> Statistics:
        """What happened since this reader last asked."""
        now = self.statistics
        earlier = self._read.get(reader, Statistics())
        self._read[reader] = now
        return now.since(earlier)

    def report(self) -> str:
        """What CAD did since the session opened, on this rank, as one line."""
        return f"{self.statistics.in_words()}; rank {self.rank} of {self.ranks}, {self._how()}"

    def say_first(self) -> None:
        """Once, on rank 0, when the first micro-batch was planned: that CAD is on, and what to expect."""
        if self._said_first or self.rank != 0:
            return
        self._said_first = True
        now = self.statistics
        gain = f"attention max/mean {now.imbalance_before:.2f} → {now.imbalance:.2f} in the first micro-batch"
        sent = f"rank 0 sent {now.bytes_sent / 2**20:.1f} MiB in its forward"
        ranks = f"{self.ranks} rank{'' if self.ranks == 1 else 's'}"
        if self.reserved is not None:
            servers = self.reserved.role.servers
            ranks = f"{_count(self.ranks, 'trainer')} and {_count(servers, 'reserved server')}"
        notice(f"CAD is on: {ranks}, {self._how()}; {gain}, {sent}")

    def say_last(self) -> None:
        """Once, on rank 0, where the session closes or the process ends: what CAD did."""
        if self._said_first and not self._said_last:
            self._said_last = True
            notice(f"CAD is done: {self.report()}")

    def _links_in_words(self) -> str:
        return "" if self.traffic is None else f"{self.traffic.links}, "

    def _how(self) -> str:
        transport = "nothing to exchange" if self.transport is None else f"transport {self.transport.name}"
        kernels = dict.fromkeys(kernel.name for kernel in self._kernels.values())
        return f"{transport}, {self._links_in_words()}kernel {', '.join(kernels) or 'not chosen yet'}"

    def describe(self) -> str:
        """One line for the log."""
        transport = "nothing to exchange" if self.transport is None else self.transport.name
        servers = "" if self.reserved is None else f" beside {_count(self.reserved.role.servers, 'reserved server')}"
        return (
            f"rank {self.rank} of {self.ranks} attention servers{servers}, transport {transport}, "
            f"overlap {self.config.overlap}, tolerance {self.config.tolerance}, cost {self.cost.name}, "
            f"{self._links_in_words()}{in_words(self.speeds, self.config.speeds)}"
            f"{f'straggler relief {self.pace.most}' if self.pace.most else 'no straggler relief'}"
        )

    def _choose_cost(self) -> Profile:
        """The costs that rank 0 finds: profiles measured on two machines are never equal, plans must be."""
        found: list[Profile | CADError | None] = [None]
        if self.rank == 0:
            try:
                found = [choose_profile(self.config.cost, self.device, self.config.kernel)]
                if (
                    found[0] is GENERIC_GPU
                    and self.group_ranks > 1
                    and not torch.are_deterministic_algorithms_enabled()
                ):
                    # Ratios cannot be weighed against transfers.
                    found = [in_seconds(GENERIC_GPU, self.device, self.config.kernel)]
            except CADError as error:
                found = [error]
        if self._cpu_group is not None:
            dist.broadcast_object_list(found, src=dist.get_global_rank(self._cpu_group, 0), group=self._cpu_group)
        if not isinstance(found[0], Profile):
            raise found[0] or CADError("rank 0 sent no cost profile")
        return found[0]

    # Kernels and modes

    def kernel(self, need: KernelNeed) -> Kernel:
        """The kernel for a layer, chosen once per need."""
        if need not in self._kernels:
            from deepspeed_cad.kernels.registry import choose

            self._kernels[need] = choose(self.config.kernel, need)
        return self._kernels[need]

    def descriptor(self, micro_batch: MicroBatch, window: int | None, checkpointed: bool) -> MaskDescriptor:
        """What a model's layers receive as their mask."""
        # Without gradients no backward comes: nothing is kept for one.
        backward = torch.is_grad_enabled()
        keep = self.config.backward == "keep" or (self.config.backward == "auto" and not checkpointed)
        modes = Modes(
            self.config.overlap != "none", self.config.recompute_attention or not backward, keep and backward,
            sinks_travel=self.reserved is not None, returns=backward,
        )  # fmt: skip
        return MaskDescriptor(micro_batch, window, self._kernel_for, modes)

    def _kernel_for(self, shape: HeadShape, rule: MaskRule, q: torch.Tensor) -> Kernel:
        return self.kernel(kernel_need(shape, rule, q))


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


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def close_session() -> None:
    """Close the session of this process, if there is one."""
    while _sessions:
        _sessions.pop().close()


def find_binding(model: torch.nn.Module) -> Any:
    """What an integration bound to a model, through any wrapper; None where CAD is off for it."""
    session = current_session()
    return None if session is None else session.find_binding(model)
