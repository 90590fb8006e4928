"""`-m deepspeed_cad.run` and `accelerate-cad` under real launchers: a script without CAD in it, in place and beside a
reserved server, whose trainers are dealt the same rows; and what is refused."""

import json
import re
import time
from pathlib import Path

import pytest
import training
from launched import SCRIPT, accelerate_yaml, deepspeed_launcher, run_ranks, torchrun, trained, zero
from ports import free_port
from trainers import assert_same, losses_of

LAUNCH = "from accelerate.commands.accelerate_cli import main; main()"
STEPS = 4


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses without CAD; the same for every loop of the script that shards data as DistributedSampler does."""
    return losses_of(trained(2, tmp_path_factory.mktemp("plain"), "ddp")["log"])


def _launcher(way: str, processes: int, cad: list[str], folder: Path) -> list[str]:
    """The words in front of the script."""
    (folder / "ds.json").write_text(json.dumps(zero(3 if processes > 2 else 2, stage3_param_persistence_threshold=0)))
    (folder / "launch.yaml").write_text(accelerate_yaml(processes))
    if way == "deepspeed":
        return [*deepspeed_launcher(processes), "--module", *cad]
    if way == "accelerate launch":
        flags = ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1"]
        return ["-c", LAUNCH, "launch", *flags, "--main_process_port", str(free_port()), "-m", *cad]
    if way == "accelerate-cad":
        words = ["-m", "deepspeed_cad.cli.accelerate_cad", "launch", *cad[1:], "--config_file", "launch.yaml"]
        return [*words, "--main_process_port", str(free_port())]
    return [*torchrun(processes), "-m", *cad]


@pytest.mark.slow
@pytest.mark.parametrize("way, loop, servers", [
    ("torchrun", "ddp", 0), ("accelerate-cad", "accelerate", 0), ("deepspeed", "deepspeed", 1),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("torchrun", "fsdp2", 0), ("torchrun", "ddp", 1), ("deepspeed", "deepspeed", 0),
        ("accelerate launch", "accelerate", 0), ("accelerate-cad", "accelerate", 1),
    )),
])  # fmt: skip
def test_launchers(plain: list[float], tmp_path: Path, way: str, loop: str, servers: int) -> None:
    """The JSON for DeepSpeed has no "cad" block."""
    block = training.BLOCK | ({"servers": {"reserved": servers}} if servers else {})
    words = _launcher(way, 2 + servers, ["deepspeed_cad.run", "--cad", json.dumps(block)], tmp_path)
    begin = time.perf_counter()
    found = trained(words, tmp_path, loop, "--json", "ds.json")
    took = time.perf_counter() - begin
    assert_same(losses_of(found["log"]), plain)
    before, after = found["balance"]
    assert before > 1.2 and after < 1.05
    assert found["argv"][0] == SCRIPT and found["argv"][1 + ("--local_rank=0" in found["argv"])] == loop
    if servers:
        done = rf"server 2 is done: {STEPS} micro-batches served, (.*) s busy of (.*) s, at most"
        said = re.search(done, found["said"])
        assert said and float(said[1]) <= float(said[2]) < took
    assert ("--local_rank=0" in found["argv"]) == (way == "deepspeed")


@pytest.mark.slow
def test_not_active_by_the_first_step(tmp_path: Path) -> None:
    """A script that takes an optimizer step without CAD ends with 2, and leaves nothing that looks trained."""
    words = ["-m", "deepspeed_cad.run", "--cad", json.dumps(training.BLOCK), SCRIPT, "eval", "out.json"]
    done = run_ranks(1, words, tmp_path)
    line = next(line for line in done.stderr.splitlines() if line.startswith("deepspeed_cad: rank"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "not active at the first optimizer step" in line and "eval mode" in line and "--cad" in line
    assert not (tmp_path / "out.json").exists()
