"""Tiny models and packed micro-batches for tests that train: the reference runs every document alone."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

LINKS = {"inside": 100, "between": 10}
"""Given to CAD where a test does not ask how links are measured: that takes time, and exchanges that tests count."""
BLOCK = {"granularity": 16, "tolerance": 0.02, "links": LINKS}
"""The usual "cad" block. Rows are short: cut at 128 query rows, they would leave nothing to move."""


def tiny_llama(dtype: torch.dtype = torch.float64, **changes: Any) -> LlamaForCausalLM:
    """Two layers, 8 query heads of 4 head groups, the same weights everywhere."""
    set_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).to(dtype)


def sdpa_llama(dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    """The same as users of host frameworks load it."""
    return tiny_llama(dtype, attn_implementation="sdpa", use_cache=False, **changes)


def with_lora(model: Any, **changes: Any) -> Any:
    """The model with adapters, of which none is zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    given = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **changes}
    return get_peft_model(model, LoraConfig(r=4, **given))


def deepspeed_experts() -> torch.nn.Module:
    """What a layer of DeepSpeed's experts is known by."""
    return type("MoE", (torch.nn.Identity,), {"__module__": "deepspeed.moe.layer"})()


def documents(lengths: list[int], seed: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (n,), generator=gen) for n in lengths]


def pack(docs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One packed row: input_ids, position_ids and labels whose first token of a document is ignored."""
    if not docs:
        empty = torch.zeros(1, 0, dtype=torch.long)
        return {"input_ids": empty, "position_ids": empty, "labels": empty}
    ids, positions = torch.cat(docs)[None], torch.cat([torch.arange(len(doc)) for doc in docs])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def loss_sum(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum of the cross entropy over targets of a packed micro-batch."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")


def forward_backward(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Trains a packed micro-batch; gives its loss, the sum over targets."""
    loss = loss_sum(model, batch)
    loss.backward()
    return float(loss.detach())


def checkpointed(model: Any, how: str | bool | None) -> Any:
    """The model with activation checkpointing, "reentrant" or not; as it is where nothing is asked for."""
    if how:
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    return model


def alone(model: Any, docs: list[torch.Tensor], as_in_row: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and parameter gradients of documents that are each run alone. `as_in_row`: at the positions that they have
    in a row; only differences of positions count, but rotations are computed in fp32."""
    model.zero_grad()
    total, begin = 0.0, 0
    for doc in docs:
        if len(doc) > 1:
            one = pack([doc])
            total += forward_backward(model, one | {"position_ids": one["position_ids"] + begin * as_in_row})
        begin += len(doc)
    found = gradients(model)
    model.zero_grad()
    return total, found


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies, whole where ranks have parts of them; zeros where there is none."""
    found = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    copies = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in found.items()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in copies.items()}


def assert_gradients(model: torch.nn.Module, expected: dict[str, torch.Tensor], tolerance: float = 1e-10) -> None:
    """Those of a model, relative to the largest of each parameter where that is above 1."""
    for name, gradient in gradients(model).items():
        assert (gradient - expected[name]).abs().max() < tolerance * (1 + expected[name].abs().max()), name


def step_as_alone(
    model: Any, reference: Any, docs: list[torch.Tensor], tolerance: float = 1e-10, batch: Any = None
) -> None:
    """Forward and backward of documents in one packed row: loss and gradients must be those of each document alone."""
    loss = forward_backward(model, batch or pack(docs))
    expected, wanted = alone(reference, docs)
    assert abs(loss - expected) < 10 * tolerance * max(1, expected)
    # Gradients of a rank are those of its own documents: serving others adds nothing to them.
    assert_gradients(model, wanted, tolerance)
    model.zero_grad()


def weighted(model: Any, documents: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of documents that are each run alone, and weights of a loss in which every logit counts; leaves its
    gradients."""
    logits = torch.cat([model(**one, use_cache=False).logits[0] for one in documents])
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    if logits.requires_grad:
        (logits * weights.to(logits.dtype)).sum().backward()
    return logits.detach(), weights.to(logits.dtype)


def as_alone(model: Any, reference: Any, given: dict, documents: list, here: Any = ..., forwards: int = 1) -> dict:
    """How far a micro-batch is from its documents, each run alone by `reference`, as shares of the largest value.
    `given`: what the model gets, perhaps with padding behind; `here`: which of the documents' rows those are, of a
    stream that all ranks share, where gradients are summed over ranks; `...`: all are this rank's. `forwards`: plans of
    the second one are made ahead of the layers."""
    reference.zero_grad()
    expected, weights = weighted(reference, documents)
    expected, weights = expected[here], weights[here]
    for _ in range(forwards):
        model.zero_grad()
        logits = model(**given, use_cache=False).logits[0][: len(weights)]
        (logits * weights).sum().backward()
    wanted, found = gradients(reference), gradients(model)
    if here is not ...:
        for gradient in found.values():
            dist.all_reduce(gradient)
    largest = max(float(one.abs().max()) for one in wanted.values())
    return {
        "logits": float((logits.detach() - expected).abs().max() / expected.abs().max()) if len(expected) else 0.0,
        "gradients": max(float((found[name] - one).abs().max()) for name, one in wanted.items()) / largest,
    }


def figures() -> dict[str, Any]:
    """What the session moved, and how even attention was before and after."""
    from deepspeed_cad.session import current_session

    session = current_session()
    assert session is not None and session.transport is not None
    statistics = session.statistics
    return {"sent": session.transport.bytes_sent, "before": statistics.imbalance_before, "after": statistics.imbalance}


def assert_moved(found: list[dict[str, Any]], within: float) -> None:
    """Of all ranks: as each document alone, with attention that was moved and is more even."""
    assert max(max(one["logits"], one["gradients"]) for one in found) < within, found
    assert sum(one["sent"] for one in found) > 0 and found[0]["after"] < found[0]["before"], found
