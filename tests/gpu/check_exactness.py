"""A fast selection of benchmarks/gpu_exactness.py: every kernel mode of CAD once, not every combination."""

from itertools import product

from gpu_exactness import CHECKPOINTING, OVERLAPS, Case, Documents, check, references
from lines import REFUSED, Found, Lines, Place
from train_model import make_model

from deepspeed_cad.kernels.interface import KernelNeed
from deepspeed_cad.kernels.registry import choose
from deepspeed_cad.session import close_session


def takes_long(transport: str, ranks: int) -> bool:
    """Whether half of the cases must do: NCCL opens in seconds among more than two ranks, for every case anew."""
    return transport == "nccl" and ranks > 2


def run(place: Place, lines: Lines, case: str) -> None:
    """Transports × overlaps × documents, with checkpointing in turns, and some in waves; with pretended hosts those in
    waves alone, by what carries exchanges between hosts."""
    hidden, heads, groups, tokens = (1024, 8, 4, 4096 // max(2, place.ranks)) if place.on_gpu else (64, 8, 4, 128)
    size = hidden // heads
    kernel = choose(place.kernel, KernelNeed(place.device, place.dtype, size, size, heads // groups)).name
    model = make_model(2, hidden, heads, groups, hidden // 2, 512, place.ranks * tokens, place.device, place.dtype)
    known: dict[str, tuple] = {}

    def one(chosen: Case) -> Found:
        if chosen.documents not in known:
            documents = Documents.make(chosen.documents, place.ranks, tokens, hidden, 512, place.device)
            known[chosen.documents] = documents, *references(model, kernel, documents, place.device)
        right, text = check(chosen, model, *known[chosen.documents])
        return (None if text.startswith(REFUSED) else right), text

    transports = ["nvlink", "nccl"] if place.on_gpu else ["c10d"]
    modes, chosen = len(CHECKPOINTING), []
    for i, (transport, overlap, documents) in enumerate(product(transports, OVERLAPS, ("rows", "stream"))):
        checkpointing = CHECKPOINTING[(i + i // modes) % modes]
        if takes_long(transport, place.ranks) and (i + i // 2) % 2:
            continue
        chosen.append(Case(kernel, transport, overlap, documents, checkpointing))
    if place.hosts:
        transports, chosen = ["nccl" if len(set(place.hosts)) == place.ranks else "mixed"], []
    for i, (transport, waves, documents) in enumerate(product(transports, (2, 4), ("rows", "stream"))):
        checkpointing = CHECKPOINTING[i % modes]
        overlap = "interleave" if i % 4 == 1 else "local_first"
        if takes_long(transport, place.ranks) and i % 4 not in (1, 2):
            continue
        chosen.append(Case(kernel, transport, overlap, documents, checkpointing, waves))
    where = f", hosts {','.join(map(str, place.hosts))}" if place.hosts else ""
    for each in chosen:
        label = f"{each.overlap}, {each.documents}, {each.checkpointing}"
        label += "" if each.waves == "auto" else f", {each.waves} waves"
        lines.check(f"exactness by {each.transport}", label + where, lambda c=each: one(c))
        close_session()
