"""The console script: its subcommands, its exit codes, and what the doctor finds."""

import argparse
import json
import logging
import os
import re
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
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
from deepspeed_cad.planner.question import KEYS
from deepspeed_cad.server import meeting, process
from deepspeed_cad.server.launch import Split
from deepspeed_cad.version import OLDEST, __version__

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
    assert name != "plan" or all(f"\n  {key:18} {text}\n" in shown for key, text in KEYS.items())
    import_module(f"deepspeed_cad.cli.{name}").add_arguments(parser := argparse.ArgumentParser())
    names = "option_strings nargs const default type choices metavar".split()
    taken = {one.dest: [getattr(one, key) for key in names] for one in parser._actions if one.dest != "help"}
    taken = {key: [getattr(one, "__name__", str(one)) for one in facts] for key, facts in taken.items()}
    assert taken == json.loads(Path(__file__).with_name("options.json").read_text())[name]


@pytest.mark.parametrize("size", [30, 30000])
def test_a_reader_that_has_gone_ends_the_command_without_a_word(size: int, monkeypatch) -> None:
    """Before all is written, or while the last of it waits to be written."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    found = f"dict.fromkeys(doctor.PROBES, [doctor.Finding('x' * {size}, True, '')])"
    script = f"import sys; from deepspeed_cad.cli import doctor, main; doctor.examine = lambda: {found}; "
    script += "sys.exit(10 + main(['doctor']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (11, "")


def test_an_error_of_ours_and_the_version_are_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "examine", mock.Mock(side_effect=CADDataError("document 3 has no end")))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "deepspeed-cad doctor: document 3 has no end\n"
    with pytest.raises(SystemExit, match="^0$"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"deepspeed_cad {__version__}\n"


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


@pytest.mark.parametrize("section, name", [
    ("packages", "torch"), ("packages", "native library"), ("kernels", "torch_math"), ("transports", "c10d"),
])  # fmt: skip
def test_exit_code_where_the_core_does_not_work(monkeypatch, section: str, name: str, capsys) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: WORKS | {section: [Finding(name, False, "no", "get it")]})
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


SAYS = "print('x' * (1 << 17)), print(rank, 'of', name, 'at', os.environ['OMP_NUM_THREADS'], 'GB/s')"
FAILS = "sys.exit('why\\nthat is why' if rank == '1' else 0)"


@pytest.mark.parametrize("gpus, name, trial, ok, said", [
    (1, "c10d", SAYS, True, "two processes exchanged slices on the CPU at 0 of c10d at 1 GB/s"),
    (2, "nccl", SAYS, True, "two processes exchanged slices on GPUs at 0 of nccl at 1 GB/s"),
    (2, "nccl", FAILS, False, "rank 1 of two processes failed: that is why"),
    (1, "c10d", "time.sleep(99)", False, "two processes on this machine did not exchange anything within 0.1 s"),
    (1, "nccl", FAILS, True, "NCCL; not tried, because this process sees one GPU"),
    (1, "mixed", FAILS, False, "NCCL"), (2, "mixed", FAILS, False, "NCCL"),
])  # fmt: skip
def test_transports_are_tried_in_two_processes(
    monkeypatch, gpus: int, name: str, trial: str, ok: bool, said: str
) -> None:
    """They write more than a pipe holds. Of what they say the last line counts."""
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **how: started.append(popen(*words, **how)) or started[-1])
    monkeypatch.setattr("deepspeed_cad.exchange.probe.probe", lambda name: (name != "mixed", "NCCL"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(doctor, "_EXCHANGE", f"import os, sys, time; name, rank, store = sys.argv[1:]; {trial}")
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.1 if "sleep" in trial else 120)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert doctor._try_transport(name) == [Finding(name, ok, said)]
    assert len(started) in (0, 2) and all(one.returncode is not None for one in started)


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
    assert [(one.ok, one.detail) for one in gpus] == [(True, "some GPU, 9.0, 140 GiB")] * len(reach)
    assert [(one.ok, one.detail) for one in listed if one.name == "peer access"] == shown


@pytest.mark.parametrize("kernel, major, package", [
    ("flash_attn_4", 9, "flash-attn-4"), ("flash_attn_4", 8, ""), ("flash_attn_2", 8, "flash-attn"),
    ("flash_attn_2", 9, ""), ("torch_varlen", 8, ""), ("flash_attn_4", 0, ""), ("flash_attn_2", 0, ""),
])  # fmt: skip
def test_the_fastest_kernel_of_a_gpu_can_be_installed(monkeypatch, kernel: str, major: int, package: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: major > 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(
        "deepspeed_cad.kernels.registry.try_all", lambda device: [(kernel, ok, device) for ok in (0, 1)]
    )
    found = [(one.detail.type, one.remedy.split(" ")[-1]) for one in doctor.try_kernels()]
    assert found == [("cuda" if major else "cpu", one) for one in (package, "")]


@pytest.mark.slow
def test_the_doctor_on_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed_cad.cli", "doctor", "--json"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads(done.stdout)
    assert read["core_works"] and {found["name"] for found in read["transports"]} == set(NAMES)
    (c10d,) = (found for found in read["transports"] if found["name"] == "c10d")
    speed = re.search(r"on the CPU at ([\d.e+]+) GB/s$", c10d["detail"])
    assert c10d["ok"] and speed and 1e-3 < float(speed[1]) < 1e3
    assert any(found["ok"] for found in read["kernels"])


def test_serve_says_what_it_waits_for(monkeypatch, capsys) -> None:
    said, given = [], []

    def take_place(rendezvous, timeout):
        said.append(capsys.readouterr().err)
        return Split(2, 1, 2, rendezvous), CADConfig()

    monkeypatch.setattr(meeting, "take_place", take_place)
    monkeypatch.setattr(process, "serve", lambda *args: given.extend(args) or said.append(capsys.readouterr().err) or 7)
    for place in ("10.0.0.1", "10.0.0.1:", ":29500", "29500"):
        assert cli.main(["serve", "--rendezvous", place]) == 2 and not said
        assert f"--rendezvous is '{place}'; expected HOST:PORT" in capsys.readouterr().err
    assert cli.main(["serve", "--rendezvous", "10.0.0.1:29500", "--device", "cuda:9"]) == 2 and not said
    assert "there is no device 'cuda:9' here" in capsys.readouterr().err, "before it takes a place"
    assert cli.main(["serve", "--rendezvous", "10.0.0.1:29500", "--timeout", "40", "--device", "cpu"]) == 7
    assert (given[0].rank, *given[1:]) == (2, CADConfig(), torch.device("cpu"))
    assert "waits at most 40 s for a training at 10.0.0.1:29500" in said[0]
    assert "server 2 has found the training at 10.0.0.1:29500 and waits for its 2 trainers" in said[1]
