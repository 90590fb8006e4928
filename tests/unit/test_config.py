"""The "cad" block: defaults, round trips, and one clear error for everything that is not allowed."""

import json
import math

import pytest

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError

ALLOWED = [
    ("enabled", False), ("servers", {"reserved": 2}), ("servers", {"reserved_per_node": 1}), ("servers", {"joined": 3}),
    ("servers", {"ranks": [0, 2]}), ("tolerance", 0.99), ("granularity", 1),
    ("overlap", "interleave"), ("transport", "nvlink"), ("kernel", "flash_attn_4"), ("recompute_attention", True),
    ("keep", "host"), ("cost", "profiles/mine.json"), ("links", {"inside": 300, "between": 0.0125}),
    ("speeds", "measure"), ("waves", 1), ("waves", 8), ("memory", 0.25), ("documents", "in_order"),
    ("forward_only", "balanced"), ("look_ahead", 0), ("timeout_s", 0.5), ("timeout_s", 1e7), ("trace", "file"),
    ("check", "off"), ("verify", 3),
]  # fmt: skip


def test_what_is_allowed_makes_a_round_trip_and_another_fingerprint() -> None:
    configs = [CADConfig.from_dict({key: value}) for key, value in ALLOWED]
    for config, (key, value) in zip(configs, ALLOWED):
        assert getattr(config, key) == value
        assert CADConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    prints = {one.fingerprint() for one in (CADConfig(), *configs)}
    assert len(prints) == len(ALLOWED) + 1 and {*map(len, prints)} == {16}
    whole = CADConfig(timeout_s=300, memory=2, links={"between": 5, "inside": 300})
    assert whole.fingerprint() == CADConfig(memory=2.0, links={"inside": 300.0, "between": 5.0}).fingerprint()


REFUSED = [
    ("enabled", "yes", "true or false"), ("servers", "2", '{"reserved": n}'),
    ("servers", {"reserved": 0}, "n of 1 or more"), ("servers", {"ranks": []}, "ranks that differ"),
    ("servers", {"ranks": [3, 3]}, "ranks that differ"), ("servers", {"reserved": 1, "joined": 1}, '{"joined": n}'),
    ("servers", {"ranks": [-1]}, "ranks that differ"), ("waves", 0, "from 1 to 8"), ("waves", 9, "from 1 to 8"),
    ("memory", 0, "GiB above 0"), ("memory", 10**400, "GiB above 0"), ("memory", "4 GiB", "GiB above 0"),
    ("tolerance", 0, "between 0 and 1"), ("tolerance", 1, "both excluded"), ("tolerance", math.nan, "between 0 and 1"),
    ("tolerance", True, "between 0 and 1"), ("tolerance", "auto", 'no "auto"'), ("granularity", 128.0, "whole number"),
    ("granularity", 0, "1 or more"), ("overlap", "ping-pong", '"auto" or "local_first" or "interleave" or "none"'),
    ("links", {"inside": 300}, 'with the keys "inside" and "between" in GB/s above 0'),
    ("links", {"inside": 300, "between": 0}, "above 0"), ("links", {"inside": True, "between": 5}, "above 0"),
    ("kernel", "Flash Attention", "deepspeed-cad doctor"), ("cost", "pair", "ends in .json"),
    ("speeds", "auto", 'null or "measure"'), ("look_ahead", 2, "0 or 1"),
    ("timeout_s", 0, "above 0"), ("timeout_s", 1e7 + 1, "to 1e7"), ("trace", None, "write"), ("trace", ".", "write"),
    ("verify", -1, "0 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "says"), REFUSED)
def test_refused_values_name_key_value_and_what_is_allowed(key: str, value: object, says: str) -> None:
    with pytest.raises(CADConfigError) as caught:
        CADConfig.from_dict({key: value})
    message = str(caught.value)
    assert f'key "{key}" is {json.dumps(value)}; allowed: ' in message and says in message and "(default " in message


CONTINUE = {"on_server_failure": "continue", "servers": {"reserved": 1}}


@pytest.mark.parametrize("block, says", [
    ({"tolerence": 1}, r'unknown key "tolerence"; did you mean "tolerance"\? Known keys: enabled, servers, '),
    ({"zzz": 1}, 'unknown key "zzz"; Known keys: '),
    ({"trace": {1}}, r'key "trace" is "\{1\}"'),
    ("auto", '"cad" is "auto"; expected an object'),
    (None, '"cad" is null; expected an object'),
    # Keys that exclude each other.
    ({"on_server_failure": "continue"}, 'key "on_server_failure" is .*every rank trains'),
    ({**CONTINUE, "transport": "mixed"}, 'key "transport" is .*cannot go on without a rank'),
    ({**CONTINUE, "recompute_attention": True}, 'key "recompute_attention" is .*other servers'),
    ({**CONTINUE, "keep": "host"}, 'key "keep" is .*may run again'),
    ({"keep": "host", "recompute_attention": True}, 'key "keep" is .*keeps nothing'),
    ({"documents": "deal", "look_ahead": 0}, 'key "look_ahead" is .*before its first forward'),
])  # fmt: skip
def test_blocks_that_are_refused(block: object, says: str) -> None:
    with pytest.raises(CADConfigError, match=says):
        CADConfig.from_dict(block)


def test_load(tmp_path) -> None:
    file = tmp_path / "cad.json"
    for text, expected in (('{"verify": 1}', 1), ('{"train_batch_size": 4, "cad": {"verify": 2}}', 2)):
        file.write_text(text)
        assert CADConfig.load(file).verify == expected
    for text, words in (('{"cad": "auto"}', '"cad" is "auto"'), ("{", "is not JSON")):
        file.write_text(text)
        with pytest.raises(CADConfigError, match=words):
            CADConfig.load(str(file))
    with pytest.raises(CADConfigError, match="cannot be read"):
        CADConfig.load(tmp_path / "nothing.json")


@pytest.mark.parametrize("block, used", [
    ({}, "local_first"),
    ({"servers": {"reserved": 1}}, "interleave"),
    ({"servers": {"reserved": 1}, "overlap": "none"}, "none"),
])  # fmt: skip
def test_what_auto_overlaps_with(block: dict, used: str) -> None:
    assert CADConfig.from_dict(block).overlap_used == used
