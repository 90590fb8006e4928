"""verl's own trainer on a CPU: verl_on_cpu.py OUT.pt overrides of `verl.trainer.sft_trainer`….

verl knows no platform without an accelerator, so one is given to it here whose device is the CPU; its engine is the one
for CUDA. Beside the trained model each process has a critic and a reference, in workers of verl as its PPO has them:
before each step both say what they make of its data, and after it the critic is trained on them. Each rank writes
losses, gradient norms, log-probabilities, values and all parameters.
"""
# ruff: noqa: E402 - the platform is chosen before the trainer is imported

from __future__ import annotations

import os
import sys
from copy import copy, deepcopy
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
from verl.workers.config import TrainingWorkerConfig

monkey_patch.is_trl_available = lambda: False  # newer ones have no model with a value head


def parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    """Whole ones, of FSDP or FSDP2."""
    if isinstance(module, torch.distributed.fsdp.FullyShardedDataParallel):
        with module.summon_full_params(module, writeback=False):
            return [one.detach().clone() for one in module.parameters()]
    return [one.full_tensor().detach().clone() for one in module.parameters()]


def value_loss(model_output: dict[str, Any], data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Of made-up returns."""
    off = model_output["values"].values() - data["input_ids"].values().sin()
    return off.square().sum() / 1000, {}


class Noting(sft_trainer.SFTTrainer):
    """Keeps what every step said."""

    def _another(self, model_type: str) -> Any:
        config = TrainingWorkerConfig(
            model_type=model_type, model_config=deepcopy(self.model_config), engine_config=deepcopy(self.engine_config),
            optimizer_config=self.optimizer_config, checkpoint_config=self.checkpoint_config,
        )  # fmt: skip
        worker = sft_trainer.TrainingWorker(config=config)
        worker.set_loss_fn(value_loss)
        return worker

    def _build_engine(self) -> None:
        super()._build_engine()
        names = ("losses", "norms", "reference", "values", "value losses")
        self.found: dict[str, Any] = {name: [] for name in names}
        train_batch = self.training_client.train_batch
        self.critic, self.reference = self._another("value_model"), self._another("language_model")
        self.reference.loss_fn = None

        def noting(data: Any) -> Any:
            for name, worker, key in (("reference", self.reference, "log_probs"), ("values", self.critic, "values")):
                self.found[name].append(worker.infer_batch(copy(data))[key].values().clone())
            trained = self.critic.train_batch(data=copy(data))
            self.found["value losses"].append(tensordict_utils.get(trained, "metrics")["loss"])
            output = train_batch(data=data)
            metrics = tensordict_utils.get(output, "metrics")
            self.found["losses"].append(metrics["loss"])
            self.found["norms"].append(metrics["grad_norm"])
            return output

        self.training_client.train_batch = noting

    def _init_engine(self) -> None:
        super()._init_engine()
        torch.manual_seed(5)  # the critic's head is in no checkpoint
        self.critic.reset()
        self.reference.reset()

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
            self.found["models"] = len(session.bindings)
        self.found["parameters"] = parameters(self.engine.module) + parameters(self.critic.engine.module)
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
