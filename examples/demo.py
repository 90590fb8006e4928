"""The demo: fine-tune a small Llama on real documents with CAD, again without it, and compare.

    make demo                                     or: python examples/demo.py
    make demo MODEL=checkpoint DATA=folder        a checkpoint and text files of your own

Both runs are examples/finetune_deepspeed.py, started by the `deepspeed` launcher; they differ in the "cad" block of the
DeepSpeed JSON alone. The documents are the source files of this Python installation, tokenised with a tokenizer that is
made here. Everything is written to demo_output/.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from packing import list_files, read_texts

HERE = Path(__file__).resolve().parent
TOKENIZER_SAMPLE = 300
"""Documents that the tokenizer is made from."""

Row = dict[str, Any]
"""The figures of one step, as finetune_deepspeed.py reports them."""


@dataclass(frozen=True)
class Machine:
    """What the demo does on this machine."""

    processes: int
    gpus: bool
    tokens: int
    """Tokens of each process in a step."""
    model: dict[str, int]
    """Size of the model that is made."""
    why: str


CPU_MODEL = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 2048,
}  # fmt: skip
GPU_MODEL = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 16384,
}  # fmt: skip


def choose_machine(gpus: int) -> Machine:
    """One process per GPU where there are several, else four on the CPU."""
    if gpus >= 2:
        return Machine(gpus, True, 16384, GPU_MODEL, f"{gpus} GPUs, bf16")
    one = "one GPU alone has nothing to balance, so: " if gpus == 1 else ""
    return Machine(4, False, 4096, CPU_MODEL, f"{one}4 processes on the CPU, fp32")


def make_checkpoint(folder: Path, size: dict[str, Any], texts: Iterable[str], tokens: int) -> None:
    """Write a small Llama with random weights, and a byte-level BPE tokenizer trained on `texts`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size["vocab_size"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"], show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=tokens, tie_word_embeddings=False, **size)
    LlamaForCausalLM(config).save_pretrained(folder)


def launch(name: str, machine: Machine, out: Path, arguments: list[str], on_step: Callable[[Row], None]) -> list[Row]:
    """Run finetune_deepspeed.py under the launcher; gives its steps, and each to `on_step` as soon as it is done.

    Its output goes to `out`/`name`.log. Raises SystemExit with the end of it if the run fails.
    """
    report, log = out / f"{name}.jsonl", out / f"{name}.log"
    report.unlink(missing_ok=True)
    command = [
        *launcher(), "--num_gpus", str(machine.processes), "--master_port", str(free_port()),
        str(HERE / "finetune_deepspeed.py"), "--report", str(report), *arguments,
    ]  # fmt: skip
    environment = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // machine.processes)),
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **os.environ,
    }
    if not machine.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    rows: list[Row] = []
    with open(log, "w") as file:
        running = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        assert running.stdout is not None
        try:
            for line in running.stdout:
                file.write(line)
                if line.startswith("step "):
                    for text in islice(report.read_text().splitlines(), len(rows), None):
                        rows.append(json.loads(text))
                        on_step(rows[-1])
            code = running.wait()
        finally:
            if running.poll() is None:  # interrupted: the launcher, and the ranks that it started
                os.killpg(running.pid, signal.SIGKILL)
    if code or not rows:
        end = "\n".join(log.read_text().splitlines()[-40:])
        raise SystemExit(f"{end}\n\nThe run {name!r} ended with exit code {code}; all of its output is in {log}")
    return rows


def launcher() -> list[str]:
    """The `deepspeed` command of this Python."""
    script = Path(sys.executable).parent / "deepspeed"
    return [sys.executable, str(script)] if script.is_file() else [sys.executable, "-m", "deepspeed.launcher.runner"]


def free_port() -> int:
    """A port for the processes to meet at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


BEFORE, AFTER = "cad/attention_max_over_mean_before", "cad/attention_max_over_mean"
HEADER = (
    f"{'':12}attention max/mean{'moved':>9}{'planning':>10}{'time':>7}\n"
    f"{'step':>6}{'loss':>9}{'before':>8}{'after':>7}{'MiB':>9}{'ms':>10}{'s':>7}"
)


def table_line(row: Row) -> str:
    """One step with CAD."""
    return (
        f"{row['step']:6d}{row['loss']:9.4f}{row[BEFORE]:8.2f}{row[AFTER]:7.2f}{row['cad/sent_MiB']:9.1f}"
        f"{row['cad/planning_ms']:10.1f}{row['seconds']:7.1f}"
    )


def comparison(on: list[Row], off: list[Row]) -> Iterator[str]:
    """Losses side by side, and their largest difference."""
    yield "  step      CAD on     CAD off   difference"
    for a, b in zip(on, off, strict=True):
        yield f"  {a['step']:4d}  {a['loss']:10.6f}  {b['loss']:10.6f}  {abs(a['loss'] - b['loss']):11.1e}"
    yield f"Largest difference of the losses: {largest_difference(on, off):.1e}"


def largest_difference(on: list[Row], off: list[Row]) -> float:
    """Over all steps."""
    return max(abs(a["loss"] - b["loss"]) for a, b in zip(on, off, strict=True))


def draw(rows: list[Row], path: Path) -> None:
    """A picture: the attention of each rank in each step, before and after, as a multiple of the step's mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 1, sharex=True, sharey=True, figsize=(max(7.0, 0.6 * len(rows)), 5.4))
    ranks = len(rows[0]["load"])
    colors = pyplot.get_cmap("viridis")([rank / max(ranks - 1, 1) * 0.9 for rank in range(ranks)])
    shown = (("load_before", BEFORE, "without CAD"), ("load", AFTER, "with CAD"))
    for panel, (key, imbalance, title) in zip(panels, shown):
        for rank in range(ranks):
            shares = [row[key][rank] * ranks / sum(row[key]) for row in rows]
            places = [row["step"] + (rank - (ranks - 1) / 2) * 0.8 / ranks for row in rows]
            panel.bar(places, shares, width=0.8 / ranks, color=colors[rank], label=f"rank {rank}")
        panel.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
        panel.set_ylabel("attention / mean")
        panel.set_title(f"{title}: the slowest rank has {average(rows, imbalance):.2f} times the mean", fontsize=10)
    panels[1].legend(ncols=min(ranks, 8), fontsize=8, loc="upper right")
    panels[1].set_xlabel("step")
    panels[1].set_xticks([row["step"] for row in rows])
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def average(rows: list[Row], name: str) -> float:
    """A figure's mean over steps."""
    return sum(row[name] for row in rows) / len(rows)


def main(argv: list[str] | None = None) -> int:
    """Run the demo; gives 0 where both runs had the same losses."""
    import torch
    from tqdm import tqdm

    args = read_arguments(argv)
    machine = choose_machine(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    processes, tokens = args.processes or machine.processes, args.tokens or machine.tokens
    machine = Machine(processes, machine.gpus, tokens, machine.model, machine.why)
    if not machine.gpus:
        os.environ["DS_ACCELERATOR"] = "cpu"
    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    data = args.data or sysconfig.get_paths()["stdlib"]
    print(f"This machine: {machine.why}. {processes} ranks of {tokens} tokens each.")
    print(f"Documents:    {len(list_files([data]))} files of {data}")
    if args.model:
        checkpoint = args.model
        rate = ["--learning-rate", "2e-5"]
    else:
        checkpoint, rate = str(out / "checkpoint"), []
        sample = islice(read_texts(list_files([data])), TOKENIZER_SAMPLE)
        make_checkpoint(out / "checkpoint", machine.model, sample, tokens)
    print(f"Checkpoint:   {checkpoint}\n")
    common = [
        "--deepspeed_config", str(args.config), "--model", checkpoint, "--data", data, "--context", str(tokens),
        "--steps", str(args.steps), "--no-checkpointing", *rate,
    ]  # fmt: skip

    def run(name: str, title: str, arguments: list[str], show: Callable[[Row], None]) -> tuple[list[Row], float]:
        begin = time.perf_counter()
        with tqdm(total=args.steps, desc=title, unit="step", disable=None, leave=False) as bar:

            def on_step(row: Row) -> None:
                show(row)
                bar.update()

            rows = launch(name, machine, out, [*common, *arguments], on_step)
        return rows, time.perf_counter() - begin

    print(f'With CAD ("cad": {json.dumps(json.loads(Path(args.config).read_text())["cad"])})\n{HEADER}')
    on, seconds_on = run("cad_on", "with CAD", [], lambda row: tqdm.write(table_line(row)))
    print(f"  {seconds_on:.0f} s with start-up\n\nThe same steps without the block")
    off, seconds_off = run("cad_off", "without CAD", ["--no-cad"], lambda row: None)
    print(f"  {seconds_off:.0f} s with start-up\n")
    print(*comparison(on, off), sep="\n")
    draw(on, out / "load.png")
    print(f"\nThe slowest rank had {average(on, BEFORE):.2f} times the mean attention before, "
          f"{average(on, AFTER):.2f} after.\nEach rank's attention before and after: {out / 'load.png'}")  # fmt: skip
    if not machine.gpus:
        print("The ranks share the cores of one CPU, so balance saves no time here; where each has a GPU it does.")
    allowed = 0.05 if machine.gpus else 1e-3
    if largest_difference(on, off) > allowed:
        print(f"The losses differ by more than {allowed}: that is a bug.", file=sys.stderr)
        return 1
    return 0


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", help="a checkpoint of your own: a folder, or a name on the hub")
    add("--data", help='a folder or file of your own: text files, or .jsonl with a "text" field')
    add("--steps", type=int, default=8, help="optimizer steps of each run (default 8)")
    add("--tokens", type=int, help="tokens per rank and step (default 4096, on GPUs 16384)")
    add("--processes", type=int, help="ranks (default: one per GPU, or 4 on a CPU)")
    add("--config", default=HERE / "ds_zero1_cad.json", help="the DeepSpeed JSON, with its block")
    add("--out", default=HERE.parent / "demo_output", help="where everything is written")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
