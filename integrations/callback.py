"""`Trainer(callbacks=[CADCallback()])` says at the end what CAD saved: three estimates in the Trainer's final figures.

    cad/saved_s             shorter by so much is the run, at most: attention of the slowest rank without CAD, less with
    cad/would_have_waited_s how long a rank would have waited for the slowest one without CAD, mean over ranks
    cad/still_waits_s       the same with CAD, from the plans

They are planned loads in seconds, so there are none where the planner counts pairs. Exchanges that were not hidden are
not in them, see `cad/waited_s`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from deepspeed_cad.integrations.structure import decoder_layers
from transformers import TrainerCallback

from deepspeed_cad.session import current_session

if TYPE_CHECKING:
    from deepspeed_cad.integrations.transformers import Binding

logger = logging.getLogger("deepspeed_cad")


class CADCallback(TrainerCallback):
    """Has the Trainer's final figures say what CAD saved, and says it at level INFO. Harmless where CAD is off."""

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """The figures as a sentence."""
        last = state.log_history[-1] if state.log_history else {}
        if not state.is_world_process_zero or current_session() is None:
            return
        if "cad/saved_s" not in last:
            logger.info("what CAD saved is not estimated: its costs are not in seconds, or it trained nothing")
        else:
            logger.info(
                "CAD saved up to %.1f s: without it each rank would have waited %.1f s for the slowest one's "
                "attention, with it %.1f s",
                last["cad/saved_s"], last["cad/would_have_waited_s"], last["cad/still_waits_s"],
            )  # fmt: skip


def estimate_savings(binding: Binding) -> dict[str, float]:
    """What CAD saved since the session opened, in seconds, by the names of the log; nothing before training, and where
    the planner counts pairs."""
    session, keys = binding.session, binding.feed.keys
    statistics, decoder = session.statistics, binding.decoder()
    if not keys or not statistics.micro_batches or decoder is None or session.cost.unit != "seconds":
        return {}
    # Loads are summed over kinds of layers, one layer of each.
    layers = len(decoder_layers(decoder) or keys) / len(keys)
    return {
        "cad/saved_s": (statistics.slowest_before - statistics.slowest) * layers,
        "cad/would_have_waited_s": (statistics.slowest_before - statistics.mean) * layers,
        "cad/still_waits_s": (statistics.slowest - statistics.mean) * layers,
    }
