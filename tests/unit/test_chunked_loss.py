"""The loss in chunks of the examples against the model's own: value, gradients, and what it keeps."""

from typing import Any

import chunked_loss
import pytest
import torch
import training


@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 50}, {"shift_labels": "given"}], ids=str)
def test_same_loss_and_gradients(monkeypatch, more: dict[str, Any]) -> None:
    monkeypatch.setattr(chunked_loss, "CHUNK", 32)
    batch = training.pack(training.documents([40, 3, 57], seed=0))
    if "shift_labels" in more:
        shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:]
        batch, more = batch | {"labels": shifted, "shift_labels": shifted}, {}
    own, ours = training.tiny_llama(), training.tiny_llama()
    chunked = chunked_loss.ChunkedLoss(ours)
    expected, found = (model(**batch, **more, use_cache=False).loss for model in (own, ours))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    expected.backward()
    found.backward()
    for one, other in zip(own.parameters(), ours.parameters()):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-8)
    total, count = chunked.take().tolist()
    assert count == 97
    assert total / (more.get("num_items_in_batch") or count) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert chunked.take().tolist() == [0.0, 0.0]
