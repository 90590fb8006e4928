"""Which ranks divide a model's heads among them, as its host framework says, and attention of this rank's heads.

In: a model whose parameters are DTensors of a mesh, or that transformers has divided by its plan; what its layers then
hand to attention, or DeepSpeed's Ulysses around it. Out: a `Replica`, or None where every rank has all heads; O.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed_cad.integrations.structure import name_layer
from torch.distributed.tensor import DTensor, Partial, Shard
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deepspeed_cad.attention.microbatch import MaskDescriptor
from deepspeed_cad.errors import CADConfigError, CADUnsupportedError
from deepspeed_cad.layout import segments_from_positions
from deepspeed_cad.shares import DATA, TENSOR, Replica, replica_in

if TYPE_CHECKING:
    from deepspeed_cad.integrations.transformers import Binding

_APART = (*DATA, "dp_cp", "dp_shard_cp", "ep", "efsdp", "pp")
"""Names of axes of parameters' meshes that do not divide heads: Accelerate's and transformers' own among them."""
HEADS = 1
"""Their axis in what attention functions of transformers are given."""
_ULYSSES = "UlyssesSPAttentionHF"


def find_replica(model: torch.nn.Module) -> Replica | None:
    """The ranks with which this one divides the heads of a model; None: it has all of them. Raises CADConfigError where
    parameters lie on a mesh of which it is not known what its axes divide."""
    if not dist.is_initialized():
        return None
    if (mesh := getattr(model, "_device_mesh", None)) is not None and not mesh.mesh_dim_names:
        # Before it had meshes of several axes, transformers named none: that of tensor parallelism.
        return Replica(tuple(mesh.mesh.reshape(-1).tolist()))
    whole = any("FSDP" in type(module).__name__ for module in model.modules())
    meshes = [mesh] if mesh is not None else []
    meshes += [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    for mesh in dict.fromkeys(meshes):
        names = tuple(mesh.mesh_dim_names or ())
        if any(name in TENSOR and size > 1 for name, size in zip(names, mesh.shape)):
            return replica_in(mesh, dist.get_rank())
        # fully_shard makes a mesh without names over all ranks, and classes of its own.
        unknown = [size for name, size in zip(names or ("",) * mesh.ndim, mesh.shape) if name not in _APART]
        if any(size > 1 for size in unknown) and (names or not whole or mesh.size() < dist.get_world_size()):
            raise CADConfigError(
                f"parameters of {type(model).__name__} lie on a mesh {names or 'without names'} of shape "
                f"{list(mesh.shape)}, and CAD cannot know whether its ranks divide heads: call "
                "deepspeed_cad.apply(model, ..., mesh=mesh) with the mesh of all ranks, its axes named"
            )
    return None


def attend_locally(
    attend: Callable[..., tuple[torch.Tensor, None]], q: Any, k: Any, v: Any, sinks: Any, **given: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention of this rank's heads of DTensors q [B, H, S, D], k and v [B, K, S, D]; gives a DTensor [B, S, H, V].
    Raises CADUnsupportedError where something else than heads is divided."""
    placements = q.placements
    if any(not (one.is_replicate() or one.is_shard(HEADS)) for one in placements):
        raise CADUnsupportedError(
            f"queries [batch, heads, tokens, size] come as a DTensor with placements {list(placements)}: CAD takes "
            "tensors whose heads are divided, or that every rank has whole"
        )
    o, _ = attend(
        query=to_local(q, placements), key=to_local(k, placements), value=to_local(v, placements),
        s_aux=None if sinks is None else to_local(sinks, placements), **given,
    )  # fmt: skip
    # Heads are the third axis of the output, and the second of the queries.
    moved = [one if one.is_replicate() else Shard(HEADS + 1) for one in placements]
    return DTensor.from_local(o, q.device_mesh, moved, run_check=False)


def refuse_heads(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Raise CADUnsupportedError where a rank has query heads that belong to other KV heads than those that it has.
    query [B, H, S, D], key [B, K, S, D], sinks [H]. One KV head belongs to all; of several that every rank repeats
    nobody says which are those of its queries."""
    if sinks is not None and len(sinks) != query.shape[1]:
        raise CADUnsupportedError(
            f"{name_layer(module)} has {query.shape[1]} query heads on this rank and {len(sinks)} attention sinks, one "
            "for each head of the model: divide them as the heads"
        )
    heads, keys, each = query.shape[1], key.shape[1], getattr(module, "num_key_value_groups", None)
    if keys > 1 and each is not None and heads != keys * each:
        raise CADUnsupportedError(
            f"{name_layer(module)} has {heads} query heads and {keys} KV heads on this rank, and {each} query heads of "
            "the model share a KV head: divide both alike (k_proj and v_proj as q_proj), or use as many ranks as both "
            "can be divided by"
        )


def refuse_parts_of_heads(model: torch.nn.Module, shares: int) -> None:
    """Raise CADUnsupportedError where `shares` ranks divide projections between, not within, which heads lie."""
    for module in model.modules():
        for name in ("q_proj", "k_proj"):
            weight: Any = getattr(getattr(module, name, None), "weight", None)
            size: Any = getattr(module, "head_dim", None)
            if size is None or not isinstance(weight, DTensor):
                continue
            axes = zip(weight.device_mesh.mesh_dim_names or (), weight.placements)
            heads = weight.shape[0] // size
            if heads % shares and any(axis in TENSOR and one.is_shard(0) for axis, one in axes):
                raise CADUnsupportedError(
                    f"{shares} ranks divide {name} of {name_layer(module)}, which has {heads} heads: each rank must "
                    f"have whole heads. Use as many ranks as {heads} can be divided by, or leave {name} whole"
                )


def to_local(x: Any, of_queries: Sequence[Any] = ()) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is. `of_queries`: their placements. Where every rank has
    all of `x` but queries of its own, each knows a part of its gradient."""
    if not isinstance(x, DTensor):
        return x
    gradients = [
        Partial() if own.is_replicate() and not other.is_replicate() else own
        for own, other in zip(x.placements, of_queries or x.placements, strict=True)
    ]
    return x.to_local(grad_placements=gradients)


# Ulysses around CAD: it gives every rank all tokens of a few heads, and CAD attends. In evaluation documents are read
# from the positions that Ulysses gathers, because each rank's batch has a piece of them only.


def find_ulysses(name: str) -> Any:
    """The all-to-alls of the attention that a model has without CAD. Raises CADUnsupportedError where it has none."""
    found = ALL_ATTENTION_FUNCTIONS[name] if name in ALL_ATTENTION_FUNCTIONS else None
    for cell in getattr(found, "__closure__", None) or ():
        if type(cell.cell_contents).__name__ == _ULYSSES:
            return cell.cell_contents
    raise CADUnsupportedError(
        f"ranks have pieces of each row (sequence parallelism), but the attention {name} of the model is not that of "
        f"DeepSpeed's {_ULYSSES}: call its register_with_transformers before CAD is turned on, or train without CAD"
    )


class PieceMask:
    """Stands where layers that have a piece of the tokens expect a mask. Not a dataclass: see MaskDescriptor."""

    def __init__(self, binding: Binding, inside: MaskDescriptor | None, window: int | None) -> None:
        """`inside`: the descriptor of all tokens; None: in evaluation."""
        self.binding, self.inside, self.window = binding, inside, window

    def attend(
        self, attend: Callable[..., Any], module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, **given: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Attention of a piece: query [B, H, S / T, D], key and value [B, K, S / T, D]; gives [B, S / T, H · D].
        `attend`: attention of all tokens and some heads."""
        # A copy: other models of this process keep theirs, and so does this one without CAD.
        around = copy.copy(self.binding.ulysses)

        def inside(
            module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
            s_aux: torch.Tensor | None = None, **given: Any,
        ) -> Any:  # fmt: skip
            heads = query.shape[1]
            if s_aux is not None and len(s_aux) > heads:
                s_aux = s_aux[around.sp_rank * heads :][:heads]
            if self.inside is None:
                self.inside = self._evaluate(given["position_ids"])
            return attend(module, query, key, value, self.inside, s_aux=s_aux, **given)

        around.attn = inside
        return around(module, query, key, value, None, **given)[0], None

    def _evaluate(self, position_ids: torch.Tensor) -> MaskDescriptor:
        """For positions [B, S] of whole rows."""
        session = self.binding.session
        micro_batch = session.plans.open_local(segments_from_positions(position_ids.detach().cpu().numpy()))
        return session.descriptor(micro_batch, self.window)
