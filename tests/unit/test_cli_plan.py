"""`deepspeed-cad plan`: the files it reads and writes, what it says of bad input, and what a data set would gain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspeed_cad import profiles
from deepspeed_cad.cli import main
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner.checks import check_coverage
from deepspeed_cad.planner.question import read_question

GOOD: dict[str, Any] = {
    "documents": [30000, 0, 500, 20000, 15000],
    "tokens_per_rank": 16384,
    "ranks": 4,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 16,
    "bytes_per_element": 2,
    "window": None,
    "cost": "pairs",
    "tolerance": 0.02,
}


def run(tmp_path: Path, fields: Any, *more: str) -> tuple[int, dict[str, Any]]:
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(json.dumps(fields))
    code = main(["plan", str(source), "--output", str(target), *more])
    return code, json.loads(target.read_text()) if target.exists() else {}


def test_documents_in_plan_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(tmp_path, GOOD)
    loads = np.array(out["load"]) / np.mean(out["load"])
    said = capsys.readouterr().err
    assert code == 0 and f"-> {loads.max():.3f}, min/mean {loads.min():.3f}; moved" in said
    assert set(out) >= {"tasks", "load", "sent_bytes", "received_bytes", "planning_ms"}
    tasks = np.array(out["tasks"])
    assert 1 not in tasks[:, 0] and tasks[:, 0].max() == 4
    tasks[tasks[:, 0] > 1, 0] -= 1
    check_coverage(tasks, Layout.from_stream(GOOD["documents"], 4, 16384).tick(), 4)
    load = np.array(out["load"])
    assert load.max() <= 1.02 * load.mean() and load.min() >= 0.98 * load.mean()
    assert sum(out["sent_bytes"]) == sum(out["received_bytes"]) > 0


def test_a_plan_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.json").write_text(json.dumps(GOOD))
    assert main(["plan", str(tmp_path / "in.json"), "--output", "-"]) == 0
    assert "tasks" in json.loads(capsys.readouterr().out)
    assert main(["plan", str(tmp_path / "in.json")]) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and "max/mean" in shown.err
    assert main(["plan", str(tmp_path / "in.json"), "--output", str(tmp_path / "none" / "out.json")]) == 2
    assert "out.json cannot be written: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 0}, "heads is 0"),
        ({"tolerence": 0.1}, "did you mean 'tolerance'"),
        ({"documents": [100000]}, "do not fit"),
        ({"cost": "nothing.json"}, "cost is 'nothing.json'"),
        ({"ranks": [[1]]}, "both given"),
    ],
)
def test_bad_input_is_one_line_that_names_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
) -> None:
    code, out = run(tmp_path, GOOD | change)
    said = capsys.readouterr().err
    assert code == 2 and not out and words in said and "Traceback" not in said


def test_unreadable_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{")
    assert main(["plan", str(tmp_path / "bad.json")]) == 2
    assert "is not JSON" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "none.jsonl")]) == 2
    with pytest.raises(CADConfigError, match="holds a list"):
        read_question([])


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, _ = run(tmp_path, GOOD, "--plot", str(tmp_path / "out.png"))
    assert code == 0 and (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


def test_token_ids_as_jsonl_need_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, target = tmp_path / "data.jsonl", tmp_path / "out.json"
    lengths = [900, 10, 20, 500, 1000, 30, 40, 60, 1000, 20, 300, 700, 200, 800]
    data.write_text("".join(json.dumps({"input_ids": [1] * length}) + "\n" for length in lengths))
    words = ["plan", str(data), "--ranks", "2", "--context", "1024", "--output", str(target)]
    assert main(words) == 0
    out = json.loads(target.read_text())
    assert out["documents"] == 14 and out["tokens"] == sum(lengths) and out["gain"] > 0.9
    assert "times faster with CAD" in capsys.readouterr().err
    assert main([*words[:3], "100", *words[4:]]) == 2
    assert "do not fill one step" in capsys.readouterr().err


def test_a_cluster_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hosts and links reach the planner: the slower the link between hosts, the less moves there and is gained."""
    data, target = tmp_path / "data.jsonl", tmp_path / "out.json"
    lengths = [60000, *[3000] * 20, 50000, *[2000] * 33, *[1000] * 130]
    data.write_text("".join(json.dumps({"input_ids": [1] * length}) + "\n" for length in lengths))
    words = ["plan", str(data), "--ranks", "4", "--context", "65536", "--output", str(target), "--packing", "in_order"]
    profile = str(Path(profiles.__file__).parent / "h200_flash_attn_4.json")
    found = []
    for speed in ("100", "3", "0.001"):
        more = ["--cost", profile, "--ranks-per-node", "3,1", "--link-inside", "300", "--link-between", speed]
        assert main([*words, *more]) == 0
        found.append(json.loads(target.read_text())["steps"][0])
        said = capsys.readouterr().err
        assert "MiB moved between hosts" in said
    assert found[0]["between_bytes"] > found[1]["between_bytes"] > found[2]["between_bytes"] == 0
    assert found[0]["gain"] > found[1]["gain"] > found[2]["gain"] > 1.0
    assert found[0]["moved_bytes"] > found[2]["moved_bytes"] > 0
    for wrong, text in (
        (["--ranks-per-node", "3,2"], "hosts of 3, 2 ranks have 5; there are 4"),
        (["--ranks-per-node", "0"], "--ranks-per-node is '0'; expected a number of GPUs, or a list such as 8,8,4"),
        (["--ranks-per-node", "2,x"], "--ranks-per-node is '2,x'"),
        (["--cost", profile, "--link-between", "0"], "--link-between is 0.0; expected GB/s above 0"),
        (["--cost", profile, "--link-inside", "nan"], "--link-inside is nan"),
    ):
        assert main([*words, *wrong]) == 2
        assert text in capsys.readouterr().err


# Training steps


def foresee_steps(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["plan", *words])
    return code, capsys.readouterr().err


LENGTHS = [16384, *[1024] * 16, 8192, 8192, *[2048] * 8] * 4


@pytest.mark.parametrize("name", ["list.json", "lines.txt", "lines.jsonl", "lengths"])
def test_lengths_are_data_too(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(LENGTHS) if name == "list.json" else "\n".join(map(str, LENGTHS)) + "\n")
    code, said = foresee_steps(capsys, str(path), "--ranks", "4", "--context", "16384", "--steps", "2")
    assert code == 0 and f"{len(LENGTHS)} documents, {sum(LENGTHS)} tokens" in said
    code, said = foresee_steps(capsys, str(path), "--ranks", "2", "--context", "16384", "--limit", "20")
    assert code == 0 and "20 documents" in said


def test_a_table_of_all_modes_a_sentence_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["long-mix", "--ranks", "16", "--steps", "2", "--link-between", "25", "--json"]
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert [mode["mode"] for mode in answer["modes"]] == [
        "plain", "plain kept", "ulysses", "ulysses kept", "gathered", "gathered kept", "packed", "cad", "cad reserved"
    ]  # fmt: skip
    for mode in answer["modes"]:
        assert f"{mode['tokens_per_second_per_gpu']:,.0f}" in shown.err
    assert answer["recommendation"] in shown.err and "docs/is-it-for-me.md" in shown.err
    plain, cad = (next(mode for mode in answer["modes"] if mode["mode"] == name) for name in ("plain", "cad"))
    gains = [a / b for a, b in zip(plain["steps"], cad["steps"], strict=True)]
    assert answer["gain"] == pytest.approx(np.mean(gains)) and cad["between"] > 0
    assert "not measured yet" in shown.err
    # The default, ZeRO-3, leaves servers nothing to do beside linear layers.
    assert answer["reserve"] == 0 and "Reserve none: with " in shown.err


def test_how_many_to_reserve(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["long-mix", "--ranks", "8", "--steps", "4", "--modes", "cad,cad reserved", "--sharding", "zero1", "--json"]
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    cad, reserved = answer["modes"]
    ratio = reserved["tokens_per_second_per_gpu"] / cad["tokens_per_second_per_gpu"]
    assert answer["reserve"] == reserved["degree"] >= 1 and f"it is {ratio:.2f} times as fast as in place" in shown.err
    # Of the same documents, in more steps.
    assert reserved["tokens"] * len(reserved["steps"]) == pytest.approx(cad["tokens"] * len(cad["steps"]), rel=0.2)


def test_options_reach_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> dict[str, Any]:
        assert (
            main(["plan", "long-mix", "--ranks", "16", "--steps", "1", "--modes", "plain,cad", "--json", *words]) == 0
        )
        return {mode["mode"]: mode for mode in json.loads(capsys.readouterr().out)["modes"]}

    usual = run()
    assert run("--link-between", "1")["cad"]["step_seconds"] > usual["cad"]["step_seconds"]
    assert run("--ranks-per-node", "16")["cad"]["between"] == 0.0 < usual["cad"]["between"]
    assert run("--no-checkpointing")["plain"]["peak"] > usual["plain"]["peak"]
    assert run("--sharding", "zero1")["plain"]["peak"] > usual["plain"]["peak"]
    assert run("--memory", "10")["plain"]["capacity"] == 10 * 2**30
    assert run("--tensor", "8")["plain"]["seconds"]["collectives"] > usual["plain"]["seconds"]["collectives"]
    assert run("--model", "llama-34b")["plain"]["step_seconds"] > 2 * usual["plain"]["step_seconds"]
    assert run("--recompute-attention")["cad"]["seconds"]["attention"] > usual["cad"]["seconds"]["attention"]
    several = run("--micro-batches", "4", "--pipeline", "4")
    assert several["plain"]["tokens"] > 0 and several["cad"]["peak"] > 0


def test_servers_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["long-mix", "--ranks", "8", "--steps", "1"]
    assert "CAD, 3 reserved  " in foresee_steps(capsys, *words, "--reserve", "3")[1]
    assert "reserved *" not in foresee_steps(capsys, *words, "--reserve", "none")[1]
    assert "8 servers of 8 seats leave no" in foresee_steps(capsys, *words, "--reserve", "8")[1]


def test_pictures_of_what_is_foreseen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    words = ["long-mix", "--ranks", "4", "--steps", "1", "--context", "16384", "--modes", "plain,cad"]
    code, said = foresee_steps(capsys, *words, "--pictures", str(tmp_path / "pictures"))
    names = {"step.png", "ranks.png", "context.png", "reserved.png"}
    assert code == 0 and {path.name for path in (tmp_path / "pictures").iterdir()} == names
    assert all(f"drew {tmp_path / 'pictures' / name}" in said for name in names)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--link-between", "0"], "--link-between is 0.0; expected GB/s above 0"),
        (["--link-inside", "-3"], "--link-inside is -3.0; expected GB/s above 0"),
        (["--ranks", "6", "--tensor", "4"], "6 ranks cannot be divided into 4 tensor-parallel"),
        (["--ranks-per-node", "0"], "--ranks-per-node is '0'; expected a number of GPUs"),
        (["--ranks-per-node", "8,x"], "--ranks-per-node is '8,x'"),
        (["--micro-batches", "0"], "--micro-batches is 0; expected at least 1"),
        (["--pipeline", "5", "--ranks", "5"], "32 layers cannot be divided into 5 pipeline stages"),
        (["--memory", "0"], "--memory is 0.0; expected GiB above 0"),
        (["--machine", "b300"], "there is no machine 'b300'"),
        (["--modes", "plain,nosuch"], "--modes: there is no mode 'nosuch'"),
        (["--reserve", "some"], "--reserve is 'some'; expected"),
        (["--cost", "nosuch.json"], "nosuch.json"),
        (
            ["--ranks", "7", "--modes", "ulysses,gathered"],
            "no mode that is asked for can run on 7 GPUs: Ulysses: 32 query heads and 7 seats have no common divisor; "
            "all-gather CP: 7 seats cannot be divided by 2",
        ),
        (["--modes", "cad reserved", "--reserve", "9"], "9 servers of 8 seats leave no server or no trainer"),
        (["--ranks", "100000000"], "documents would be drawn, more than 2e+07: ask for fewer --ranks"),
        (["--output", "nosuch/x.json"], "--output: nosuch/x.json cannot be written: there is no folder nosuch"),
        (["--plot", "nosuch/x.png"], "--plot: nosuch/x.png cannot be written: there is no folder nosuch"),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    code, shown = foresee_steps(capsys, "long-mix", "--steps", "1", *words)
    assert code == 2 and said in shown and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("3\n0\n5\n", "line 2: 0; expected the tokens of a document"),
        ("3\n\n4.5\n", "line 3: '4.5'; expected"),
        ("7\n-2\n", "line 2: '-2'; expected"),
        ("[3, 4, -1]", "entry 2: -1; expected"),
        ("[3, 4", "is not a JSON list of lengths"),
        ("[3, [4]]", "entry 1: [4]; expected"),
        ("12\nabc\n", "line 2: 'abc'; expected"),
        ("length\n12\n13\n", "line 1: 'length'; expected"),
    ],
)
def test_lengths_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str) -> None:
    (tmp_path / "lengths.txt").write_text(content)
    code, shown = foresee_steps(capsys, str(tmp_path / "lengths.txt"))
    assert code == 2 and said in shown and "lengths.txt" in shown and shown.count("\n") == 1


def test_the_bound_alone_is_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = foresee_steps(capsys, "long-mix", "--ranks", "8", "--steps", "1", "--modes", "packed")
    assert code == 0 and "ask for other modes beside it" in shown


def test_memory_that_cannot_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = foresee_steps(capsys, "long-mix", "--ranks", "8", "--steps", "1", "--memory", "20")
    assert code == 0 and "plain does not fit" in shown and "it would fit with rows of at most" in shown
    code, shown = foresee_steps(capsys, "long-mix", "--ranks", "8", "--steps", "1", "--memory", "5")
    assert code == 0 and "Nothing fits" in shown and "more GPUs that share the weights" in shown
