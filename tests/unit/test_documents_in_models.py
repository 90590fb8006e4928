"""Documents that are told in other ways than by position ids, in whole models: training, evaluation, checks."""

from __future__ import annotations

import pytest
import torch
import training
from hybrids import difference
from model_cases import NEW, family, tiny_model
from told import FORMS, told

import deepspeed_cad
from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.session import close_session

LENGTHS = [7, 30, 1, 6]


@pytest.mark.parametrize("form", FORMS)
def test_training_and_evaluation(form: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The latter with the cache that it has by default."""
    docs, reference = training.documents(LENGTHS, seed=1), training.tiny_llama()
    expected, gradients = training.alone(reference, docs, as_in_row=True)
    evaluated = torch.cat([reference(input_ids=doc[None], use_cache=False).logits[0] for doc in docs])
    model, batch = deepspeed_cad.apply(training.tiny_llama(), {"verify": 1}).train(), told(docs, form)
    assert abs(training.forward_backward(model, batch) - expected) < 1e-9 * expected
    training.assert_gradients(model, gradients, 1e-10)
    assert "micro-batch 1 of 1 is the same without CAD" in capfd.readouterr().err
    del batch["labels"]
    with torch.no_grad():
        logits = model.eval()(**batch).logits[0]
    # Rotations are computed in fp32.
    assert (logits[: sum(LENGTHS)] - evaluated).abs().max() < 1e-5


@pytest.mark.skipif(not NEW, reason="older versions of transformers have few of these models")
@pytest.mark.parametrize("form", ["numbers, padded", "additive, padded"])
def test_layers_that_carry_state(form: str) -> None:
    """They multiply what is hidden by the mask, so they get one of 0 and 1."""
    model, docs = family("lfm2"), training.documents(LENGTHS, seed=1)
    expected = torch.cat([model(input_ids=doc[None], use_cache=False).logits[0] for doc in docs])
    deepspeed_cad.apply(model, {"overlap": "local_first"})
    batch = told(docs, form)
    for mode in (model.train, model.eval):
        mode()
        found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[0]
        assert difference(found[: sum(LENGTHS)], expected) < 1e-5


def test_windows_that_a_ready_made_mask_takes_the_place_of() -> None:
    """transformers hands such a mask to layers as it is, so they attend without their window."""
    batch = told(training.documents(LENGTHS, seed=1), "bool")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        models = [tiny_model("mistral", sliding_window=window) for window in (30, 29)]
        without = [model(**inputs, use_cache=False).logits for model in models]
        assert torch.equal(*without), "the window counts for nothing"
        found = deepspeed_cad.apply(models[0], {})(**inputs).logits
    assert (found - without[0]).abs().max() < 1e-9
    close_session()
    model = deepspeed_cad.apply(models[1], {}).train()
    with pytest.raises(CADUnsupportedError, match="document of 30 tokens whole.*a window of 29 tokens"):
        model(**inputs)
