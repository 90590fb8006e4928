"""The console script: its subcommands, its exit codes, and what the doctor finds."""

import json
import logging
import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import hypothesis
import pytest
import torch

from deepspeed_cad import cli, native
from deepspeed_cad.cli import doctor
from deepspeed_cad.cli.doctor import Finding
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADDataError
from deepspeed_cad.exchange.probe import NAMES
from deepspeed_cad.server import meeting, process
from deepspeed_cad.server.launch import Split
from deepspeed_cad.version import OLDEST

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


def test_a_probe_that_fails_is_a_finding_and_warnings_are_left_to_the_report(monkeypatch) -> None:
    warns, heard = partial(logging.getLogger("deepspeed_cad").isEnabledFor, logging.WARNING), []
    fails = mock.Mock(side_effect=OSError("first line\nsecond line"))
    monkeypatch.setattr(doctor, "PROBES", {"one": fails, "two": lambda: heard.append(warns()) or WORKS["devices"]})
    assert doctor.examine() == {"one": [Finding("one", False, "OSError: first line")], "two": WORKS["devices"]}
    assert heard == [False] and warns() and doctor._last_line(" \n") == "no message"


def test_packages_that_are_missing_or_old_come_with_a_remedy(monkeypatch) -> None:
    assert set(OLDEST) <= set(doctor.PACKAGES)
    monkeypatch.setattr(doctor, "PACKAGES", {"no_such": "get it", "numpy": "build it", "pytest": "", "hypothesis": ""})
    monkeypatch.setitem(OLDEST, "pytest", "999.1")
    monkeypatch.setattr(doctor, "import_module", mock.Mock(side_effect=OSError("no BLAS")))
    monkeypatch.setattr(native, "why_missing", lambda: "no library. To get it: make it.")
    old = f"{pytest.__version__}, but 999.1 or newer is needed", "pip install --upgrade 'pytest>=999.1'"
    assert doctor.try_packages() == [
        Finding("no_such", False, "not installed", "get it"),
        Finding("numpy", False, "cannot be imported: no BLAS", "build it"), Finding("pytest", False, *old),
        Finding("hypothesis", True, hypothesis.__version__),
        Finding("native library", False, "no library", native.REBUILD),
    ]  # fmt: skip


def test_autoload_is_tried_in_another_python(monkeypatch) -> None:
    monkeypatch.delenv("DEEPSPEED_CAD_AUTOLOAD", raising=False)
    works = Finding("autoload", True, 'active: a "cad" block in the DeepSpeed JSON is enough')
    assert doctor.try_autoload() == [works]
    for code, out, said in (0, "False\n", "not active"), (1, "True\n", "importing deepspeed fails: no such module"):
        done = SimpleNamespace(returncode=code, stdout=out, stderr="Traceback\nno such module\n")
        monkeypatch.setattr(doctor.subprocess, "run", lambda *_, done=done, **given: done)
        (found,) = doctor.try_autoload()
        assert found.detail.startswith(said) and not found.ok and found.remedy.startswith("pip install deepspeed_cad")
    monkeypatch.setenv("DEEPSPEED_CAD_AUTOLOAD", "0")
    assert "turned off" in doctor.try_autoload()[0].detail


def test_transports_are_tried_between_two_processes(monkeypatch) -> None:
    processes = [mock.Mock(returncode=0), mock.Mock()]
    for rank, one in enumerate(processes):
        one.communicate.return_value = f"so\n{3 + rank} GB/s", f"why\nthat is why {rank} failed"
    monkeypatch.setattr(doctor.subprocess, "Popen", lambda words, **given: processes[int(words[-2])])
    monkeypatch.setattr("deepspeed_cad.exchange.probe.probe", lambda name: (name != "mixed", "NCCL"))
    for gpus, name, code, said in (
        (1, "c10d", 0, "two processes exchanged slices on the CPU at 3 GB/s"),
        (2, "nccl", 0, "two processes exchanged slices on GPUs at 3 GB/s"),
        (2, "nccl", 1, "rank 1 of two processes failed: that is why 1 failed"),
        (1, "nccl", 0, "NCCL; not tried, because this process sees one GPU"), (1, "mixed", 0, "NCCL"),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        processes[1].returncode = code
        assert doctor._try_transport(name) == [Finding(name, not code and name != "mixed", said)]
    processes[1].communicate.side_effect = subprocess.TimeoutExpired("python", 1)
    late = "two processes on this machine did not exchange anything within 120 s"
    assert doctor._try_transport("c10d") == [Finding("c10d", False, late)]
    assert all(one.kill.call_count == one.wait.call_count == 4 for one in processes)
    processes[1].communicate.assert_called_with(timeout=120)


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
    assert first == Finding("GPUs", True, f"{len(reach)} × CUDA {torch.version.cuda}")
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
    monkeypatch.setattr(
        "deepspeed_cad.kernels.registry.try_all", lambda device: [(kernel, ok, device) for ok in (0, 1)]
    )
    found = [(one.detail.type, one.remedy.split(" ")[-1]) for one in doctor.try_kernels()]
    assert found == [("cuda", package), ("cuda", "")]


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
