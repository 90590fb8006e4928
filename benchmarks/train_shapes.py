"""Other shapes of attention for the training benchmark: a gpt-oss with sinks and windows, DeepSeek-V2's MLA.

In: the sizes of `train_model.make_model`. Out: models with random weights, and what attention costs and needs in any
model of the benchmark.

What is tested is attention, so nothing else may make ranks uneven, or modes differ by more than rounding. The gpt-oss
has four experts, all of which every token passes: as many as in the real one, and a router's choice that rounding tips
changes nothing. The DeepSeek has a dense MLP in every layer. Sizes of heads, latents and windows are those of the real
models whatever the other sizes are.
"""

from __future__ import annotations

from typing import Any

import torch
from train_hybrid import attending_layers
from train_model import matrix_parameters, random_weights
from train_workload import Workload

from deepspeed_cad.kernels.interface import KernelNeed

SIZES: dict[str, dict[str, int]] = {
    "gpt_oss": {"hidden": 2880, "heads": 64, "kv_heads": 8, "ffn": 2880},
    "deepseek": {"hidden": 5120, "heads": 128, "kv_heads": 128, "ffn": 12288},
}
"""Of the real models, by `--model`; layers and vocabulary are the benchmark's."""

EXPERTS = 4


def make_gpt_oss(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, longest: int,
    device: torch.device, dtype: torch.dtype,
) -> Any:  # fmt: skip
    """Layers with a window of 128 and layers without alternate, as in the real one; sinks in all; heads of 64."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64, num_local_experts=EXPERTS,
        num_experts_per_tok=EXPERTS, max_position_embeddings=max(longest, 131072), use_cache=False,
    )  # fmt: skip
    return random_weights(lambda: GptOssForCausalLM(config), device, dtype)


def make_deepseek(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, longest: int,
    device: torch.device, dtype: torch.dtype,
) -> Any:  # fmt: skip
    """Multi-head latent attention: keys of 192 and values of 128 in each head, all made from a latent of 512.

    Raises ValueError where KV heads are fewer: every query head has its own keys here.
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    if kv_heads != heads:
        raise ValueError(f"--kv-heads {kv_heads}: each of the {heads} heads of --model deepseek has its own keys")
    config = DeepseekV2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, first_k_dense_replace=layers,
        num_experts_per_tok=1, max_position_embeddings=longest, use_cache=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return random_weights(lambda: DeepseekV2ForCausalLM(config), device, dtype)


def head_sizes(config: Any) -> tuple[int, int]:
    """Size of a query or key head, and of a value head."""
    size = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    return size, getattr(config, "v_head_dim", None) or size


def windows(model: Any) -> list[int | None]:
    """Of every layer that attends: how many keys a row reads at most; None: all before it."""
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * attending_layers(model)
    attending = [kind for kind in kinds if kind in ("full_attention", "sliding_attention")]
    return [config.sliding_window if kind == "sliding_attention" else None for kind in attending]


def is_plain(model: Any) -> bool:
    """Whether attention has neither sinks nor windows, and values as large as keys."""
    size, value_size = head_sizes(model.config)
    sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    return not sinks and size == value_size and not any(windows(model))


def kernel_need(model: Any, device: torch.device, dtype: torch.dtype) -> KernelNeed:
    """What all attending layers need of their kernel."""
    config = model.config
    share = config.num_attention_heads // config.num_key_value_heads
    return KernelNeed(device, dtype, *head_sizes(config), share, window=any(windows(model)))


def model_flops(model: Any, workload: Workload) -> float:
    """Of a pass over the workload, forward and backward; nothing is recomputed."""
    steps = range(len(workload.steps))
    flops = 6.0 * matrix_parameters(model) * workload.tokens
    of_pair = 6.0 * model.config.num_attention_heads * sum(head_sizes(model.config))
    return flops + sum(of_pair * workload.pairs(step, window) for window in windows(model) for step in steps)
