"""`ssh`, `pdsh`, `srun` and `scontrol` of a cluster that is none: what they are given runs in network namespaces.

They read as much of a command line as scripts in examples/nodes and DeepSpeed's launcher write, and refuse the rest. As
`python cluster_commands.py NAME WORDS` this file is the command NAME; `put_into` makes that of a folder on the PATH.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "TEST_CLUSTER"
"""By name of a host: the words in front of a command that make it run there, as JSON."""


def put_into(folder: Path, hosts: Mapping[str, list[str]]) -> dict[str, str]:
    """Write the commands into a folder; gives the environment in which they work."""
    for name in COMMANDS:
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" {name} "$@"\n')
        command.chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {VARIABLE: json.dumps(hosts), "PATH": path}


def _hosts() -> dict[str, list[str]]:
    return json.loads(os.environ[VARIABLE])


def _run_on_all(hosts: list[str], words: list[list[str]], environments: list[dict[str, str]]) -> int:
    """A command on each host, at the same time; the first exit code that is not 0."""
    before = _hosts()
    processes = [
        subprocess.Popen([*before[host], *command], env=environment)
        for host, command, environment in zip(hosts, words, environments)
    ]
    return next(filter(None, [process.wait() for process in processes]), 0)


def _logged_in() -> dict[str, str]:
    """The environment of who logs in: nothing of the caller's."""
    return {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}


def ssh(words: list[str]) -> int:
    """ssh -o OPTION HOST WORDS"""
    if words[:1] == ["-o"]:
        words = words[2:]
    return _run_on_all(words[:1], [["sh", "-c", " ".join(words[1:])]], [_logged_in()])


def pdsh(words: list[str]) -> int:
    """pdsh -S -f N -w HOST,HOST WORDS: %n is a host's number."""
    if words[:2] != ["-S", "-f"] or words[3] != "-w":
        raise SystemExit(f"pdsh: {words}")
    hosts, line = words[4].split(","), " ".join(words[5:])
    commands = [["sh", "-c", line.replace("%n", str(number))] for number in range(len(hosts))]
    return _run_on_all(hosts, commands, [_logged_in()] * len(hosts))


def scontrol(words: list[str]) -> int:
    """scontrol show hostnames LIST"""
    if words != ["show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]:
        raise SystemExit(f"scontrol: {words}")
    os.write(1, "".join(f"{host}\n" for host in _hosts()).encode())
    return 0


def srun(words: list[str]) -> int:
    """srun OPTIONS WORDS: a task on each node, with the caller's environment and what Slurm adds to it."""
    while words[0].startswith("--"):
        if words.pop(0) not in ("--kill-on-bad-exit=1", "--cpu-bind=none"):
            raise SystemExit("srun: an option that is not known here")
    hosts = list(_hosts())
    environments = [
        {**os.environ, "SLURM_NODEID": str(number), "SLURM_PROCID": str(number), "SLURMD_NODENAME": host}
        for number, host in enumerate(hosts)
    ]
    return _run_on_all(hosts, [words] * len(hosts), environments)


COMMANDS = {"ssh": ssh, "pdsh": pdsh, "scontrol": scontrol, "srun": srun}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
