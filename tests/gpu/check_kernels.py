"""Every kernel that works here against plain torch in fp64: O, LSE and gradients, with and without sinks."""

import re
from importlib import metadata

import numpy as np
import torch
from cases import sequences_of
from lines import Found, Lines, Place

from deepspeed_cad.attention.serve import fold_sinks
from deepspeed_cad.exchange.placement import Placement, take
from deepspeed_cad.exchange.placement import place as bring
from deepspeed_cad.kernels.interface import Kernel, KernelNeed, MaskRule, Sequences
from deepspeed_cad.kernels.registry import KERNELS
from deepspeed_cad.kernels.torch_math import TorchMath

LENGTHS = ((1, 1), (200, 900), (64, 64), (333, 333), (128, 1500), (7, 1031))
"""Query and key rows of the sequences that kernels are checked on."""

SHAPES = {
    "32/8 × 128": {"heads": 32, "groups": 8, "head": 128}, "4/1 × 128": {"heads": 4, "groups": 1, "head": 128},
    "view 4/1 of 32/8 × 128": {"heads": 32, "groups": 8, "head": 128, "view": True},
    "32/8 × 128, keys by head group": {"heads": 32, "groups": 8, "head": 128, "landed": True},
    "8/2 × 64": {"heads": 8, "groups": 2, "head": 64},
    "8/2 × 64, sinks": {"heads": 8, "groups": 2, "head": 64, "sinks": True},
    "8/2 × 64, window 100": {"heads": 8, "groups": 2, "head": 64, "window": 100},
    "4/1 × 64, window 100, sinks": {"heads": 4, "groups": 1, "head": 64, "window": 100, "sinks": True},
    "8/2 × 64, one query row each": {"heads": 8, "groups": 2, "head": 64, "rows": 1},
    "8/2 × 64, one query row each, window": {"heads": 8, "groups": 2, "head": 64, "window": 100, "rows": 1},
    "8/8 × 96": {"heads": 8, "groups": 8, "head": 96}, "16/1 × 256": {"heads": 16, "groups": 1, "head": 256},
    "8/2 × 64, soft-cap": {"heads": 8, "groups": 2, "head": 64, "softcap": 2.0},
    "8/2 × 64, soft-cap, window": {"heads": 8, "groups": 2, "head": 64, "softcap": 2.0, "window": 100},
    "4/4 × 192, values 128": {"heads": 4, "groups": 4, "head": 192, "value": 128},
}  # fmt: skip


def run(place: Place, lines: Lines, case: str) -> None:
    """Shapes are shared out over the parts of this group ("part 1 of 2") and their ranks, as some kernels are compiled
    for each; the last checks determinism."""
    part, parts = (int(number) for number in re.findall(r"\d+", case)) if case else (1, 1)
    place_of_shapes, places = (part - 1) * place.ranks + place.rank, parts * place.ranks
    chosen = [kernel for kernel in KERNELS if place.kernel == kernel.name]
    if place.kernel == "auto":
        chosen = list(KERNELS[:-1] if place.on_gpu else KERNELS[-1:])  # the last is what others are compared with
    if place_of_shapes == 0:
        for dtype in (torch.float32, place.dtype):
            lines.check("rows that come back", f"added in {dtype}", lambda d=dtype: check_placed(place, d))
    for kernel in chosen:
        what = f"kernel {kernel.name}"
        reasons = {refusal(place, kernel, shape) for shape in SHAPES.values()}
        if len(reasons) == 1 and None not in reasons:
            if part == 1:
                lines.check(what, "all", lambda r=reasons: (None, r.pop()))
            continue
        for i, (label, shape) in enumerate(SHAPES.items()):
            if i % places == place_of_shapes:
                lines.check(what, label, lambda k=kernel, s=shape: check(place, k, s))
        if place_of_shapes == 0:
            lines.check(what, "more than 2^31 elements", lambda k=kernel: check_large(place, k))
        if place_of_shapes == places - 1:
            torch.use_deterministic_algorithms(True)
            shape = SHAPES["4/1 × 128"]
            lines.check(what, "4/1 × 128, deterministic", lambda k=kernel, s=shape: check(place, k, s))
            torch.use_deterministic_algorithms(False)


def refusal(place: Place, kernel: Kernel, shape: dict) -> str | None:
    """Why a kernel does not take this, also where only the build that is installed here does not."""
    need = KernelNeed(
        place.device, place.dtype, shape["head"], shape.get("value", shape["head"]), shape["heads"] // shape["groups"],
        "window" in shape, "softcap" in shape, torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    reason = kernel.refuse(need)
    if reason is None and kernel.name == "flash_attn_2":
        # A build that was trimmed says so in its summary; it would compute garbage beyond that.
        summary = metadata.metadata("flash_attn").get("Summary", "")
        limit = re.search(r"head sizes up to (\d+)", summary)
        if limit and need.head_dim > int(limit.group(1)):
            reason = f"the build that is installed here has head sizes up to {limit.group(1)}"
    return reason


def check(place: Place, kernel: Kernel, shape: dict) -> Found:
    """O, LSE and gradients in bf16 against fp64 on the same inputs; twice, to see whether they are the same bits."""
    device, dtype = place.device, place.dtype
    heads, groups, head = shape["heads"], shape["groups"], shape["head"]
    value = shape.get("value", head)
    reason = refusal(place, kernel, shape)
    if reason is not None:
        return None, reason
    torch.manual_seed(0)
    rows = shape.get("rows", 333)
    sequences = sequences_of([(min(rows, queries), keys) for queries, keys in LENGTHS], device)
    q_rows, k_rows = int(sequences.host_q[-1]), int(sequences.host_k[-1])
    q, k, v, do = (
        torch.randn(*size, device=device).to(dtype)
        for size in ((q_rows, heads, head), (k_rows, groups, head), (k_rows, groups, value), (q_rows, heads, value))
    )
    if shape.get("view"):
        q, k, v, do = q[:, 8:12], k[:, 2:3], v[:, 2:3], do[:, 8:12]
    if shape.get("landed"):
        # Keys as they lie where they landed, with rows of own queries: one head group behind the other.
        k, v = (by_group(x, 100) for x in (k, v))
    sinks = torch.randn(q.shape[1], device=device) + 6 if shape.get("sinks") else None
    rule = MaskRule(head**-0.5, shape.get("window"), shape.get("softcap"))

    def attend(kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> list:
        out = into = None
        if shape.get("landed"):
            # Places at home, of which these are some heads.
            out, dq = (torch.zeros(len(x), 2 * heads, x.shape[2], device=device, dtype=x.dtype) for x in (do, q))
            out, into = out[:, :heads], (dq[:, :heads], *(by_group(torch.zeros_like(x), 100) for x in (k, v)))
        o, lse = kernel.forward(q, k, v, sequences, rule, out)
        if out is not None and o is not out:
            o = out.copy_(o)
        if sinks is not None:
            o, lse = fold_sinks(o, lse, sinks.to(lse.dtype))
        return [o, lse, *kernel.backward(do, q, k, v, o, lse, sequences, rule, into)]

    found, again = attend(kernel, q, k, v, do), attend(kernel, q, k, v, do)
    same = all(torch.equal(one, other) for one, other in zip(found, again))
    expected = attend(TorchMath(), *(x.double() for x in (q, k, v, do)))
    errors = [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, expected)]
    # bf16 has 8 bits: rounding the exact result alone gives a relative error of about 0.0017.
    right = max(errors) < 0.012 and errors[1] < 1e-3
    if torch.are_deterministic_algorithms_enabled():
        right = right and same
    named = ", ".join(f"{name} {error:.4f}" for name, error in zip(("O", "LSE", "dQ", "dK", "dV"), errors))
    return right, f"{named}{'' if same else '; bits differ between runs'}"


def by_group(x_SGD: torch.Tensor, gap: int) -> torch.Tensor:
    """The same, with each group's rows side by side and `gap` rows more from group to group."""
    rows, groups, width = x_SGD.shape
    return x_SGD.new_zeros(groups, rows + gap, width)[:, :rows].copy_(x_SGD.transpose(0, 1)).transpose(0, 1)


def check_large(place: Place, kernel: Kernel) -> Found:
    """The last of many sequences, in tensors of more than 2^31 elements: the same bits as alone; and rows placed there.
    Fewer on a CPU."""
    reason = refusal(place, kernel, {"heads": 32, "groups": 8, "head": 128})
    if reason is not None:
        return None, reason
    length = 128
    count = (2**31 // (32 * 128 * length)) + 8 if place.on_gpu else 5
    torch.manual_seed(1)
    host = (np.arange(count + 1) * length).astype(np.int32)
    rows = int(host[-1])
    tensors = [torch.zeros(rows, heads, 128, device=place.device, dtype=place.dtype) for heads in (32, 8, 8, 32)]
    for x in tensors:
        x[-length:].normal_()
    rule = MaskRule(128**-0.5, None, None)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, ends: np.ndarray) -> list:
        cu = torch.from_numpy(ends).to(place.device)
        sequences = Sequences(ends, ends, cu, cu, length, length)
        o, lse = kernel.forward(q, k, v, sequences, rule)
        return [x[-length:].clone() for x in (o, lse, *kernel.backward(do, q, k, v, o, lse, sequences, rule))]

    found = attend(*tensors, host)
    alone = attend(*(x[-length:].contiguous() for x in tensors), host[:2])
    # dQ is summed by atomics, so its bits may differ.
    apart = [float((one.double() - other.double()).norm() / other.double().norm()) for one, other in zip(found, alone)]
    home = tensors[0].unflatten(1, (8, -1)).flatten(2)
    last = torch.arange(rows * 8 - 3, rows * 8, device=place.device)
    came = torch.randn(3, home.shape[2], device=place.device).to(place.dtype)
    runs = np.array([[rows - 1, 5 + number, 1, number] for number in range(3)])
    bring(Placement.of(runs, place.device), came, came[:0], home, False)
    placed = torch.equal(home[-1, -3:], came) and torch.equal(take(home, last), came)
    size = f"{rows * 32 * 128 / 2**31:.3f} × 2^31 elements"
    return max(apart) < 1e-2 and placed, f"{size}; apart by {max(apart):.2g}; rows {'' if placed else 'not '}placed"


def check_placed(place: Place, wide: torch.dtype) -> Found:
    """Rows added to sums of another type than theirs, several for one row at home: as slices on a CPU, to the bit."""
    rng = np.random.default_rng(2)
    rows, groups, width = 300, 3, 96
    length, row, group = rng.integers(1, 80, 40), rng.integers(0, 220, 40), rng.integers(0, groups, 40)
    source = rng.integers(0, 820, 40)
    runs = np.stack([row, group, length, np.where(rng.random(40) < 0.5, source, -1 - source)], axis=1)
    landed, served = (torch.randn(count, width).to(place.dtype) for count in (900, 900))
    home = torch.randn(rows, groups, width + 8).to(wide)[..., :width]
    found = []
    for device in (place.device, torch.device("cpu")):
        # A view with gaps, as the gradient of K in a tensor with others.
        sums = torch.empty(rows, groups, width + 8, device=device, dtype=wide)[..., :width].copy_(home)
        bring(Placement.of(runs, device), landed.to(device), served.to(device), sums, True)
        found.append(sums.double().cpu())
    apart = float((found[0] - found[1]).abs().max())
    return apart == 0.0, f"apart by {apart:.2g}"
