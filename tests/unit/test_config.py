"""The "cad" block: defaults, round trips, and one clear error for everything that is not allowed."""

import json
from pathlib import Path

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


REFUSED = json.loads(Path(__file__).with_name("refusals.json").read_text())


@pytest.mark.parametrize(("block", "says"), REFUSED)
def test_what_is_refused_is_said_in_words_that_change_on_purpose(block: dict, says: str) -> None:
    """The key, its value, what is allowed and the default; or which keys exclude each other, and why."""
    with pytest.raises(CADConfigError) as caught:
        CADConfig.from_dict(block)
    assert str(caught.value) == says


@pytest.mark.parametrize("block, says", [
    ({"tolerence": 1}, r'unknown key "tolerence"; did you mean "tolerance"\? Known keys: enabled, servers, '),
    ({"zzz": 1}, 'unknown key "zzz"; Known keys: '),
    ({"trace": {1}}, r'key "trace" is "\{1\}"'),
    ("auto", '"cad" is "auto"; expected an object'),
    (None, '"cad" is null; expected an object'),
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


def test_what_auto_overlaps_with() -> None:
    blocks: list[dict] = [{}, {"servers": {"reserved": 1}}, {"servers": {"reserved": 1}, "overlap": "none"}]
    assert [CADConfig.from_dict(one).overlap_used for one in blocks] == ["local_first", "interleave", "none"]
