"""What ranks tell each other about a step: read as it was written, and added up to the documents of all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.ahead.step_message import StepMessage, to_documents
from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.layout import segments_from_cumulative


def announcement(*lengths: int, unit: int = 1) -> Announcement:
    ends = np.cumsum([0, *lengths])
    return Announcement(segments_from_cumulative(ends, int(ends[-1])), unit)


@pytest.fixture()
def said() -> list[StepMessage]:
    """Two ranks, two micro-batches each."""
    return [
        StepMessage([announcement(3, 5), announcement(8, unit=4)], [False, True], fields=77),
        StepMessage([announcement(2, 2, 4), announcement(6)], [True, False]),
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_message_is_read_as_it_was_written(said: list[StepMessage], rank: int) -> None:
    one = said[rank]
    read = StepMessage.from_array(one.to_array())
    assert (read.fixed, read.fields) == (one.fixed, one.fields)
    assert [again.unit for again in read.micro_batches] == [mine.unit for mine in one.micro_batches]
    assert all(again.local.same_as(mine.local) for again, mine in zip(read.micro_batches, one.micro_batches))


def test_a_message_with_numbers_too_many_is_refused(said: list[StepMessage]) -> None:
    with pytest.raises(CADPeerError, match="has 20 numbers where its parts have 19"):
        StepMessage.from_array(np.append(said[0].to_array(), 1))


def test_documents_of_all_ranks(said: list[StepMessage]) -> None:
    found = to_documents(said)
    assert found.rank.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert found.micro_batch.tolist() == [0, 0, 1, 0, 0, 0, 1]
    assert (found.end - found.begin).tolist() == [3, 5, 8, 2, 2, 4, 6]
    assert found.tokens.tolist() == [[8, 8], [8, 6]]
    assert found.fixed.tolist() == [[False, True], [True, False]]
