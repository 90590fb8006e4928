"""The session: the one object per process that ties the rooms together.

It owns the CAD process group, the transport, the look-ahead thread and the statistics. Host frameworks (engine/ and
integrations/) talk to nothing else of the core.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.ahead.gather import Announcement, Gatherer, Worker
from deepspeed_cad.ahead.pace import Pace
from deepspeed_cad.attention.call import CallCounts, Modes
from deepspeed_cad.attention.microbatch import MaskDescriptor, MicroBatch, PlanKey, whole_rank_tasks
from deepspeed_cad.config import CADConfig
from deepspeed_cad.cost import PAIRS
from deepspeed_cad.errors import CADConfigError, CADDataError, CADError, CADPeerError
from deepspeed_cad.exchange.liveness import Liveness, open_board
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.kernels.interface import Kernel, KernelNeed, MaskRule
from deepspeed_cad.layout import Layout, LocalSegments, Tick, assemble
from deepspeed_cad.meet import meet
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.cut import choose_cut
from deepspeed_cad.planner.plan import HeadShape, Plan, PlanInput
from deepspeed_cad.profiles import Profile, choose_profile
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
        self._said: set[str] = set()
        self.counts = CallCounts()
        self.bindings: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
        """What integrations attached to which model."""
        self.liveness: Liveness | None = None
        self.transport: Transport | None = None
        self._cpu_group: dist.ProcessGroup | None = None
        self._exchange_group: dist.ProcessGroup | None = None
        if self.ranks > 1:
            self._open_groups(group)
        self.pace = Pace(self.ranks, self.counts.waits.take, 0.0, torch.are_deterministic_algorithms_enabled)
        self.gatherer = Gatherer(self._cpu_group, self.rank, self.ranks, self.liveness, self.pace)
        self.worker = Worker(device)
        if self._exchange_group is not None:
            self._open_transport(self._exchange_group)
        self.tracer = self.counts.tracer = open_tracer(config.trace, config.trace_steps, device, self.rank, self.ranks)
        if self.tracer is not None and self.transport is not None:
            self.transport = self.tracer.watch_transport(self.transport)
        self.cost = self._choose_cost()
        if self.cost.unit == "seconds":
            self.pace.most = config.straggler_relief
        elif config.straggler_relief not in (0.0, CADConfig.straggler_relief) and self.rank == 0:
            logger.warning(
                '"straggler_relief" is %s and does nothing: lateness is measured in seconds, and costs are %s. Set '
                '"cost" to a profile that `deepspeed-cad profile` wrote',
                config.straggler_relief, self.cost.name,
            )  # fmt: skip
        self.aside: torch.cuda.Stream | None = None
        if device.type == "cuda" and self.transport is not None and config.overlap == "local_first":
            self.aside = torch.cuda.Stream(device, priority=-1)
        self._kernels: dict[KernelNeed, Kernel] = {}

    # Opening and closing

    def _open_groups(self, group: dist.ProcessGroup | None) -> None:
        meet(group, self.config.timeout_s)
        members = dist.get_process_group_ranks(group) if group is not None else None
        timeout = timedelta(seconds=self.config.timeout_s)
        self._cpu_group = dist.new_group(members, timeout=timeout, backend="gloo")
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._exchange_group = dist.new_group(members, timeout=timeout, backend=backend)
        self.liveness = open_board(self._cpu_group, self.rank, self.ranks, self.config.timeout_s)

    def _open_transport(self, group: dist.ProcessGroup) -> None:
        from deepspeed_cad.exchange.probe import choose_transport

        self.transport = choose_transport(
            self.config.transport,
            group,
            self.device,
            agree=lambda value: self.on_worker(lambda: self.gatherer.numbers(value, "choice of transport")),
            liveness=self.liveness,
            timeout_s=self.config.timeout_s,
        )

    def close(self) -> None:
        """Release communicators and buffers; the models go back to local attention."""
        self.worker.close()
        if self.tracer is not None:
            self.tracer.finish()
        if self.transport is not None:
            self.transport.close()
        for group in (self._cpu_group, self._exchange_group):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def on_worker(self, job: Any) -> Any:
        """Run a job on the look-ahead thread and wait for it, `timeout_s` at most."""
        return self.wait(self.worker.submit(job), "the look-ahead thread")

    def wait(self, future: Future[Any], what: str) -> Any:
        """The result of a job of the look-ahead thread; its error is raised here."""
        try:
            return future.result(self.config.timeout_s + 30.0)
        except FutureTimeout as error:
            if future.done():
                raise
            raise CADPeerError(f"rank {self.rank} waited {self.config.timeout_s:.0f} s for {what}") from error

    def look_ahead(
        self, loader: Any, model: torch.nn.Module, *, accumulation: int | None = None, global_loss: bool = False
    ) -> Any:
        """A loader for a training loop of one's own that arranges and announces each step while the one before trains;
        arguments and errors: `deepspeed_cad.ahead.loader.look_ahead`."""
        from deepspeed_cad.ahead.loader import look_ahead

        return look_ahead(self, loader, model, accumulation, global_loss)

    # Statistics

    def count(self, micro_batch: MicroBatch) -> None:
        """Count a micro-batch that is about to be trained."""
        self._statistics.add(micro_batch)
        if self.tracer is not None:
            self.tracer.next_micro_batch()

    @property
    def statistics(self) -> Statistics:
        """Sums since the session opened, on this rank."""
        late = self.pace.late
        self._statistics.late_s, self._statistics.late_rank = max(0.0, float(late.max())), int(late.argmax())
        self._statistics.waited_s = self.counts.waits.seconds()
        self._statistics.bytes_sent = 0 if self.transport is None else self.transport.bytes_sent
        return self._statistics.copy()

    def take_statistics(self, reader: str) -> Statistics:
        """What happened since this reader last asked."""
        now = self.statistics
        earlier = self._read.get(reader, Statistics())
        self._read[reader] = now
        return now.since(earlier)

    def describe(self) -> str:
        """One line for the log."""
        transport = "nothing to exchange" if self.transport is None else self.transport.name
        return (
            f"rank {self.rank} of {self.ranks} attention servers, transport {transport}, "
            f"overlap {self.config.overlap}, tolerance {self.config.tolerance}, cost {self.cost.name}, "
            f"{f'straggler relief {self.pace.most}' if self.pace.most else 'no straggler relief'}"
        )

    # Planning

    def plan_tick(self, tick: Tick, key: PlanKey, late: np.ndarray) -> Plan:
        """The plan of one tick for layers of one kind; `late` is the pace when the micro-batch was gathered."""
        base = self.pace.base_load(late, self._mean_attention(tick, key))
        plan = make_plan(
            PlanInput(
                tick, key.shape, self.cost.cost_for(key.shape), key.window, self.config.tolerance,
                self.config.granularity, base_load=base, ranks_per_node=self._ranks_per_node(),
            )
        )  # fmt: skip
        if base is None:
            return plan
        # Statistics speak of attention, not of when ranks finish.
        return replace(plan, load=plan.load - base, load_before=plan.load_before - base)

    def _mean_attention(self, tick: Tick, key: PlanKey) -> float:
        each = self.cost.cost_for(key.shape).of(tick.query.begin, tick.query.end, key.window)
        return float(each.sum()) * key.shape.groups / self.ranks

    def open_micro_batch(self, announcements: list[Announcement], keys: list[PlanKey]) -> MicroBatch:
        """A micro-batch of all ranks, planned for layers of the given kinds. Runs on the look-ahead thread."""
        layout = assemble([one.local for one in announcements])
        ticks: tuple[Tick, ...] = (layout.tick(),)
        if self.config.overlap == "pingpong":
            cut = choose_cut(layout, np.array([one.unit for one in announcements]))
            if cut is not None:
                ticks = layout.cut(cut)
            elif self.ranks > 1:
                self._say_once("a micro-batch was not cut into nano-batches: its documents span ranks, or it is tiny")
        # Nothing else may change what is learned of paces: plans are made on this thread and at the forward, on every
        # rank in another order.
        if self.pace.paused:
            self._say_once("slower ranks are not relieved: torch's deterministic algorithms are on, on some rank")
        for key in keys:
            self.pace.expect(max(self._mean_attention(tick, key) for tick in ticks))
        micro_batch = MicroBatch(
            self.rank, layout, ticks, self.device, partial(self.plan_tick, late=self.pace.late), self._agree,
            self.transport, self.counts, aside=self.aside,
        )  # fmt: skip
        if keys:
            micro_batch.plan_all(keys)
        return micro_batch

    def _say_once(self, text: str) -> None:
        """Log what a user may wonder about, the first time that it happens."""
        if text not in self._said:
            self._said.add(text)
            logger.info(text)

    def plans_at_forward(self) -> None:
        """A forward came that no loader had announced: say so, once, where look-ahead is asked for."""
        if self.config.look_ahead and self.ranks > 1:
            self._say_once(
                "no loader announces micro-batches, so they are planned when their forward starts: read the data "
                "through deepspeed_cad.current_session().look_ahead(loader, model) to plan ahead"
            )

    def open_local(self, local: LocalSegments) -> MicroBatch:
        """A micro-batch that this rank attends alone: evaluation. Raises CADDataError if documents span ranks."""
        if len(local.begin) and local.begin[0] > 0:
            raise CADDataError(
                f"evaluation runs attention on each rank alone, but the first document of rank {self.rank} starts at "
                f"position {int(local.begin[0])}: evaluate on whole documents"
            )
        layout = assemble([local])
        return MicroBatch(
            0, layout, (layout.tick(),), self.device, lambda tick, key: _plan_alone(layout, key),
            lambda value, what: None, None, CallCounts(),
        )  # fmt: skip

    def _agree(self, value: int, what: str) -> None:
        if self.worker.is_current():
            self.gatherer.agree(value, what)
        else:
            self.on_worker(lambda: self.gatherer.agree(value, what))

    def _ranks_per_node(self) -> int | None:
        # torchrun and accelerate set the first, DeepSpeed's launcher the second.
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or self.ranks)
        return local if 0 < local < self.ranks and self.ranks % local == 0 else None

    def _choose_cost(self) -> Profile:
        """The costs that rank 0 finds: profiles measured on two machines are never equal, plans must be."""
        found: list[Profile | CADError | None] = [None]
        if self.rank == 0:
            try:
                found = [choose_profile(self.config.cost, self.device, self.config.kernel)]
            except CADError as error:
                found = [error]
        if self._cpu_group is not None:
            dist.broadcast_object_list(found, src=dist.get_global_rank(self._cpu_group, 0), group=self._cpu_group)
        if not isinstance(found[0], Profile):
            raise found[0] or CADError("rank 0 sent no cost profile")
        return found[0]

    @property
    def settings(self) -> str:
        """What ranks compare before they train: the configuration and the costs, which "auto" finds on the machine."""
        return f"{self.config.fingerprint()} {self.cost.figures}"

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
        modes = Modes(self.config.overlap != "none", self.config.recompute_attention or not backward, keep and backward)
        return MaskDescriptor(micro_batch, window, self._kernel_for, modes)

    def _kernel_for(self, shape: HeadShape, rule: MaskRule, q: torch.Tensor) -> Kernel:
        return self.kernel(
            KernelNeed(
                q.device, q.dtype, shape.head_dim, shape.value_dim, shape.heads_per_group,
                rule.window is not None, rule.softcap is not None, torch.are_deterministic_algorithms_enabled(),
            )
        )  # fmt: skip


def _plan_alone(layout: Layout, key: PlanKey) -> Plan:
    tasks = whole_rank_tasks(layout, key.shape.groups)
    load = PAIRS.of(layout.segments.begin, layout.segments.end, key.window).sum(keepdims=True)
    nothing = np.zeros(1, np.int64)
    return Plan(tasks, load, load, nothing, nothing)


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


def close_session() -> None:
    """Close the session of this process, if there is one."""
    while _sessions:
        _sessions.pop().close()


def apply(model: torch.nn.Module, config: CADConfig | dict[str, Any] | None = None) -> torch.nn.Module:
    """Turn CAD on for one Hugging Face model; call after torch.distributed is initialised, before DDP or FSDP.

    Idempotent, and of no effect on any other model. `config` is a CADConfig, the "cad" block as a dict, or None for the
    defaults. Returns the model. Raises CADConfigError for a bad configuration and CADUnsupportedError for a model that
    CAD cannot reproduce exactly.
    """
    from deepspeed_cad.integrations.transformers import bind

    checked = config if isinstance(config, CADConfig) else CADConfig.from_dict({} if config is None else config)
    if checked.enabled:
        bind(model, checked)
    return model
