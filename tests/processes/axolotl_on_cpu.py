"""`axolotl train` of the real axolotl on a CPU: a script for torchrun, with the YAML as its argument.

axolotl places models on the GPU of the local rank whatever the YAML says, and does not tell the Trainer and Accelerate
to stay on the CPU; both are arranged here. In the folder of the YAML, rank 0 writes the Trainer's log as log.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback, TrainingArguments


def stay_on_cpu() -> None:
    """Models load where no device was asked for; training arguments say `use_cpu`."""
    load = PreTrainedModel.from_pretrained.__func__
    finish = TrainingArguments.__post_init__

    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_map", None)
        return load(cls, *args, **kwargs)

    def post_init(self: Any) -> None:
        self.use_cpu = True
        finish(self)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    TrainingArguments.__post_init__ = post_init


class KeepLog(TrainerCallback):
    """Writes the log when training ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        if state.is_world_process_zero:
            self.path.write_text(json.dumps(state.log_history))


def main(config: str) -> None:
    """Train."""
    stay_on_cpu()
    from axolotl.cli.train import do_cli
    from axolotl.core.builders import HFCausalTrainerBuilder

    callbacks = HFCausalTrainerBuilder.get_post_trainer_create_callbacks

    def with_log(self: Any, trainer: Any) -> list[Any]:
        return [*callbacks(self, trainer), KeepLog(Path(config).with_name("log.json"))]

    HFCausalTrainerBuilder.get_post_trainer_create_callbacks = with_log
    do_cli(config=config)


if __name__ == "__main__":
    os.environ.update(AXOLOTL_DO_NOT_TRACK="1", ACCELERATE_USE_CPU="true")
    main(sys.argv[1])
