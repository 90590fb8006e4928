"""Tiny models through `deepspeed_cad.apply` on every transport, against every document alone in fp64.

What an ordinary run of the same model errs by is measured beside it: in the same precision, every document alone, with
transformers' own attention. Loss and every gradient with CAD may err by twice as much. Documents stay on their rank,
with activation checkpointing, or span ranks, without; or two ranks each divide the heads of theirs.
"""

import copy
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed_cad.integrations import spanning
from lines import Found, Lines, Place
from model_cases import known_kind, randomized, tiny_config
from shares_step import divide
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import deepspeed_cad
from deepspeed_cad.session import close_session

Results = dict[str, torch.Tensor]
"""Gradients of parameters by name, and under "loss" the loss of every token; fp64."""

VOCAB = 256
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 16384, "tie_word_embeddings": False,
}  # fmt: skip
TWO_EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 2}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_d_state": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    # A token that another rounding sends to another expert would hide everything else: all experts see all tokens.
    "gpt_oss": {"sliding_window": 100, "num_local_experts": 2, "num_experts_per_tok": 2},
    "gemma2": {"sliding_window": 100, "attn_logit_softcapping": 2.0},
    "deepseek_v3": {
        "num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 2,
    },
    # With flash-linear-attention where it is installed, else document by document
    "qwen3_5_text": DELTA, "qwen3_next": {**DELTA, **TWO_EXPERTS}, "olmo_hybrid": DELTA,
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "dense"],
        "num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "linear_num_heads": 4, "linear_head_dim": 64,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], **MAMBA, **TWO_EXPERTS},
    "nemotron_h": {
        "hybrid_override_pattern": "M*-", "mamba_num_heads": 16, "mamba_head_dim": 64, "n_groups": 2,
        "ssm_state_size": 64,
    }, "falcon_h1": {"mamba_d_ssm": None, **MAMBA},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 16},
}  # fmt: skip
"""What a config says besides SMALL in model_cases.py; head sizes are those that kernels are built for."""
HYBRID = "qwen3_5_text"
TENSOR = "tensor", "tensor, links timed"
NEEDS = {
    **dict.fromkeys(("qwen3_next", "olmo_hybrid", "kimi_linear"), "fla"),
    **dict.fromkeys(("granitemoehybrid", "nemotron_h", "falcon_h1", "jamba"), "mamba_ssm"),
}
"""Models that are here for the kernels of a package, and left out without it."""


@dataclass(frozen=True)
class Sizes:
    hidden: int
    tokens: int
    """Per rank."""


def run(place: Place, lines: Lines, case: str) -> None:
    """`case`: the models, comma-separated; default all."""
    # What is compared with attends in fp64, by torch: gigabytes on four ranks.
    sizes = Sizes(512, 4096 // max(2, place.ranks)) if place.on_gpu else Sizes(64, 192)
    transports = ["c10d"] if not place.on_gpu else ["mixed"] if place.hosts else ["nvlink", "nccl", "c10d"]
    if place.ranks == 1:
        transports = ["auto"]
    if place.hosts and len(set(place.hosts)) == place.ranks:
        transports = ["mixed", "auto"]
    where = f", hosts {','.join(map(str, place.hosts))}" if place.hosts else ""
    most = spanning.MOST_PIECES
    for kind in case.split(",") if case else filter(_runs, MODELS):
        model = make_model(place, kind, sizes)
        divides = kind == "llama" and place.ranks % 2 == 0 and not place.hosts
        more_cases = ("waves",) * (kind == HYBRID) + TENSOR * divides
        exchanges = dict.fromkeys(transports, 0)
        exact: list[tuple[Results, dict[str, float]]] = []
        for documents in ("rows", "stream", *more_cases) if place.ranks > 1 else ("rows",):
            # The backward of causal-conv1d 1.7 refuses a sequence of one token in models that call it for fla.
            shortest = 2 if NEEDS.get(kind) == "fla" else 1
            divided = 2 if documents in TENSOR else 1
            lengths = make_lengths(documents, place.ranks // divided, sizes.tokens, shortest)
            exact = exact if documents in ("waves", TENSOR[1]) else []
            spanning.MOST_PIECES = 0 if documents == "waves" else most  # there heads part
            more = {"memory": memory_of_waves(lengths[0], place.dtype)} if documents == "waves" else {}
            more |= {"links": "measure"} if documents == TENSOR[1] else {}
            for transport in transports:
                checkpointing = documents not in ("stream", "waves")
                check_one = partial(
                    check, place, model, lengths, transport, checkpointing, exact, exchanges, divided, **more
                )
                label = f"{kind}, {documents}{', checkpointing' * checkpointing}"
                lines.check(f"model by {transport}{where}", label, check_one)
                close_session()


def _runs(kind: str) -> bool:
    return known_kind(kind) and (kind not in NEEDS or importlib.util.find_spec(NEEDS[kind]) is not None)


def make_model(place: Place, kind: str, sizes: Sizes) -> PreTrainedModel:
    """The same random weights on every rank; scores of attention with a standard deviation between 1 and 2."""
    torch.manual_seed(0)
    size = {"hidden_size": sizes.hidden, "intermediate_size": sizes.hidden}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(kind, **{**COMMON, **size, **MODELS[kind]}))
    model.set_attn_implementation("eager")
    # Sinks weigh as much as hundreds of keys: a wrong one must show.
    randomized(model, lambda x: 1.2 * x.shape[-1] ** -0.5 if x.ndim > 1 else 0.5, sinks=6.0)
    return model.to(place.device, place.dtype).train()


def memory_of_waves(tokens: int, dtype: torch.dtype) -> float:
    """GiB: too few for two of the four head groups of a hybrid's document of so many tokens on two ranks, which land
    twice; enough for one."""
    sizes: dict[str, Any] = DELTA
    heads = sizes["linear_num_value_heads"] // sizes["linear_num_key_heads"]
    elements = 2 * sizes["linear_key_head_dim"] + heads * (sizes["linear_value_head_dim"] + 1)
    return 0.75 * 2 * 2 * tokens * (elements * dtype.itemsize + 4 * heads) / 2**30


def make_lengths(documents: str, ranks: int, tokens: int, shortest: int = 1) -> list[int]:
    """Of one stream of documents, of which every rank has equal parts: very uneven rows, or a first document that lies
    on all ranks."""
    if documents in ("stream", "waves"):
        first = (ranks - 1) * tokens + tokens // 2 - 3
        return [first, 2, ranks * tokens - first - 2]
    short = [tokens // 7, shortest, tokens // 3, 5, tokens // 11]
    long = [tokens - tokens // 9, tokens // 9]
    return [n for rank in range(ranks) for n in ([*short, tokens - sum(short)] if rank % 2 else long)]


def stream(lengths: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, positions and the next token of the document, −100 at its end."""
    ids = torch.randint(3, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(7))
    positions = torch.cat([torch.arange(n) for n in lengths])
    targets = torch.cat([ids[1:], ids.new_full((1,), -100)])
    targets[:-1][positions[1:] == 0] = -100
    return ids.to(device), positions.to(device), targets.to(device)


def train(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor) -> Results:
    model.zero_grad()
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    loss = torch.nn.functional.cross_entropy(logits.to(wide), targets, reduction="none")
    loss.sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {name: (x.full_tensor() if isinstance(x, DTensor) else x).double() for name, x in found.items()}
    return {**found, "loss": loss.detach().double()}


def alone(model: PreTrainedModel, lengths: list[int]) -> Results:
    device = next(model.parameters()).device
    everything, end, losses = stream(lengths, device), 0, []
    total: Results = {}
    for length in lengths:
        begin, end = end, end + length
        one = train(model, *(column[begin:end] for column in everything))
        losses.append(one.pop("loss"))
        total = {name: grad + total.get(name, 0) for name, grad in one.items()}
    return {**total, "loss": torch.cat(losses)}


@contextmanager
def own_code(model: PreTrainedModel) -> Iterator[None]:
    """Layers that carry state run the torch code of transformers: the kernels of other packages know no fp64."""
    home = sys.modules[type(model).__module__]
    with ExitStack() as stack:
        for name, kernel in list(vars(home).items()):
            if name.startswith(("torch_", "causal_conv1d")) and inspect.isroutine(kernel):
                stack.enter_context(mock.patch.object(home, name, inspect.unwrap(kernel)))
        yield


def errors(found: Results, exact: Results) -> dict[str, float]:
    return {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact}


def median(values: dict[str, float]) -> float:
    return sorted(values.values())[len(values) // 2]


def usual(exact: Results, ordinary: dict[str, float]) -> list[float]:
    """The ordinary error of everything in `exact`. All gradients err for the same causes, and that of a gradient of few
    numbers, such as sinks, may be small by chance: it is taken to be the median at least, the largest for very few."""
    gradients = {name: error for name, error in ordinary.items() if name != "loss"}
    few = {name: max(gradients.values()) for name in gradients if exact[name].numel() < 64}
    # Both errors of one or two numbers that nearly cancel are chance: a router's bias was 2.5 times as far off in fp32.
    few |= {name: 2 * few[name] for name in few if exact[name].numel() < 8}
    return [max(error, few.get(name, median(gradients)) * (name != "loss")) for name, error in ordinary.items()]


def make_block(place: Place, transport: str) -> dict[str, Any]:
    block: dict[str, Any] = {"kernel": place.kernel, "transport": transport, "tolerance": 0.02, "timeout_s": 60.0}
    # Rows as short as these would not be worth moving over links as they are.
    block["links"] = {"inside": 1000.0, "between": 1000.0}
    return {**block, "granularity": 64 if place.on_gpu else 16}


def check(
    place: Place, model: PreTrainedModel, lengths: list[int], transport: str, checkpointing: bool,
    known: list[tuple[Results, dict[str, float]]], exchanges: dict[str, int] | None = None, divided: int = 1,
    **more: Any,
) -> Found:  # fmt: skip
    """One model on one transport. `known`: the references, made by the first transport and used by all. `exchanges`: of
    the case before, by transport; `more`: keys of the "cad" block, with which there must then be more of them.
    `divided`: ranks that divide heads and MLPs of a row among them (tensor parallelism)."""
    if not known:
        known.append(references(model, lengths))
    ours = copy.deepcopy(model)
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    block, mesh = {**make_block(place, transport), **more}, None
    if divided > 1:
        mesh = init_device_mesh(place.device.type, (place.ranks // divided, divided), mesh_dim_names=("dp", "tp"))
        divide(ours, mesh["tp"])
    place.together(lambda: deepspeed_cad.apply(ours, block, mesh=mesh))
    tokens = sum(lengths) // (place.ranks // divided)
    begin = place.rank // divided * tokens
    here = [column[begin : begin + tokens] for column in stream(lengths, place.device)]
    # The kernel is chosen where the first layer attends. The second time with warm buffers.
    found = [place.together(lambda: train(ours, *here)) for _ in range(2)][-1]
    session = deepspeed_cad.current_session()
    right, words = judge(place, found, *known[0], divided)
    moved = sum(place.gather(session.transport.bytes_sent if session.transport else 0))
    if exchanges is not None and session.transport is not None:
        before, exchanges[transport] = exchanges[transport], session.transport.exchanges
        if "memory" in more and exchanges[transport] <= before:
            return False, f"{exchanges[transport]} exchanges, {before} without {more}"
    return right and (moved > 0 or session.group_ranks == 1 or "links" in more), f"{words}; {moved >> 10} KiB moved"


def references(model: PreTrainedModel, lengths: list[int]) -> tuple[Results, dict[str, float]]:
    """Every document alone in fp64, and by how much an ordinary run differs from that."""
    with own_code(model):
        exact = alone(copy.deepcopy(model).double(), lengths)
    return exact, errors(alone(model, lengths), exact)


def judge(place: Place, found: Results, exact: Results, ordinary: dict[str, float], divided: int = 1) -> Found:
    """Whether what the ranks found of their parts errs by no more than twice what an ordinary run does. Collective.
    `divided`: so many ranks in turn have found the same."""
    parts = [torch.empty_like(found["loss"]) for _ in range(place.ranks)]
    dist.all_gather(parts, found["loss"])
    found["loss"] = torch.cat(parts[::divided])
    for name in sorted(found.keys() - {"loss"}):
        dist.all_reduce(found[name])
        found[name] /= divided
    ratios = {name: error / limit for (name, error), limit in zip(errors(found, exact).items(), usual(exact, ordinary))}
    floor = median(ordinary)
    worst = max(ratios, key=lambda name: ratios[name])
    right = all(ratio <= 2.0 for ratio in ratios.values()) and floor < 0.1 and len(ratios) == len(found)
    return right, (
        f"error ÷ ordinary error: loss {ratios['loss']:.2f}, worst {ratios[worst]:.2f} ({worst}), ordinary "
        f"{floor:.1e}, at most {max(ordinary.values()):.1e}"
    )
