"""Core attention as a function: `deepspeed_cad.open`, for models that no host framework knows.

In: where documents of a micro-batch begin, then Q, K and V of each layer. Out: O. A plan is gathered and made on the
look-ahead thread, so it may be asked for while the micro-batch before it trains; the first `attend` waits for it.

`T` tokens of this rank; `H` and `K` its query and key heads, `D` and `V` their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.ahead.documents import Announcement, read_documents
from deepspeed_cad.attention.layer import LayerInput
from deepspeed_cad.attention.microbatch import MaskDescriptor, MicroBatch, PlanKey
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADDataError, CADError, CADUnsupportedError
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.layout import LocalSegments
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.request import settle_request
from deepspeed_cad.session import Session, open_session
from deepspeed_cad.shares import Replica, replica_of_groups, replica_of_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def open(
    config: CADConfig | dict[str, Any] | None = None,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
) -> CAD:
    """CAD for one model of your own; every rank calls it, after torch.distributed is initialised.

    `config`: a CADConfig, the "cad" block as a dict, or None for what the launcher asks for, else the defaults.
    `device`: where attention runs; None: this process's GPU, or the CPU where there is none. `mesh`: of all ranks,
    where some divide the heads of a micro-batch among them: those along an axis "tp". `group` says the same without
    one: the ranks with this one's share of heads, which train other micro-batches (data-parallel ranks). Raises
    CADConfigError for a bad configuration, mesh or group."""
    checked = settle_request(config, "deepspeed_cad.open")
    fits = {"overlap": checked.overlap != "interleave", "verify": not checked.verify,
            "documents": checked.documents != "deal", "enabled": checked.enabled}  # fmt: skip
    for key in (key for key, fit in fits.items() if not fit):
        raise CADConfigError(
            f'"{key}" is {getattr(checked, key)!r}: deepspeed_cad.open has neither layers nor data that it could cut, '
            "run twice, deal out or leave as they are. Leave the key out"
        )
    if device is None or str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device()) if device or torch.cuda.is_available() else "cpu"
    return CAD(open_session(checked, torch.device(device), _find_replica(mesh, group)))


def _find_replica(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> Replica | None:
    if mesh is not None and group is not None:
        raise CADConfigError("deepspeed_cad.open got a mesh and a group, which say the same: pass one of them")
    if mesh is not None:
        return replica_of_mesh(mesh, dist.get_rank(), dist.get_world_size())
    if not dist.is_initialized():
        return None
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if group is None else dist.get_process_group_ranks(group))
    return replica_of_groups(said, dist.get_rank())


def attend(
    run: Callable[[LayerInput], torch.Tensor], q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, *,
    layer: Hashable, label: str, softmax_scale: float | None, window: int | None, softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """O [T, H, V] of one layer: the way in of every model, of one's own (`Step.attend`) and of transformers.

    `run`: attention of the running micro-batch. `label` names the layer in errors; for the others see Step.attend."""
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise CADUnsupportedError(f"{label}: {name} is learned and would get no gradient: multiply q by it")
    if window is not None and (window < 1 or window != int(window)):
        raise CADDataError(f"{label}: window is {window}; expected at least 1, the token itself, or None for no window")
    # Flash-attention says 0 for no soft cap.
    rule = MaskRule(q_THD.shape[2] ** -0.5 if softmax_scale is None else float(softmax_scale), window, softcap or None)
    return run(LayerInput(layer, q_THD, k_TKD, v_TKV, rule, sinks, label))


class CAD:
    """CAD for one model: plans its micro-batches, in the order in which it trains them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.feed = session.open_feed("deepspeed_cad.open", alternates=False)
        self._last: MicroBatch | None = None

    def plan(
        self, cu_seqlens: torch.Tensor | Sequence[int] | None = None, position_ids: torch.Tensor | None = None, *,
        heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
        value_dim: int | None = None, dtype: torch.dtype | None = None, layers: int = 1,
        windows: Sequence[int | None] = (None,),
    ) -> Step:  # fmt: skip
        """The next micro-batch; every rank calls it once for each, in the same order.

        Args:
            cu_seqlens: [documents + 1] cumulative lengths of this rank's documents.
            position_ids: [T], or [B, S] with T = B · S: a document begins where they are 0. A first position above 0
                goes on with the last document of the rank before. Beside `cu_seqlens` it says only that.
            heads: query heads H of this rank; if given, `attend` compares. So `kv_heads` (K), `head_dim` (D) and
                `value_dim` (V; None: D).
            dtype: in which attention runs. With it and the sizes above the first micro-batch is planned ahead too;
                later ones are planned for the layers that attended before.
            layers: how many layers have each of these `windows`, in tokens; None: no window.

        Raises CADDataError where neither says where documents begin, or both contradict each other."""
        if self._last is not None:
            self.feed.learn(self._last.layers)
        sizes = (heads, kv_heads, head_dim, head_dim if value_dim is None else value_dim)
        if dtype is not None and None not in sizes:
            shape = HeadShape(*sizes, dtype.itemsize)  # type: ignore[arg-type]
            self.feed.learn({PlanKey(window, shape): layers for window in windows})
        try:
            mine = _read(cu_seqlens, position_ids)
        except CADError as error:
            self.feed.fail(error)
        step = Step(self, mine, sizes)
        self.feed.announce(mine, step.backward)
        return step

    def take(self, mine: Announcement, backward: bool) -> MicroBatch:
        """The micro-batch that was planned for a step whose first layer attends now."""
        if self.feed.next_announced is not mine:
            self.feed.fail(
                CADDataError(
                    f"rank {self.feed.rank}: a micro-batch that was planned before this one was never attended. Attend "
                    "micro-batches in the order in which they were planned, each once"
                )
            )
        self._last = self.feed.take(None)
        self.session.count(self._last, backward)
        return self._last


class Step:
    """One micro-batch, for one forward of the model and its backward."""

    def __init__(self, cad: CAD, mine: Announcement, sizes: tuple[int | None, ...]) -> None:
        self._cad, self._mine, self._sizes = cad, mine, sizes
        self.backward = torch.is_grad_enabled()
        """Layers under reentrant checkpointing attend without gradients, and a backward comes all the same."""
        self._masks: dict[int | None, MaskDescriptor] = {}
        self._micro_batch: MicroBatch | None = None

    @torch.compiler.disable
    def attend(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, *, layer: Hashable,
        softmax_scale: float | None = None, window: int | None = None, softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """O [T, H, V] of one layer, causal inside each document; all ranks attend their layers in the same order.

        Args:
            q_THD, k_TKD, v_TKV: queries, keys and values of this rank's tokens.
            layer: which layer of the model this is, such as its number: by it activation checkpointing finds its call
                again, and a second forward with the same plan is refused.
            softmax_scale: of scores; None: 1 / √D.
            window: a token sees itself and the window − 1 tokens before it; None: all before it.
            softcap: scores become softcap · tanh(score / softcap).
            sinks: [H] logits that take part in the softmax of every token.

        Raises CADDataError for tensors that do not fit the plan, and CADError where the plan was used before."""
        label = f"layer {layer if isinstance(layer, int | str) else type(layer).__name__}"
        self._check(label, q_THD, k_TKD, v_TKV, sinks)
        if self._micro_batch is None:
            self._micro_batch = self._cad.take(self._mine, self.backward)
        if window not in self._masks:
            self._masks[window] = self._cad.session.descriptor(self._micro_batch, window, self.backward)
        o_THV = attend(
            self._masks[window].attend, q_THD, k_TKD, v_TKV, layer=layer, label=label,
            softmax_scale=softmax_scale, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        self._cad.session.say_first()
        return o_THV

    def _check(self, label: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> None:
        """Raise CADDataError for tensors that do not fit the plan or each other."""
        heads, kv_heads, head_dim, value_dim = self._sizes
        for name, x, *sizes in (("q", q, heads, head_dim), ("k", k, kv_heads, head_dim), ("v", v, kv_heads, value_dim)):
            wanted = (self._mine.local.tokens, *sizes)
            if x.ndim != 3 or any(want not in (None, have) for want, have in zip(wanted, x.shape)):
                shown = zip(("tokens", "heads", "size"), wanted)
                expected = ", ".join(axis if size is None else str(size) for axis, size in shown)
                raise self._misfit(f"{label}: {name} has shape {list(x.shape)}", f"[{expected}]")
            same = x.dtype == q.dtype or torch.is_autocast_enabled(x.device.type)
            if not same or x.device.type != self._cad.session.device.type:
                found = f"{label}: {name} is {x.dtype} on {x.device}"
                raise self._misfit(found, f"{q.dtype} on {self._cad.session.device}")
        if k.shape[1] != v.shape[1] or q.shape[1] % max(k.shape[1], 1) or k.shape[2] != q.shape[2]:
            raise self._misfit(
                f"{label}: q, k and v have shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}",
                "as many heads of k as of v, a multiple of them of q, and q and k heads of one size",
            )
        if sinks is not None and sinks.shape != q.shape[1:2]:
            raise self._misfit(f"{label}: sinks have shape {list(sinks.shape)}", f"[{q.shape[1]}], one of each head")
        if torch.is_grad_enabled() and not self.backward and any(x.requires_grad for x in (q, k, v)):
            raise CADError(f"{label}: this step was planned under torch.no_grad(), and now a backward is to come")

    def _misfit(self, found: str, expected: str) -> CADDataError:
        return CADDataError(f"rank {self._cad.feed.rank}, {found}; the plan of this micro-batch expects {expected}")


def _read(cu_seqlens: Any, position_ids: Any) -> Announcement:
    if cu_seqlens is None and position_ids is None:
        raise CADDataError("plan was given neither cu_seqlens nor position_ids: it cannot know the documents")
    positions = None if position_ids is None else torch.as_tensor(position_ids)
    lengths = None if cu_seqlens is None else torch.as_tensor(cu_seqlens).cpu()
    if positions is not None and positions.ndim > 2 and lengths is None and positions.shape[0] != 4:
        raise CADDataError(
            f"position_ids have shape {list(positions.shape)}: positions of several axes do not say where documents "
            "begin. Pass cu_seqlens, or the positions of the text as the first of 4 axes"
        )
    if lengths is not None and (lengths.ndim != 1 or (lengths != lengths.long()).any()):
        raise CADDataError(f"cu_seqlens are {cu_seqlens!r}; expected whole numbers, [documents + 1]")
    tokens = 0 if lengths is None or not len(lengths) else int(lengths[-1])
    batch, width = (1, tokens) if positions is None else (1, *positions.shape)[-2:]
    if not batch * width:
        return Announcement(LocalSegments.none(0))
    given = {"inputs_embeds": np.empty((batch, width, 0)), "position_ids": positions, "cu_seqlens": lengths}
    return read_documents(given)
