"""The console script: its subcommands, its exit codes, and what the doctor finds."""

import json
import logging
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from deepspeed_cad import cli
from deepspeed_cad.cli import doctor
from deepspeed_cad.cli.doctor import Finding
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADDataError
from deepspeed_cad.exchange.probe import NAMES
from deepspeed_cad.server import meeting, process
from deepspeed_cad.server.launch import Split

WORKS = {
    "packages": [*(Finding(name, True, "2") for name in ("torch", "numpy", "native library", "deepspeed"))],
    "kernels": [Finding("torch_math", True, "error 1e-7"), Finding("other", False, "refused")],
    "transports": [Finding("c10d", True, "exchanged"), Finding("nvlink", False, "no GPU")],
    "devices": [Finding("GPUs", False, "none")],
    "autoload": [Finding("autoload", True, "active")],
}


@pytest.mark.parametrize("name", sorted(cli.SUBCOMMANDS))
def test_every_subcommand_that_is_listed_is_there(name: str, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([name, "--help"])
    shown = capsys.readouterr().out
    purpose = cli.SUBCOMMANDS[name]
    assert left.value.code == 0 and f"usage: deepspeed-cad {name}" in shown
    assert f"{purpose[0].upper()}{purpose[1:]}." in " ".join(shown.split())


def test_an_error_of_ours_is_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "examine", mock.Mock(side_effect=CADDataError("document 3 has no end")))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "deepspeed-cad doctor: document 3 has no end\n"


def test_reports_for_people_and_for_programs(monkeypatch, capsys) -> None:
    missing = Finding("deepspeed", False, "not installed", "pip install it")
    monkeypatch.setattr(doctor, "examine", lambda: WORKS | {"packages": [*WORKS["packages"][:3], missing]})
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.rstrip().split("\n")
    assert "  --  deepspeed        not installed" in lines
    assert [line for line in lines if "tried" in line] == ["kernels, each tried", "transports, each tried"]
    assert "works here: kernels torch_math; transports c10d; autoload active" in lines[-1]
    assert lines[-1].endswith("to get what is missing: deepspeed: pip install it")
    level = logging.getLogger("deepspeed_cad").level
    assert doctor.summarise(doctor.examine()) == lines[-1]
    assert logging.getLogger("deepspeed_cad").level == level
    assert cli.main(["doctor", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["core_works"] is True and read["kernels"][0]["name"] == "torch_math" and read["summary"] == lines[-1]


@pytest.mark.parametrize("section, found", [
    ("packages", Finding("torch", False, "no", "get it")),
    ("packages", Finding("native library", False, "not built")),
    ("kernels", Finding("torch_math", False, "wrong numbers")),
    ("transports", Finding("c10d", False, "failed")),
])  # fmt: skip
def test_exit_code_where_the_core_does_not_work(monkeypatch, section: str, found: Finding, capsys) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: WORKS | {section: [found]})
    assert cli.main(["doctor"]) == 1 and "DOES NOT WORK" in capsys.readouterr().out


def test_a_probe_that_fails_is_a_finding() -> None:
    fails = mock.Mock(side_effect=OSError("first line\nsecond line"))
    assert doctor._findings("thing", fails) == [Finding("thing", False, "OSError: first line")]
    assert doctor._last_line(" \n") == "no message"


def test_packages_that_are_missing_come_with_a_remedy(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", {"no_such_package": "pip install no_such_package", "numpy": "build it"})
    monkeypatch.setattr(doctor, "import_module", mock.Mock(side_effect=OSError("no BLAS")))
    missing = Finding("no_such_package", False, "not installed", "pip install no_such_package")
    assert doctor.try_packages()[:2] == [missing, Finding("numpy", False, "cannot be imported: no BLAS", "build it")]


def test_autoload_is_tried_in_another_python(monkeypatch) -> None:
    monkeypatch.delenv("DEEPSPEED_CAD_AUTOLOAD", raising=False)
    for code, out, said in (0, "True", "active"), (0, "False", "not active"), (1, "True", "importing deepspeed fails"):
        done = SimpleNamespace(returncode=code, stdout=out, stderr="")
        monkeypatch.setattr(doctor.subprocess, "run", lambda *_, done=done, **given: done)
        (found,) = doctor.try_autoload()
        assert found.detail.startswith(said) and found.name == "autoload" and found.ok == (not found.remedy)
    monkeypatch.setenv("DEEPSPEED_CAD_AUTOLOAD", "0")
    assert "turned off" in doctor.try_autoload()[0].detail


def test_transports_are_tried_between_two_processes(monkeypatch) -> None:
    process = SimpleNamespace(communicate=lambda timeout: ("so\n3 GB/s", "why\nthat is why"), kill=int, wait=int)
    monkeypatch.setattr(doctor.subprocess, "Popen", lambda *_, **given: process)
    for process.returncode, said in (0, "exchanged slices on the CPU at 3 GB/s"), (1, "failed: that is why"):
        (found,) = doctor._try_transport("c10d")
        assert found.detail.endswith(f"two processes {said}") and found.ok == (process.returncode == 0)
    for ok, said in (True, "NCCL; not tried, because this process sees one GPU"), (False, "NCCL"):
        monkeypatch.setattr("deepspeed_cad.exchange.probe.probe", lambda name, ok=ok: (ok, "NCCL"))
        assert doctor._try_transport("nccl") == [Finding("nccl", ok, said)]


@pytest.mark.parametrize(
    ("reach", "shown"), [([[1]], []), ([[1, 1], [1, 1]], [(True, "xx  xx")]), ([[1, 0], [1, 1]], [(False, "x.  xx")])]
)
def test_gpus_are_listed_and_who_reaches_whom(monkeypatch, reach: list[list[int]], shown: list) -> None:
    about = SimpleNamespace(major=9, minor=0, total_memory=140 << 30, name="some GPU")
    zeros, tried = torch.zeros, []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(reach))
    monkeypatch.setattr(torch, "zeros", lambda count, device: tried.append(device) or zeros(count))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: bool(reach[a][b]))
    first, *listed = doctor.try_devices()
    assert first.ok and first.detail.startswith(f"{len(reach)} × CUDA")
    gpus = [one for one in listed if one.name.startswith("GPU ")]
    assert tried == [f"cuda:{index}" for index in range(len(reach))]
    assert [one.detail for one in gpus] == ["some GPU, 9.0, 140 GiB"] * len(reach)
    assert [(one.ok, one.detail) for one in listed if one.name == "peer access"] == shown


@pytest.mark.parametrize("kernel, major, package", [
    ("flash_attn_4", 9, "flash-attn-4"), ("flash_attn_4", 8, ""), ("flash_attn_2", 8, "flash-attn"),
    ("flash_attn_2", 9, ""), ("torch_varlen", 8, ""),
])  # fmt: skip
def test_the_fastest_kernel_of_a_gpu_can_be_installed(monkeypatch, kernel: str, major: int, package: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr("deepspeed_cad.kernels.registry.try_all", lambda device: [(kernel, False, "not installed")])
    assert doctor.try_kernels()[0].remedy.split(" ")[-1] == package


@pytest.mark.slow
def test_the_doctor_on_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed_cad.cli", "doctor", "--json"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads(done.stdout)
    assert read["core_works"] and {found["name"] for found in read["transports"]} == set(NAMES)
    (c10d,) = (found for found in read["transports"] if found["name"] == "c10d")
    assert c10d["ok"] and re.search(r"on the CPU at [\d.e+]+ GB/s$", c10d["detail"])
    assert any(found["ok"] for found in read["kernels"])


def test_serve_says_what_it_waits_for(monkeypatch, capsys) -> None:
    said = []

    def take_place(rendezvous, timeout):
        said.append(capsys.readouterr().err)
        return Split(2, 1, 2, rendezvous), CADConfig()

    monkeypatch.setattr(meeting, "take_place", take_place)
    monkeypatch.setattr(process, "serve", lambda *args: said.append(capsys.readouterr().err) or 0)
    assert cli.main(["serve", "--rendezvous", "10.0.0.1:29500", "--device", "cuda:9"]) == 2 and not said
    assert "there is no device 'cuda:9' here" in capsys.readouterr().err, "before it takes a place"
    assert cli.main(["serve", "--rendezvous", "10.0.0.1:29500", "--timeout", "40"]) == 0
    assert "waits at most 40 s for a training at 10.0.0.1:29500" in said[0]
    assert "server 2 has found the training at 10.0.0.1:29500 and waits for its 2 trainers" in said[1]
