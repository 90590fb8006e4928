"""`-m deepspeed_cad.run` and `accelerate-cad` under real launchers: a script without CAD in it, and what is refused."""

from __future__ import annotations

import json

import pytest
import training
from launched import SCRIPT, accelerate_yaml, deepspeed_launcher, losses, run_ranks, torchrun, trained, zero
from ports import free_port
from trainers import assert_same

LAUNCH = "from accelerate.commands.accelerate_cli import main; main()"
BLOCK = {"granularity": 16, "tolerance": 0.02, "links": training.LINKS}
CAD = ["-m", "deepspeed_cad.run", "--cad", json.dumps(BLOCK)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[float]:
    """Losses without CAD; the same for every loop of the script that shards data as DistributedSampler does."""
    return losses(trained(2, tmp_path_factory.mktemp("plain"), "ddp"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop", [pytest.param("accelerate", marks=pytest.mark.long), "ddp", pytest.param("fsdp2", marks=pytest.mark.long)]
)
def test_torchrun(plain, tmp_path, loop: str) -> None:
    found = trained([*torchrun(2), *CAD], tmp_path, loop)
    assert_same(losses(found), plain)
    before, after = found["balance"]
    assert before > 1.2 and after < 1.05
    assert found["argv"][0] == SCRIPT and found["argv"][1] == loop


@pytest.mark.long
@pytest.mark.slow
def test_four_processes_with_the_trainer(tmp_path) -> None:
    without = trained(4, tmp_path, "trainer")
    found = trained([*torchrun(4), *CAD], tmp_path, "trainer")
    assert_same(losses(found), losses(without))
    for entry in found["log"]:
        assert entry["cad/attention_max_over_mean"] < 1.05 < entry["cad/attention_max_over_mean_before"]


@pytest.mark.long
@pytest.mark.slow
def test_accelerate_launch(plain, tmp_path) -> None:
    flags = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", str(free_port())]
    found = trained(["-c", LAUNCH, "launch", *flags, *CAD], tmp_path, "accelerate")
    assert_same(losses(found), plain)
    assert found["balance"][1] < 1.05


@pytest.mark.slow
def test_accelerate_cad_launch_with_a_yaml(plain, tmp_path) -> None:
    config = tmp_path / "launch.yaml"
    config.write_text(accelerate_yaml(2))
    command = ["-m", "deepspeed_cad.cli.accelerate_cad", "launch", *CAD[2:]]
    command += ["--config_file", str(config), "--main_process_port", str(free_port())]
    found = trained(command, tmp_path, "accelerate", "--steps", "4")
    assert_same(losses(found), plain)
    assert found["balance"][1] < 1.05


@pytest.mark.slow
def test_deepspeed_launcher(plain, tmp_path) -> None:
    """Its script calls deepspeed.initialize with a JSON that has no "cad" block."""
    (tmp_path / "ds.json").write_text(json.dumps(zero(2)))
    found = trained([*deepspeed_launcher(2), "--module", *CAD[1:]], tmp_path, "deepspeed", "--json", "ds.json")
    assert_same(losses(found), plain)
    assert found["balance"][1] < 1.05
    assert "--local_rank=0" in found["argv"]


# Bad input: one clear line, and no training


@pytest.mark.slow
def test_not_active_by_the_first_step(tmp_path) -> None:
    """A script that takes an optimizer step without CAD ends with 2, and leaves nothing that looks trained."""
    done = run_ranks(1, [*CAD, SCRIPT, "eval", "out.json"], tmp_path)
    line = next(line for line in done.stderr.splitlines() if line.startswith("deepspeed_cad: rank"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "not active at the first optimizer step" in line and "eval mode" in line and "--cad" in line
    assert not (tmp_path / "out.json").exists()
