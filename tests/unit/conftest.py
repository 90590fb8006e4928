"""What a unit test opened ends with it, events of stand-ins are asked as they are, slow machines tell no progress."""

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import settings

from deepspeed_cad.cli import progress
from deepspeed_cad.exchange import nccl, waits
from deepspeed_cad.exchange.failure import identity, watchdog
from deepspeed_cad.feedback import layer_times

settings.register_profile("busy", deadline=None)
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No session and no process group stays, whoever opened it."""
    for room in (identity, nccl, layer_times, waits, watchdog):
        monkeypatch.setattr(room, "is_over", lambda event: event.query())  # no driver knows it
    monkeypatch.setattr(progress, "QUIET", 1e6)
    yield
    if "deepspeed_cad.session" in sys.modules:
        sys.modules["deepspeed_cad.session"].close_session()
    if dist.GroupMember.WORLD is not None:  # is_initialized may be a stand-in
        dist.destroy_process_group()
