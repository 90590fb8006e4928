"""What a unit test opened ends with it."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No session stays, whoever opened it."""
    yield
    if "deepspeed_cad.session" in sys.modules:
        sys.modules["deepspeed_cad.session"].close_session()
