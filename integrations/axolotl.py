"""axolotl: two lines of its YAML turn CAD on.

    plugins: [deepspeed_cad.integrations.axolotl.CADPlugin]
    cad: {tolerance: 0.05}      # optional: the keys of the "cad" block

axolotl rejects attention names that it does not know, so `flash_attention` and its like stay as they are in the YAML,
where they also decide how rows are packed. A reference model (DPO) is left alone.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from deepspeed_cad.integrations.active import ActivationCheck, give_deepspeed
from deepspeed_cad.integrations.prepared import refuse_accelerator
from pydantic import BaseModel

from deepspeed_cad.api import apply
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADUnsupportedError

_PARALLEL = ("sequence_parallel_degree", "context_parallel_size", "tensor_parallel_size")


class CADArgs(BaseModel):
    """What this plugin adds to axolotl's YAML."""

    cad: dict[str, Any] | None = None
    """The keys of the "cad" block; left out: CAD is on with defaults."""


class CADPlugin(BasePlugin):
    def get_input_args(self) -> str:
        """Where axolotl finds the keys of this plugin."""
        return "deepspeed_cad.integrations.axolotl.CADArgs"

    def pre_model_load(self, cfg: Any) -> None:
        """Check the configuration before minutes are spent on loading. Raises CADConfigError, CADUnsupportedError."""
        _read(cfg)
        for key in _PARALLEL:
            if (cfg.get(key) or 1) > 1:
                raise CADUnsupportedError(
                    f"{key} is {cfg.get(key)} beside CAD, which spreads attention over the data-parallel ranks itself. "
                    f"Take {key} out of the YAML, or the plugin"
                )

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Turn CAD on: adapters are loaded, attention is settled, and nothing is wrapped yet."""
        config = _read(cfg)
        if not config.enabled:
            return
        refuse_accelerator(trainer.accelerator)
        if (plugin := getattr(trainer.accelerator.state, "deepspeed_plugin", None)) is None:
            apply(trainer.model, config)
        else:
            give_deepspeed(plugin.deepspeed_config, config, "the YAML of axolotl")
        ActivationCheck("the plugin of axolotl")


def _read(cfg: Any) -> CADConfig:
    return CADConfig.from_dict(dict(cfg.get("cad") or {}))
