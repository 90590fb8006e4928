"""The console script `accelerate-cad`: `accelerate` with CAD.

`accelerate-cad launch` takes every flag of `accelerate launch`, a `--cad_*` flag for each key of the "cad" block, and a
`cad_config:` section in the YAML; it starts the script through `-m deepspeed_cad.run`. `accelerate-cad config` asks
Accelerate's questions and then CAD's. In: a command line. Out: `accelerate`'s own launch, with CAD in its script.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADError

_USAGE = """usage: accelerate-cad launch [flags of accelerate launch] [--cad_KEY VALUE ...] train.py args...
       accelerate-cad config [--config_file FILE]"""
_SECTION = "cad_config"
_ASKED = ("tolerance", "overlap", "recompute_attention", "granularity", "timeout_s")
"""The keys that `accelerate-cad config` asks about; the others have defaults that need no thought."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run; a mistake of the user is one line on stderr and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {"launch": launch, "config": configure}
    if not words or words[0] not in commands:
        print(_USAGE, file=sys.stderr)
        return 0 if words[:1] in (["-h"], ["--help"]) else 2
    try:
        return commands[words[0]](words[1:])
    except CADError as error:
        print(f"accelerate-cad {words[0]}: {error}", file=sys.stderr)
        return 2


def launch(words: list[str]) -> int:
    """`accelerate launch` of the script through `-m deepspeed_cad.run`."""
    from accelerate.commands import launch as accelerate_launch

    from deepspeed_cad.integrations.active import short_block

    parser = accelerate_launch.launch_command_parser()
    group = parser.add_argument_group("CAD Arguments", 'Keys of the "cad" block.')
    for field in dataclasses.fields(CADConfig):
        group.add_argument(f"--cad_{field.name}", help=f"default {json.dumps(field.default)}")
    _refuse_unknown_flags(parser, words)
    args = parser.parse_args(words)
    flags = _take_flags(args)
    if args.no_python:
        raise CADConfigError("--no_python starts a program that is not Python; CAD needs a Python script")
    with tempfile.TemporaryDirectory() as folder:
        section = _take_section(args, Path(folder))
        config = CADConfig.from_dict(_merge(section, flags, args.config_file))
        block = short_block(config)
        script = ["-m", args.training_script] if args.module else [args.training_script]
        args.training_script_args = ["--cad", json.dumps(block), *script, *args.training_script_args]
        args.training_script, args.module = "deepspeed_cad.run", True
        accelerate_launch.launch_command(args)
    return 0


def _refuse_unknown_flags(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """A `--cad_` flag before the script that is no key: argparse would say it less clearly."""
    takes_value = {name for action in parser._actions if action.nargs != 0 for name in action.option_strings}
    position = 0
    while position < len(words) and words[position].startswith("-"):
        name = words[position].split("=")[0]
        key = name.lstrip("-").replace("-", "_")
        if key.startswith("cad_"):
            CADConfig.from_dict({key.removeprefix("cad_"): None} if key not in _flag_names() else {})
        position += 2 if name in takes_value and "=" not in words[position] else 1


def _flag_names() -> set[str]:
    return {f"cad_{field.name}" for field in dataclasses.fields(CADConfig)}


def _take_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The `--cad_*` flags that were given, as keys of the block; Accelerate does not see them."""
    taken = {}
    for field in dataclasses.fields(CADConfig):
        text = args.__dict__.pop(f"cad_{field.name}")
        if text is not None:
            taken[field.name] = _read_value(text)
    return taken


def _read_value(text: str) -> Any:
    """A number, true or false as JSON writes it (or capitalised); anything else is a string."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def _take_section(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The `cad_config:` section of the YAML; Accelerate gets the rest of it, since it rejects keys unknown to it."""
    from accelerate.commands.config import default_config_file

    path = args.config_file or (default_config_file if os.path.isfile(default_config_file) else None)
    if path is None or not os.path.isfile(path):
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise CADConfigError(f"{path} is not a config file of Accelerate: {error}") from error
    if not isinstance(content, dict):
        return {}
    stray = [key for key in content if str(key).startswith("cad") and key != _SECTION]
    if stray:
        raise CADConfigError(
            f"{path}: {', '.join(map(str, stray))} at the top level; CAD's keys belong below "
            f'"{_SECTION}:", such as {_SECTION}: {{cad_tolerance: 0.05}}'
        )
    if _SECTION not in content:
        return {}
    section = content.pop(_SECTION)
    if args.config_file is not None or section:
        args.config_file = str(folder / Path(path).name)
        text = json.dumps(content) if path.endswith(".json") else yaml.safe_dump(content)
        Path(args.config_file).write_text(text, encoding="utf-8")
    if not isinstance(section, dict):
        raise CADConfigError(
            f'{path}: "{_SECTION}" is {section!r}; expected keys below it, such as cad_tolerance: 0.05'
        )
    return {str(key).removeprefix("cad_"): value for key, value in section.items()}


def _merge(section: dict[str, Any], flags: dict[str, Any], path: str | None) -> dict[str, Any]:
    """Both sources together. Raises CADConfigError where they say different things."""
    for key in section.keys() & flags.keys():
        if section[key] != flags[key]:
            raise CADConfigError(
                f'"{key}" is configured twice, differently: {section[key]!r} in the {_SECTION} section of the YAML and '
                f"{flags[key]!r} by --cad_{key}. Leave one out"
            )
    return {**section, **flags}


def configure(words: list[str]) -> int:
    """Accelerate's questions, then CAD's; both answers go to one YAML."""
    import yaml
    from accelerate.commands.config.config import cache_dir, default_yaml_config_file, get_user_input

    parser = argparse.ArgumentParser(prog="accelerate-cad config", description="Ask and write the YAML of a launch.")
    parser.add_argument("--config_file", "--config-file", default=default_yaml_config_file)
    path = Path(parser.parse_args(words).config_file)
    host = get_user_input()
    section = ask()
    if path == Path(default_yaml_config_file):
        Path(cache_dir).mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        host.to_json_file(str(path))
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**content, _SECTION: section}, indent=2), encoding="utf-8")
    else:
        host.to_yaml_file(str(path))
        with path.open("a", encoding="utf-8") as file:
            yaml.safe_dump({_SECTION: section}, file)
    print(f"configuration of accelerate and CAD saved at {path}; accelerate-cad launch --config_file {path} train.py")
    return 0


def ask() -> dict[str, Any]:
    """CAD's questions on the terminal; an empty answer keeps the default, a bad one is asked again."""
    section: dict[str, Any] = {}
    if not _is_yes(input("Balance attention over all ranks with CAD? [YES/no]: ")):
        return {"cad_enabled": False}
    default = CADConfig().to_dict()
    for key in _ASKED:
        while True:
            answer = input(f"CAD {key} [{json.dumps(default[key])}]: ").strip()
            if not answer:
                break
            try:
                CADConfig.from_dict({key: _read_value(answer)})
            except CADConfigError as error:
                print(error)
                continue
            section[f"cad_{key}"] = _read_value(answer)
            break
    return section


def _is_yes(answer: str) -> bool:
    return answer.strip().lower() in ("", "y", "yes", "true", "1")


if __name__ == "__main__":
    sys.exit(main())
