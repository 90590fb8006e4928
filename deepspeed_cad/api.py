"""`deepspeed_cad.apply`: CAD for one model in any torch.distributed loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deepspeed_cad.config import CADConfig
from deepspeed_cad.request import settle_request
from deepspeed_cad.shares import replica_of_mesh
from deepspeed_cad.version import refuse_old_packages

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def apply(
    model: torch.nn.Module, config: CADConfig | dict[str, Any] | None = None, mesh: DeviceMesh | None = None
) -> torch.nn.Module:
    """Turn CAD on for one Hugging Face model; call after torch.distributed is initialised, before DDP or FSDP.

    Idempotent, and of no effect on any other model. `config` is a CADConfig, the "cad" block as a dict, or None for
    what the launcher asks for, else the defaults. `mesh`: of all ranks, where some divide the heads of a micro-batch
    among them: those along an axis "tp"; None: as the model's own parameters say. Returns the model. Raises
    CADConfigError for a bad configuration or mesh and CADUnsupportedError for a model that CAD cannot reproduce
    exactly, or beside a version of a host framework that is too old."""
    checked = settle_request(config, "deepspeed_cad.apply")
    if checked.enabled:
        refuse_old_packages()
        from deepspeed_cad.integrations.transformers import bind

        bind(model, checked, None if mesh is None else replica_of_mesh(mesh, dist.get_rank(), dist.get_world_size()))
    return model
