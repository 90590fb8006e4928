"""A "cad" block of a DeepSpeed JSON in the wrong place, or one that Accelerate would refuse in words of its own."""

import base64
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("accelerate")

from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from deepspeed_cad.integrations.deepspeed.block import ABSENT, block_of, read_config, write_statistics
from deepspeed_cad.integrations.deepspeed.initialize import find_replica

from deepspeed_cad.errors import CADConfigError, CADUnsupportedError
from deepspeed_cad.launch import deepspeed_hook

KEYS = ("CAD", "cad_config", "cadConfig", "deepspeed_cad", "Cad ")


@pytest.mark.parametrize("config, words", [
    ({"zero_optimization": {"stage": 2, "cad": {}}}, 'has "cad" inside "zero_optimization".*top level'),
    ({"optimizer": {"params": {"lr": 1, "cad": {"tolerance": 0.1}}}}, 'has "cad" inside "optimizer.params".*top level'),
    ({"cad": {}, "bf16": {"enabled": True, "cad": {}}}, 'has "cad" inside "bf16".*top level'),
    *(({**beside, key: {}}, f'has "{key}" at its top level') for key in KEYS for beside in ({}, {"cad": {}})),
])  # fmt: skip
def test_a_block_in_the_wrong_place_or_under_another_key_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CADConfigError, match=words):
        block_of(config)
    assert all(block_of({other: {}}) is ABSENT for other in ("cadence", "cascade", "checkpoint", "aio"))


@pytest.mark.parametrize("text, found", [
    ('{"a": {"b": 1}}', {"a": {"b": 1}}), ('{"a": 1, # why\n}', {"a": 1}), ('{"a"', {}), ("[1]", {}),
])  # fmt: skip
def test_a_config_is_read_as_deepspeed_reads_it(text: str, found: dict[str, Any], tmp_path: Path) -> None:
    """Of a path, or of base64, with comments; what cannot be read is left to DeepSpeed."""
    (path := tmp_path / "ds.json").write_text(text)
    for given in (path, str(path), base64.urlsafe_b64encode(text.encode()).decode()):
        assert read_config(given) == found
    assert read_config(tmp_path / "none") == read_config("?") == read_config(None) == {}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate's reader of the JSON as the installed hook leaves it, whatever this process imported before."""
    monkeypatch.setattr(HfDeepSpeedConfig, "__init__", HfDeepSpeedConfig.__init__)  # put back after the test
    deepspeed_hook.after_import(sys.modules["accelerate.utils.deepspeed"])
    yield


@pytest.mark.parametrize("block, words", [
    ({"cad": {"tolerance": "auto"}}, 'key "tolerance" is "auto".*leave "tolerance" out'),
    ({"cad": {"tolerence": 0.1}}, 'did you mean "tolerance"'),
    ({"zero_optimization": {"stage": 2, "cad": {}}}, 'has "cad" inside "zero_optimization"'),
])  # fmt: skip
def test_our_message_comes_before_that_of_accelerate(watched, tmp_path: Path, block: dict, words: str) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(block))
    for given in (block, str(tmp_path / "ds.json")):
        with pytest.raises(CADConfigError, match=words):
            DeepSpeedPlugin(hf_ds_config=given)


def test_auto_that_cad_knows_does_not_reach_accelerate(watched) -> None:
    given = {"cad": {"overlap": "auto", "tolerance": 0.1}, "zero_optimization": {"stage": 1}}
    plugin = DeepSpeedPlugin(hf_ds_config=given)
    plugin.deepspeed_config_process(must_match=False)
    assert plugin.deepspeed_config["cad"] == {"tolerance": 0.1}
    assert given["cad"] == {"overlap": "auto", "tolerance": 0.1}


def test_ds_report_ends_with_our_line(monkeypatch: Any, capsys: Any, caplog: Any) -> None:
    report: Any = ModuleType("deepspeed.env_report")
    report.main = lambda hide_operator_status: print("the report") or hide_operator_status
    monkeypatch.setattr("deepspeed_cad.cli.doctor.examine", lambda: "found")
    monkeypatch.setattr("deepspeed_cad.cli.doctor.summarise", lambda found: f"we {found} it")
    for module in (report, report, ModuleType("deepspeed")):
        deepspeed_hook.after_import(module)
    assert report.main(hide_operator_status=7) == 7 and capsys.readouterr().out == "the report\nwe found it\n"
    assert [one[:44] for one in caplog.messages] == ["deepspeed has no 'initialize' to attach deep"]


def engine_of(autotp: int = 1, pieces: int = 1, **sizes: int) -> Any:
    """An engine whose mpu says so many ranks of each kind."""
    mpu = SimpleNamespace(**{f"get_{kind}_world_size": partial(int, size) for kind, size in sizes.items()})
    return SimpleNamespace(mpu=mpu, sequence_parallel_size=pieces, autotp_size=lambda: autotp)


@pytest.mark.parametrize("engine, words", [
    (engine_of(pipeline_model_parallel=2), "mpu .* has pipeline stages"),
    (engine_of(pipeline_parallel=2, tensor_model_parallel=2), "mpu .* has pipeline stages"),
    (engine_of(autotp=2, pieces=2), "divided twice"),
    (engine_of(tensor_model_parallel=2, pieces=2), "divided twice"),
])  # fmt: skip
def test_an_engine_that_divides_otherwise_is_refused(engine: Any, words: str) -> None:
    with pytest.raises(CADUnsupportedError, match=words):
        find_replica(engine)


@pytest.mark.parametrize("rank, on, written", [(0, True, 1), (1, True, 0), (0, False, 0)])
def test_rank_0_writes_what_happened_where_a_monitor_is_on(rank: int, on: bool, written: int) -> None:
    engine, session = mock.Mock(global_rank=rank, global_samples=8), mock.Mock()
    engine.monitor.enabled = on
    session.take_statistics.return_value.as_events.return_value = {"cad/x": 2.0}
    write_statistics(engine, session)
    assert engine.monitor.write_events.call_args_list == [mock.call([("Train/cad/x", 2.0, 8)])] * written
