"""verl's own trainer on a CPU: verl_on_cpu.py OUT.pt overrides of `verl.trainer.sft_trainer`….

verl knows no platform without an accelerator, so one is given to it here whose device is the CPU; its engine is the one
for CUDA. Each rank writes losses, gradient norms, log-probabilities of the validation data and all parameters.
"""
# ruff: noqa: E402 - the platform is chosen before the trainer is imported

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flash_stand_in
import torch
import torch.distributed as dist
from openrlhf_on_cpu import Cpu

flash_stand_in.install()
from verl.plugin.platform import platform_cuda, platform_manager

import deepspeed_cad


class Nothing:
    """In place of torch.cuda."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: {"mem_get_info": (0, 0), "get_device_name": "CPU"}.get(name, 0)


class Platform(platform_cuda.PlatformCUDA):
    """The CPU."""

    device_name, device_module = "cpu", Nothing()

    def current_device(self) -> Any:
        return Cpu("cpu")

    def set_device(self, device_index: int) -> None:
        pass

    def communication_backend_name(self) -> str:
        return "gloo"


platform_manager.set_platform(Platform())
os.environ["VERL_ENGINE_DEVICE"] = "cuda"
# Of servers that generate: names that an import needs.
sys.modules |= {name: MagicMock(__path__=[]) for name in ("fastapi", "uvicorn")}
_init = dist.init_process_group
dist.init_process_group = lambda backend=None, **kwargs: _init("gloo", **kwargs)
from verl.models.transformers import monkey_patch
from verl.trainer import sft_trainer
from verl.utils import tensordict_utils

monkey_patch.is_trl_available = lambda: False  # newer ones have no model with a value head


def parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    """Whole ones, of FSDP or FSDP2."""
    if isinstance(module, torch.distributed.fsdp.FullyShardedDataParallel):
        with module.summon_full_params(module, writeback=False):
            return [one.detach().clone() for one in module.parameters()]
    return [one.full_tensor().detach().clone() for one in module.parameters()]


class Noting(sft_trainer.SFTTrainer):
    """Keeps what every step said."""

    def _build_engine(self) -> None:
        super()._build_engine()
        self.found: dict[str, Any] = {"losses": [], "norms": []}
        train_batch = self.training_client.train_batch

        def noting(data: Any) -> Any:
            output = train_batch(data=data)
            metrics = tensordict_utils.get(output, "metrics")
            self.found["losses"].append(metrics["loss"])
            self.found["norms"].append(metrics["grad_norm"])
            return output

        self.training_client.train_batch = noting

    def note_rest(self, out: str) -> None:
        """After the last step."""
        meta = {
            "use_remove_padding": True, "use_dynamic_bsz": True, "temperature": 1.0, "pad_mode": "no_padding",
            "max_token_len_per_gpu": self.config.data.max_token_len_per_gpu, "global_batch_size": 1,
        }  # fmt: skip
        self.found["log_probs"] = []
        session = deepspeed_cad.current_session()
        before = None if session is None else session.forward_only
        for batch in self.val_dataloader:
            data = tensordict_utils.get_tensordict(tensor_dict=batch, non_tensor_dict=meta)
            output = self.training_client.infer_batch(data)
            self.found["log_probs"].append(output["log_probs"].values().clone())
        if before is not None:
            looked = session.forward_only.since(before)
            self.found["looks"], self.found["look_balance"] = looked.micro_batches, looked.imbalance
            self.found["balance"] = [session.statistics.imbalance_before, session.statistics.imbalance]
        self.found["parameters"] = parameters(self.engine.module)
        torch.save(self.found, f"{out}.{dist.get_rank()}")


def main() -> None:
    """As `verl.trainer.sft_trainer` does."""
    out = sys.argv.pop(1)

    def run(config: Any) -> None:
        from verl.utils.distributed import initialize_global_process_group

        initialize_global_process_group()
        trainer = Noting(config=config)
        trainer.fit()
        trainer.note_rest(out)
        dist.destroy_process_group()

    sft_trainer.run_sft = run
    sft_trainer.main()


if __name__ == "__main__":
    main()
