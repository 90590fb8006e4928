"""The real OpenRLHF on a CPU, which it computes on as on a GPU: with an optimizer of torch's, and in fp32."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import datasets
import flash_stand_in
import torch
from engines import import_deepspeed


class Cpu(str):
    """In place of the number of a GPU: tensors go to the CPU, and "cuda:" with it is a name."""

    def __format__(self, spec: str) -> str:
        return "0"


def stay_on_cpu() -> None:
    """Before the rest of it is imported."""
    import_deepspeed()
    flash_stand_in.install()
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *args: None)
    torch.cuda.current_device = lambda: Cpu("cpu")
    map_rows = datasets.Dataset.map
    datasets.Dataset.map = lambda *args, **kwargs: map_rows(*args, **{**kwargs, "num_proc": None})  # not by 8 forks
    from openrlhf.models import actor
    from openrlhf.utils.deepspeed import deepspeed as strategy

    actor._patch_zero3_weight_mapping = lambda: None  # of a function that is another in newer transformers
    mesh, config_of = strategy.init_device_mesh, strategy.get_train_ds_config
    strategy.init_device_mesh = lambda device, *args, **kwargs: mesh("cpu", *args, **kwargs)

    def train_config(*args: Any, **kwargs: Any) -> dict[str, Any]:
        config = config_of(*args, **kwargs)
        if "optimizer" in config:
            config["optimizer"]["params"]["torch_adam"] = True
        return config

    strategy.get_train_ds_config = train_config
    import openrlhf.utils.utils as utils

    utils.convert_to_torch_dtype = lambda name: torch.float32
    init = strategy.DeepspeedStrategy.__init__

    def in_fp32(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.param_dtype = "fp32"

    strategy.DeepspeedStrategy.__init__ = in_fp32
