"""`deepspeed_cad.apply`: CAD for one model in any torch.distributed loop."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_cad.config import CADConfig
from deepspeed_cad.version import refuse_old_packages


def apply(model: torch.nn.Module, config: CADConfig | dict[str, Any] | None = None) -> torch.nn.Module:
    """Turn CAD on for one Hugging Face model; call after torch.distributed is initialised, before DDP or FSDP.

    Idempotent, and of no effect on any other model. `config` is a CADConfig, the "cad" block as a dict, or None for the
    defaults. Returns the model. Raises CADConfigError for a bad configuration and CADUnsupportedError for a model that
    CAD cannot reproduce exactly, or beside a version of a host framework that is too old.
    """
    checked = config if isinstance(config, CADConfig) else CADConfig.from_dict({} if config is None else config)
    if checked.enabled:
        refuse_old_packages()
        from deepspeed_cad.integrations.transformers import bind

        bind(model, checked)
    return model
