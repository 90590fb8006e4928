"""The session: the one object per process that ties the rooms together.

It owns the groups, the transport, the look-ahead thread and the statistics. Host frameworks talk to nothing else of the
core. Its groups are opened in groups.py; report/session_lines.py words what it says.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from deepspeed_cad import native
from deepspeed_cad.ahead.crew import Crew
from deepspeed_cad.ahead.feed import Feed
from deepspeed_cad.ahead.gather import Gatherer, Subject, What
from deepspeed_cad.ahead.loader import LookAheadLoader
from deepspeed_cad.ahead.plan import Learned, Plans
from deepspeed_cad.ahead.step import NOT_STATED, settle
from deepspeed_cad.ahead.whereabouts import Whereabouts
from deepspeed_cad.ahead.worker import Worker
from deepspeed_cad.attention.microbatch import MaskDescriptor, MicroBatch
from deepspeed_cad.attention.parking import Parking
from deepspeed_cad.attention.setup import CallCounts, Modes
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, why_ended
from deepspeed_cad.exchange.links import Links
from deepspeed_cad.exchange.probe import DETERMINISTIC, Opened, open_transport, with_links
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.exchange.waits import Transfers
from deepspeed_cad.feedback.layer_times import LayerTimes
from deepspeed_cad.feedback.link_speeds import LinkSpeeds
from deepspeed_cad.feedback.memory_limit import ALL, SHARE, MemoryLimit
from deepspeed_cad.groups import open_groups, share_cost
from deepspeed_cad.kernels.interface import Kernel, KernelNeed
from deepspeed_cad.kernels.registry import choose
from deepspeed_cad.notice import notice
from deepspeed_cad.profiles.speed import find_speeds, in_words
from deepspeed_cad.report import session_lines
from deepspeed_cad.report.session_lines import EVERY, SessionFacts, advise, unused_keys
from deepspeed_cad.report.statistics import Statistics
from deepspeed_cad.server.meeting import transports_of
from deepspeed_cad.shares import Replica
from deepspeed_cad.trace import open_tracer

logger = logging.getLogger("deepspeed_cad")

_sessions: list[Session] = []
# A forked process, as loaders start, has none: where it ends it tells nobody that its parent did.
os.register_at_fork(after_in_child=_sessions.clear)


def processes() -> int:
    """Of this job: by torch.distributed, or by the launcher's variable before that is initialised."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE") or 1)


class Session:
    """CAD in this process: one per process, for any number of models.

    `replica`: the ranks that divide heads with this one; None: it has all of them. Raises CADConfigError where the
    configuration asks for what this machine lacks, and CADError without the compiled library."""

    def __init__(self, config: CADConfig, device: torch.device, replica: Replica | None = None) -> None:
        native.load()  # before this rank meets the others
        self.config, self.device = config, device
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        """Of the job that train; those of the CAD group are `group_ranks`."""
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._refuse_alone()
        self._statistics = Statistics()
        self._forward_only = Statistics()
        self._read: dict[str, Statistics] = {}
        self._said: set[str] = set()
        """Lines of which each is said once, by what they are about; warnings by their text."""
        self.ended: str | None = None
        """Why this process ends, or its session; empty where all is well, None while it goes on."""
        self.counts = CallCounts()
        self.bindings: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
        """What integrations attached to which model; it has a `feed`."""
        self.references: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
        """The same of models that are only looked at."""
        self.decoders: WeakSet[torch.nn.Module] = WeakSet()
        """Of all of these, and of models that keep their attention."""
        self.feeds: list[Feed] = []
        self.groups = open_groups(config, device, replica, self.rank, self.ranks)
        self.liveness, self.servers, self.shares = self.groups.liveness, self.groups.servers, self.groups.shares
        self.worker = Worker(device, config.timeout_s)
        self.cost = share_cost(config, device, self.groups.cpu, exchanges=self.group_ranks > 1)
        # "auto" finds costs on the machine, so ranks compare them beside the configuration.
        settings = f"{config.fingerprint()} {self.cost.figures}"
        opening = Gatherer(self.groups.cpu, self.rank, self.ranks, self.liveness, self.shares, settings)
        agree = self.groups.agree(lambda value: self.worker.run(lambda: opening.numbers(value, Subject(What.CHOICE))))
        opened: Opened | None = None
        if (group := self.groups.exchange) is not None:
            opened = open_transport(
                config.transport, group, device, agree, self.liveness, config.timeout_s, transports_of(config, device)
            )
            opened = with_links(opened, device, agree, config.links)
        self.links = Links(None, None, "not used") if opened is None else opened.links
        """Speeds that this session began with."""
        wanted, fixed = config.speeds if self.servers.at_start else None, torch.are_deterministic_algorithms_enabled()
        self.speeds = find_speeds(wanted, device, config.kernel, agree, fixed)
        """[ranks of the CAD group] in attention, beside what the costs say; None: all are equal."""
        crew = self.servers.crew(opened, self.speeds)
        learned = self.learned = self._learned(crew)
        reporters = (learned.links, learned.memory, learned.layer_times, *self.servers.reporters)
        self.gatherer = Gatherer(
            self.groups.cpu, self.rank, self.ranks, self.liveness, self.shares, settings,
            [reporter for reporter in reporters if reporter is not None], opening.begun,
        )  # fmt: skip
        self.tracer = self.counts.tracer = open_tracer(
            config.trace, device, self.rank, self.ranks + len(self.servers.members.servers)
        )
        aside = None
        if device.type == "cuda" and crew.transport is not None and config.overlap_used == "local_first":
            aside = torch.cuda.Stream(device, priority=-1)
        self.parking = Parking(device) if config.keep == "host" else None
        """Where what attention keeps waits for backward; None: on the device."""
        self._kernels: dict[KernelNeed, Kernel] = {}
        self.plans = Plans(config, device, self.gatherer, self.worker, self.cost, self.counts, crew, learned, aside)
        self.whereabouts: Whereabouts | None = None
        if self.liveness is not None and crew.transport is not None:
            self.whereabouts = Whereabouts(
                self.liveness, self.gatherer, self.worker, self.feeds,
                # Servers may change, and the transport with them.
                lambda: 0 if self.transport is None else self.transport.exchanges,
                lambda: self._statistics.micro_batches, config.timeout_s,
            )  # fmt: skip
        self.servers.begin(crew.transport, self._change_servers)
        self.warn(unused_keys(config))

    # Opening and closing

    def _change_servers(self, opened: Opened | None) -> None:
        """Other servers than before: micro-batches are planned for these. Runs on the training thread."""
        self.groups = replace(self.groups, exchange=None if opened is None else opened.group)
        crew = self.servers.crew(opened, self.speeds)
        if self.learned.links is not None and self.links.source == "measured" and crew.transport is not None:
            self.learned.links.watch(self._note_transfers(crew))
        self.plans.crew = crew

    def _note_transfers(self, crew: Crew) -> Transfers:
        assert crew.transport is not None and crew.hosts is not None
        crew.transport.transfers = Transfers(
            self.shares.replica, crew.hosts.tolist(), self.links.inside, self.links.between
        )
        return crew.transport.transfers

    def _learned(self, crew: Crew) -> Learned:
        """What is learned while training; where plans must not depend on measured times it stays as it is."""
        if crew.transport is None:
            return Learned()
        pauses, counts = torch.are_deterministic_algorithms_enabled, self.counts
        profile = Links(self.cost.inside, self.cost.between, f"of the profile {self.cost.name}")
        rule = self.links if self.links.source == "given" else profile
        if self.links.source == DETERMINISTIC and (profile.inside or profile.between):
            self.links = Links(profile.inside, profile.between, f"{profile.source}; {DETERMINISTIC}")
        transfers = self._note_transfers(crew) if self.links.source == "measured" else None
        logger.info("%s", self.links)
        names = [f"rank {rank} on {host}" for rank, host in zip(self.shares.members, self.groups.hosts, strict=True)]
        links = LinkSpeeds(self.links, rule, transfers, names, pauses)
        given = None if isinstance(self.config.memory, str) else self.config.memory
        share = ALL if self.servers.at_start else SHARE
        memory = MemoryLimit(given, self.device, self.shares.members, lambda: counts.backwards > 0, pauses, share)
        return Learned(links, memory, LayerTimes(crew.trainers, lambda of: counts.stretch_times[of].take(), pauses))

    @property
    def transport(self) -> Transport | None:
        """What carries exchanges; None where there is one rank."""
        return self.plans.crew.transport

    def close(self) -> None:
        """Release communicators and buffers. Models that CAD was on for train no more; another one may begin anew."""
        if self in _sessions:
            _sessions.remove(self)
        self.say_last(reason := why_ended(sys.exc_info()[1]))
        self.servers.close()
        if self.whereabouts is not None:
            self.whereabouts.close()
        if self.liveness is not None:
            if reason:  # an exception, on whose way a script closes
                self.liveness.report(reason)
            self.liveness.close()
        self.worker.close()
        if self.tracer is not None:
            self.tracer.finish()
        try:
            if self.transport is not None:
                self.transport.close()
        finally:
            for reference in self.references.values():
                reference.remove()
            self.leave(reason)
            self.groups.close()

    def leave(self, reason: str) -> None:
        """This process ends, or its session; `reason` is empty where all is well. Only the first word counts."""
        if self.ended is None:
            self.ended = reason
            if self.whereabouts is not None:
                self.whereabouts.leave(reason)
            self.servers.leave(reason)

    def farewell(self, reason: str) -> None:
        """The process ends and closes no session: tell whoever waits, and the user; `reason` as above."""
        self.leave(reason)
        self.say_last(reason)
        if self.tracer is not None and not reason:
            self.tracer.finish()

    @property
    def group_ranks(self) -> int:
        """Ranks of the CAD group, which run attention: trainers and servers."""
        return self.servers.members.ranks

    # Models and their loaders

    def open_feed(self, fingerprint: str, alternates: bool = True) -> Feed:
        """The feed of a model for which CAD is turned on now; `fingerprint` is compared between ranks. `alternates`:
        whether its layers can alternate nano-batches."""
        if not alternates:
            self.plans.in_one_part.add(len(self.feeds))
        self.feeds.append(Feed(self.plans, fingerprint, number=len(self.feeds)))
        return self.feeds[-1]

    def find_binding(self, model: torch.nn.Module) -> Any:
        return next((self.bindings[module] for module in model.modules() if module in self.bindings), None)

    def find_number(self, number: int) -> Any:
        """The binding of a model by the number that its feed has in what ranks tell each other; None: not known."""
        known = [*self.bindings.values(), *self.references.values()]
        return next((one for one in known if one.feed.number == number), None)

    def look_ahead(
        self, loader: Any, model: torch.nn.Module, *, accumulation: int | None = None, global_loss: bool = False
    ) -> LookAheadLoader:
        """A loader for a training loop of one's own that arranges and announces each step while the one before trains.

        Under no_grad, or with a model in eval mode, it gives its batches out as they are; with `"forward_only":
        "balanced"` ranks may then have unequal numbers of them: at its end this rank attends for those that have more.

        `accumulation`: micro-batches per optimizer step; None: what a DeepSpeed engine says, else 1. `global_loss`
        states that the loss is a sum over tokens, divided by one number for the whole step of all ranks: documents may
        then be dealt out to ranks."""
        if (binding := self.find_binding(model)) is None:
            raise CADConfigError(f"CAD is not on for {type(model).__name__}: call deepspeed_cad.apply(model) first")
        engine = cast(Any, model)
        ends_steps = hasattr(model, "micro_steps") and getattr(model, "managed_gradient_accumulation", lambda: True)()
        own = engine.gradient_accumulation_steps if ends_steps else None
        # Where the script ends steps itself, micro_steps counts them and not micro-batches.
        trained = (lambda: (engine.micro_steps, engine.global_steps)) if own and accumulation in (None, own()) else None
        settled = partial(settle, binding.feed, model, "" if global_loss else NOT_STATED)
        return LookAheadLoader(loader, binding.feed, accumulation or own or 1, trained, binding, settle=settled)

    # Statistics

    def count(self, micro_batch: MicroBatch, trained: bool = True) -> None:
        """Count a micro-batch whose forward begins; `trained`: a backward follows."""
        if not trained:
            self._forward_only.add(micro_batch)
            return
        if self.servers.at_start and self.rank == 0 and self._statistics.micro_batches % EVERY == 0:
            self._look_for_idle()
        self._statistics.add(micro_batch)
        # Where documents span ranks as loaded no step is arranged; else CAD cut them.
        spans = micro_batch.layout.segments.begin.any() and not any(feed.arranged for feed in self.feeds)
        if spans and self._first_time("spans"):
            notice("documents span ranks: their position_ids go on from one rank to the next")
        if self.tracer is not None:
            self.servers.trace_next(self.tracer)
            self.tracer.next_micro_batch()

    @property
    def statistics(self) -> Statistics:
        """Sums since the session opened, on this rank."""
        now = self._statistics.copy()
        now.waited_s = self.counts.waits.seconds()
        now.served_s, now.servers_s = self.servers.busy()
        looks = self.forward_only
        now.looks, now.looks_mean = looks.micro_batches, looks.mean
        now.looks_slowest, now.looks_slowest_before = looks.slowest, looks.slowest_before
        now.bytes_sent = self.servers.bytes_sent
        if self.transport is not None:
            now.bytes_sent += self.transport.bytes_sent
            if self.learned.memory is not None:
                now.landing_bytes = self.transport.landing_bytes or int(self.learned.memory.most_needed)
        return now

    @property
    def forward_only(self) -> Statistics:
        """Of forwards without backward that all ranks ran together: only what is counted with each micro-batch."""
        return self._forward_only.copy()

    def take_statistics(self, reader: str) -> Statistics:
        """What happened since this reader last asked."""
        earlier, now = self._read.get(reader, Statistics()), self.statistics
        self._read[reader] = now
        return now.since(earlier)

    # What it says

    def facts(self) -> SessionFacts:
        transport, learned = self.transport, self.learned
        return SessionFacts(
            rank=self.rank,
            trainers=self.ranks,
            shares=self.shares.count,
            pieces=self.shares.pieces,
            servers_at_start=self.servers.at_start,
            transport="" if transport is None else transport.name,
            overlap=self.config.overlap_used,
            tolerance=self.config.tolerance,
            cost=self.cost.name,
            speeds=in_words(self.plans.learned_speeds(0) if self.speeds is None else self.speeds),
            links="" if learned.links is None else str(learned.links.links),
            kernels=tuple(dict.fromkeys(kernel.name for kernel in self._kernels.values())),
            landing_bytes=0 if transport is None else transport.landing_bytes,
            landing_limit=math.inf if learned.memory is None else learned.memory.now.size,
            parked_bytes=None if self.parking is None else self.parking.host_bytes,
            arranged=next((text for feed in self.feeds if (text := feed.in_words)), ""),
            statistics=self.statistics,
        )

    def describe(self) -> str:
        """How the session is set up, as one line for the log."""
        return session_lines.describe(self.facts())

    def report(self) -> str:
        """What CAD did since the session opened, on this rank, as one line."""
        return session_lines.summary(self.facts())

    def warn(self, lines: Iterable[str]) -> None:
        """Warn of what a user set in vain: each line once, and on rank 0 only."""
        for text in lines:
            if self._first_time(text):
                logger.warning(text)

    def say_first(self) -> None:
        """When the first micro-batch was planned: that CAD is on. Once, and on rank 0 only.
        Raises CADConfigError where torch.distributed was initialised later, so that each rank attends alone."""
        self._refuse_alone()
        if self._first_time("first"):
            notice(session_lines.first_line(self.facts()))

    def _refuse_alone(self) -> None:
        if self.ranks == 1 < processes():
            raise CADConfigError(
                f"CAD was turned on before torch.distributed was initialised, so each of {processes()} processes would "
                "attend alone. Turn it on after init_process_group; in a Trainer's script, after its TrainingArguments"
            )

    def say_last(self, reason: str) -> None:
        """Where the session closes or the process ends, for a `reason` or well: what CAD did. Once, on rank 0 only."""
        if "first" in self._said and self._first_time("last"):
            notice(session_lines.last_line(self.facts(), reason or self.ended or self.plans.abandoned))

    def _look_for_idle(self) -> None:
        """Say once where servers or trainers were idle since this was called last."""
        warm, since = self.statistics.micro_batches > EVERY, self.take_statistics("idle")
        if not warm or not since.servers_s:
            return
        trainers_idle = since.waited_s * self.servers.at_start / since.servers_s
        text = advise(since.servers_idle, trainers_idle, self.servers.at_start, self.ranks)
        if text and self._first_time("idle"):
            notice(text)

    def _first_time(self, what: str) -> bool:
        """Whether rank 0 has not said this yet."""
        new = self.rank == 0 and what not in self._said
        if new:
            self._said.add(what)
        return new

    # Kernels and modes

    def kernel(self, need: KernelNeed) -> Kernel:
        """The kernel for a layer, chosen once per need."""
        if need not in self._kernels:
            self._kernels[need] = choose(self.config.kernel, need, self.rank)
        return self._kernels[need]

    def descriptor(
        self, micro_batch: MicroBatch, window: int | None, backward: bool | None = None, chunk: int | None = None
    ) -> MaskDescriptor:
        """What a model's layers receive as their mask; `backward`: whether one will come, None: with gradients;
        `chunk`: see MaskDescriptor."""
        # Without one nothing is kept for it.
        backward = torch.is_grad_enabled() if backward is None else backward
        modes = Modes(
            self.config.overlap != "none", self.config.recompute_attention or not backward,
            sinks_travel=self.servers.at_start > 0, returns=backward, parking=self.parking,
        )  # fmt: skip
        return MaskDescriptor(micro_batch, window, self.kernel, modes, chunk=chunk)


def current_session() -> Session | None:
    """The session of this process, or None where CAD is off."""
    return next(iter(_sessions), None)


def open_session(config: CADConfig, device: torch.device, replica: Replica | None = None) -> Session:
    """The session of this process: opened now, or the open one if its config is the same. `replica`: see Session; None
    for an open one: as it is."""
    if (session := current_session()) is not None:
        if session.config != config:
            raise CADConfigError(
                "CAD is already on in this process with another configuration; all models of a process share one"
            )
        shares = session.shares
        if replica is not None and replica.ranks not in map(tuple, shares.replicas.tolist()):
            raise CADConfigError(
                f"CAD is already on in this process, where {shares.count} ranks divide heads among them; for another "
                f"model that would be ranks {list(replica.ranks)}. All models of a process must divide them alike"
            )
    else:
        _sessions.append(session := Session(config, device, replica))
    return session


@atexit.register
def _end() -> None:
    # Set by the interpreter when it has shown what ended the script.
    reason = why_ended(getattr(sys, "last_value", None))
    for session in _sessions:
        session.farewell(reason)


def close_session() -> None:
    while _sessions:
        _sessions.pop().close()


def find_binding(model: torch.nn.Module) -> Any:
    """What an integration bound to a model, through any wrapper; None where CAD is off for it."""
    session = current_session()
    return None if session is None else session.find_binding(model)
