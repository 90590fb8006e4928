"""A request for CAD: what is asked for, by whom, and how the processes of a run learn of it.

In: the environment variable DEEPSPEED_CAD_CONFIG: the "cad" block as JSON, or {"cad": block, "asked_by": words}. Out: a
`Request`, and one error where two requests differ. What a request does in a process: `deepspeed_cad.launch.armed`.
"""

import json
import os
from dataclasses import dataclass
from typing import Any

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError

VARIABLE = "DEEPSPEED_CAD_CONFIG"


@dataclass(frozen=True)
class Request:
    config: CADConfig
    asked_by: str
    split: dict[str, Any] | None = None
    """Where other ranks only serve: this process's numbers (server.launch.Split)."""

    def publish(self) -> None:
        """Put it into the environment, for the processes that this one starts."""
        # Without blanks where possible: launchers of several hosts may not pass on a variable that holds one.
        text: dict[str, Any] = {"cad": self.config.to_dict(), "asked_by": self.asked_by}
        if self.split is not None:
            text["split"] = self.split
        os.environ[VARIABLE] = json.dumps(text, separators=(",", ":"))


def read_environment() -> Request | None:
    """The request of the environment. Raises CADConfigError where it is not a "cad" block."""
    if not (text := os.environ.get(VARIABLE, "")):
        return None
    try:
        block = json.loads(text)
    except ValueError as error:
        raise CADConfigError(
            f"{VARIABLE} in the environment is {text!r}, which is not JSON: {error}. "
            f'Write the "cad" block, such as {VARIABLE}=\'{{"tolerance": 0.05}}\''
        ) from error
    asked_by, split = VARIABLE, None
    if isinstance(block, dict) and "cad" in block:
        asked_by, split = str(block.get("asked_by", VARIABLE)), block.get("split")
        block = block["cad"]
    return Request(CADConfig.from_dict(block), asked_by, split)


def settle_request(config: CADConfig | dict[str, Any] | None, source: str) -> CADConfig:
    """What a script's call asks for, which may not differ from what its launcher does; None: that, else defaults."""
    request = read_environment()
    if config is None:
        return CADConfig() if request is None else request.config
    checked = config if isinstance(config, CADConfig) else CADConfig.from_dict(config)
    if request is not None:
        agree(request.config, request.asked_by, checked, source)
    return checked


def agree(first: CADConfig, first_source: str, second: CADConfig, second_source: str) -> None:
    """Raise CADConfigError, naming the keys, where two sources ask for different things."""
    ours, theirs = first.to_dict(), second.to_dict()
    if different := [f"{key}: {ours[key]!r} and {theirs[key]!r}" for key in ours if ours[key] != theirs[key]]:
        raise CADConfigError(
            f"CAD is configured twice, differently: {first_source} and {second_source} disagree in "
            f"{'; '.join(different)}. Configure it in one place"
        )
