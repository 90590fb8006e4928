"""The "cad" block: defaults, round trips, and one clear error for everything that is not allowed."""

import dataclasses
import json
import math

import pytest

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError

NAMES = [field.name for field in dataclasses.fields(CADConfig)]


ALLOWED = [
    ("enabled", False),
    ("servers", "all"),
    ("servers", {"reserved": 2}),
    ("servers", {"reserved_per_node": 1}),
    ("servers", {"joined": 3}),
    ("trainers_serve", False),
    ("tolerance", 0.99),
    ("granularity", 1),
    ("overlap", "local_first"),
    ("overlap", "interleave"),
    ("transport", "nvlink"),
    ("kernel", "flash_attn_4"),
    ("recompute_attention", True),
    ("keep", "host"),
    ("cost", "profiles/mine.json"),
    ("links", {"inside": 300, "between": 0.0125}),
    ("waves", 4),
    ("memory", 0.25),
    ("documents", "auto"),
    ("look_ahead", 0),
    ("timeout_s", 0.5),
    ("check", "off"),
    ("verify", 3),
]


@pytest.mark.parametrize(("key", "value"), ALLOWED)
def test_allowed_values(key: str, value: object) -> None:
    config = CADConfig.from_dict({key: value})
    assert getattr(config, key) == value
    assert CADConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


REFUSED = [
    ("enabled", "yes", "true or false"),
    ("enabled", None, "true or false"),
    ("servers", "2", '{"reserved": n}'),
    ("servers", {"reserved": 0}, "n of 1 or more"),
    ("servers", {"ranks": []}, "ranks that differ"),
    ("servers", {"ranks": [3, 3]}, "ranks that differ"),
    ("servers", {"reserved": 1, "joined": 1}, '{"joined": n}'),
    ("trainers_serve", 1, "true or false"),
    ("waves", 0, "from 1 to 8"),
    ("memory", 0, "GiB above 0"),
    ("memory", "4 GiB", "GiB above 0"),
    ("tolerance", 1, "between 0 and 1"),
    ("tolerance", math.nan, "between 0 and 1"),
    ("tolerance", True, "between 0 and 1"),
    ("tolerance", "auto", 'no "auto"'),
    ("granularity", 0, "whole number"),
    ("granularity", 128.0, "whole number"),
    ("granularity", "auto", 'no "auto"'),
    ("overlap", "ping-pong", '"auto" or "local_first" or "interleave" or "pingpong" or "none"'),
    ("links", "fast", '"measure", or an object'),
    ("links", "auto", 'no "auto"'),
    ("links", {"inside": 300}, 'key "between" is missing'),
    ("links", {"inside": 300, "between": 0}, 'key "between" is 0; expected GB/s above 0'),
    ("links", {"inside": True, "between": 5}, 'key "inside" is true'),
    ("links", {"inside": 300, "between": 5, "outside": 1}, '"outside" is not known'),
    ("transport", "gloo", '"c10d"'),
    ("kernel", "Flash Attention", "deepspeed-cad doctor"),
    ("recompute_attention", "false", "true or false"),
    ("recompute_attention", "auto", 'no "auto"'),
    ("cost", "pair", "ends in .json"),
    ("documents", "swap", '"auto" or "deal" or "keep" or "in_order"'),
    ("look_ahead", 2, "0 or 1"),
    ("timeout_s", 0, "above 0"),
    ("timeout_s", "60", "above 0"),
    ("check", True, '"sampled" or "off"'),
    ("verify", -1, "0 or more"),
]


@pytest.mark.parametrize(("key", "value", "says"), REFUSED)
def test_refused_values_name_key_value_and_what_is_allowed(key: str, value: object, says: str) -> None:
    with pytest.raises(CADConfigError) as caught:
        CADConfig.from_dict({key: value})
    message = str(caught.value)
    assert f'"{key}"' in message and json.dumps(value) in message and says in message
    assert "default" in message


@pytest.mark.parametrize(
    ("key", "close"),
    [("tolerence", "tolerance"), ("timeout", "timeout_s"), ("kernels", "kernel"), ("look-ahead", "look_ahead")],
)
def test_typos_name_the_closest_key(key: str, close: str) -> None:
    with pytest.raises(CADConfigError, match=f'unknown key "{key}"; did you mean "{close}"'):
        CADConfig.from_dict({key: 1})


def test_unknown_keys_list_the_known_ones() -> None:
    with pytest.raises(CADConfigError) as caught:
        CADConfig.from_dict({"zzz": 1})
    assert "did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in NAMES)


@pytest.mark.parametrize("block", ["auto", True, None, [], 3])
def test_the_block_must_be_an_object(block: object) -> None:
    with pytest.raises(CADConfigError) as caught:
        CADConfig.from_dict(block)
    assert json.dumps(block) in str(caught.value) and "expected an object" in str(caught.value)


def test_fingerprints() -> None:
    plain = CADConfig()
    assert plain.fingerprint() == CADConfig.from_dict({"tolerance": 0.05}).fingerprint()
    assert CADConfig(timeout_s=5).fingerprint() == CADConfig(timeout_s=5.0).fingerprint()
    others = {CADConfig.from_dict({key: value}).fingerprint() for key, value in ALLOWED}
    changed = {json.dumps([key, value]) for key, value in ALLOWED if getattr(plain, key) != value}
    assert len(others - {plain.fingerprint()}) == len(changed)


def test_load(tmp_path) -> None:
    file = tmp_path / "cad.json"
    file.write_text('{"tolerance": 0.1}')
    assert CADConfig.load(file).tolerance == 0.1
    file.write_text('{"train_batch_size": 4, "cad": {"granularity": 64}}')
    assert CADConfig.load(str(file)).granularity == 64
    file.write_text('{"cad": "auto"}')
    with pytest.raises(CADConfigError, match='"cad" is "auto"'):
        CADConfig.load(file)
    file.write_text("{")
    with pytest.raises(CADConfigError, match="is not JSON"):
        CADConfig.load(file)
    with pytest.raises(CADConfigError, match="cannot be read"):
        CADConfig.load(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("overlap", "servers", "used"),
    [
        ("auto", "all", "local_first"),
        ("auto", {"reserved": 1}, "interleave"),
        ("local_first", {"reserved": 1}, "local_first"),
        ("interleave", "all", "interleave"),
        ("none", "all", "none"),
    ],
)
def test_what_auto_overlaps_with(overlap: str, servers: object, used: str) -> None:
    config = CADConfig(overlap=overlap)
    object.__setattr__(config, "servers", servers)
    assert config.overlap_used == used


def test_parked_and_recomputed_attention_exclude_each_other() -> None:
    with pytest.raises(CADConfigError, match='key "keep" is "host".*"recompute_attention": true attention keeps noth'):
        CADConfig.from_dict({"keep": "host", "recompute_attention": True})


@pytest.mark.parametrize(
    ("block", "key", "says"),
    [
        ({}, "on_server_failure", "every rank trains"),
        ({"servers": {"reserved": 1}, "transport": "mixed"}, "transport", "cannot go on without a rank"),
        ({"servers": {"reserved": 1}, "recompute_attention": True}, "recompute_attention", "other servers"),
        ({"servers": {"reserved": 1}, "keep": "host"}, "keep", "may run again"),
    ],
)
def test_what_going_on_without_a_server_refuses(block: dict, key: str, says: str) -> None:
    with pytest.raises(CADConfigError, match=says) as caught:
        CADConfig.from_dict({"on_server_failure": "continue", **block})
    assert f'"{key}"' in str(caught.value)


@pytest.mark.parametrize("speeds", ["auto", "fast", 0, [1.0, 2.0], {"a": 1}])
def test_speeds_that_are_none(speeds: object) -> None:
    with pytest.raises(CADConfigError, match='key "speeds"'):
        CADConfig.from_dict({"speeds": speeds})
