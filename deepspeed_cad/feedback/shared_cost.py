"""The cost model of a session: one for all its trainers.

In: the configuration, and what each machine knows of itself. Out: the profile that rank 0 finds, on every rank.
Profiles measured on two machines are never equal, and plans must be.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADError
from deepspeed_cad.profiles import Profile, choose_profile
from deepspeed_cad.profiles.profile import GENERIC_GPU
from deepspeed_cad.profiles.speed import in_seconds


def share_cost(config: CADConfig, device: torch.device, group: dist.ProcessGroup | None, exchanges: bool) -> Profile:
    """The costs that rank 0 finds. Collective; raises on all ranks what went wrong on rank 0.

    Args:
        config: the session's.
        device: where this rank computes.
        group: the trainers; None where there is one.
        exchanges: other ranks run attention too, so that costs are weighed against transfers, as ratios cannot be.
    """
    found: list[Profile | CADError | None] = [None]
    if group is None or dist.get_rank(group) == 0:
        try:
            cost = choose_profile(config.cost, device, config.kernel)
            if cost is GENERIC_GPU and exchanges and not torch.are_deterministic_algorithms_enabled():
                cost = in_seconds(GENERIC_GPU, device, config.kernel)
            found = [cost]
        except CADError as error:
            found = [error]
    if group is not None:
        dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    if not isinstance(found[0], Profile):
        raise found[0] or CADError("rank 0 sent no cost profile")
    return found[0]
