"""A command of the real OpenRLHF on a CPU: openrlhf_on_cpu.py {fp32,bf16} OUT.pt MODULE arguments….

OpenRLHF computes in bf16 on GPUs, with a fused optimizer. Here the places of GPUs are the CPU, the optimizer is
torch's, and with fp32 so is what the model computes in. Each rank writes losses, gradient norms and at last all
parameters to OUT.pt.RANK.
"""

from __future__ import annotations

import runpy
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


def stay_on_cpu(fp32: bool) -> None:
    """Before the command is imported."""
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
    if fp32:
        import openrlhf.utils.utils as utils

        utils.convert_to_torch_dtype = lambda name: torch.float32
        init = strategy.DeepspeedStrategy.__init__

        def in_fp32(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self.param_dtype = "fp32"

        strategy.DeepspeedStrategy.__init__ = in_fp32


def keep_what_happens(out: str) -> None:
    """Losses and gradient norms of each micro-batch, and parameters when the model is saved."""
    import torch.distributed as dist
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    import deepspeed_cad

    backward, step = DeepspeedStrategy.backward, DeepspeedStrategy.optimizer_step
    found: dict[str, Any] = {"losses": [], "norms": []}

    def noting_backward(self: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        found["losses"].append(float(loss.detach()))
        backward(self, loss, *args, **kwargs)

    def noting_step(self: Any, optimizer: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        step(self, optimizer, model, *args, **kwargs)
        found["norms"].append(float(self.get_grad_norm(model)))

    def save(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        import deepspeed

        parameters = list(self._unwrap_model(model).parameters())
        with deepspeed.zero.GatheredParameters(parameters, enabled=self.stage == 3):
            found["parameters"] = [one.detach().clone() for one in parameters]
        session = deepspeed_cad.current_session()
        if session is not None:
            found["balance"] = [session.statistics.imbalance_before, session.statistics.imbalance]
            found["looks"] = session.forward_only.micro_batches
        torch.save(found, f"{out}.{dist.get_rank()}")

    DeepspeedStrategy.backward, DeepspeedStrategy.optimizer_step = noting_backward, noting_step
    DeepspeedStrategy.save_model = save


if __name__ == "__main__":
    dtype, out, module, *words = sys.argv[1:]
    stay_on_cpu(dtype == "fp32")
    keep_what_happens(out)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
