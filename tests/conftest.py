"""Shared fixtures."""

import os
import sys
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FUZZ_TIMEOUT_S", "100")  # beside whatever else this machine runs
sys.path.insert(0, os.path.dirname(__file__))

from pool import WorkerPool
from ports import free_port
from scripts import ROOT

# Tests in unit/ take cases from the first too, and scripts of the others are tested.
sys.path += [str(ROOT / folder) for folder in ("tests/gpu", "examples", "benchmarks", "docs")]
os.environ["PET_MASTER_PORT"] = str(free_port())  # torchrun's, for all that the tests of this process start


def _open_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


workers = pytest.fixture(_open_pool, scope="session", name="workers")
"""The pool of worker processes that all multi-process tests share."""
fresh_workers = pytest.fixture(_open_pool, name="fresh_workers")
"""Workers of their own, for host frameworks that keep global state after a process group is gone."""
