"""Who is here: ranks that turn CAD on name those that do not, within seconds."""

import pytest
import torch.distributed as dist
import training
from engines import engine_config, import_deepspeed
from pool import WorkerPool

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure import patience, roll_call


def _deepspeed(rank: int, world: int) -> str:
    """Rank 1 has the JSON without the block; it goes on alone, as where the package is not installed."""
    deepspeed = import_deepspeed()
    patience.LATE_S = roll_call.LATE_S = 0.5
    config, store = engine_config(1), dist.distributed_c10d._get_default_store()
    model = training.tiny_llama()
    try:
        block = {} if rank == 1 else {"cad": {}}
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config | block)
    except CADPeerError as error:
        store.set(f"told/{rank}", "1")
        return str(error)
    store.wait(["told/0", "told/2"])
    return ""


@pytest.mark.slow
def test_deepspeed_on_a_rank_without_the_package(fresh_workers: WorkerPool) -> None:
    pytest.importorskip("deepspeed")
    for rank, error in enumerate(fresh_workers.run(_deepspeed, 3)):
        assert f"CAD is on on rank {rank} and not on rank 1" in error or rank == 1
