"""Hosts that are none: network namespaces of this machine, joined by a bridge, each behind a link of limited speed.

In: how many, and their speed. Out: processes that run on them and see another host name, another network and nothing of
the rest, and find each other by name where they are given names. All of it is gone when the context is left, whatever
happens inside. Skips the test, with the reason, where that is not permitted.
"""

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

_count = itertools.count()
BURST = "128kb"
"""Of the token bucket: more than a packet that the kernel cuts only later; a hundredth of a second at 100 Mbit/s."""


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


class Hosts:
    """Hosts with addresses; `open_hosts` makes and removes them."""

    def __init__(self, count: int, rate: str, names_file: Path | None) -> None:
        self.count, self.rate, self._names_file = count, rate, names_file
        self._prefix = f"cad{os.getpid() % 100000}x{next(_count)}"
        self._started: list[subprocess.Popen[str]] = []

    def address(self, host: int) -> str:
        return f"10.213.7.{host + 1}"

    def space(self, host: int) -> str:
        return f"{self._prefix}-{host}"

    def make(self) -> None:
        """Namespaces, a bridge in one of its own, and a limited link from each to it."""
        net = f"{self._prefix}-net"
        _run("ip", "netns", "add", net)
        _run("ip", "-n", net, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", net, "link", "set", "bridge", "up")
        for host in range(self.count):
            space, port = self.space(host), f"port{host}"
            _run("ip", "netns", "add", space)
            _run("ip", "-n", net, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "-n", net, "link", "set", port, "master", "bridge")
            _run("ip", "-n", net, "link", "set", port, "up")
            _run("ip", "-n", space, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            bucket = ("tbf", "rate", self.rate, "burst", BURST, "latency", "400ms")
            _run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", "root", *bucket)

    def cut(self, host: int) -> None:
        _run("ip", "-n", self.space(host), "link", "set", "eth0", "down")

    def forbid(self, host: int, other: int) -> None:
        _run("ip", "-n", self.space(host), "route", "add", "unreachable", self.address(other))

    def on(self, host: int, name: str = "") -> list[str]:
        """The words in front of a command that make it run on a host, which has a name."""
        inside = 'hostname "$0" && exec "$@"'
        if self._names_file is not None:  # seen there only: `ip netns exec` has mounts of its own
            inside = f"mount --bind {shlex.quote(str(self._names_file))} /etc/hosts && {inside}"
        words = ["ip", "netns", "exec", self.space(host), "unshare", "--uts", "sh", "-c", inside]
        return [*words, name or self.name(host)]

    def start(self, host: int, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """A process on a host, which has the host's name too."""
        return self.launch([*self.on(host), *command], {"GLOO_SOCKET_IFNAME": "eth0", **environment})

    def launch(self, words: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """A process that ends at the latest with these hosts."""
        process = subprocess.Popen(
            words, env={**os.environ, **environment}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._started.append(process)
        return process

    def name(self, host: int) -> str:
        return f"{self._prefix}-host{host}"

    def remove(self) -> None:
        for process in self._started:
            with process:  # closes its pipes, and waits
                process.kill()
        for space in map(self.space, range(self.count)):
            # What a launcher started outlives it.
            found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, timeout=20)
            for pid in map(int, found.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for name in [*map(self.space, range(self.count)), f"{self._prefix}-net"]:
            # A veth goes with the namespace of either end.
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False)


@contextlib.contextmanager
def open_hosts(count: int, rate: str = "100mbit", names: Path | None = None) -> Iterator[Hosts]:
    """`count` hosts for the length of a test; `names`: what they see as /etc/hosts."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed (packages iproute2, util-linux)")
    hosts = Hosts(count, rate, names)
    try:
        try:
            hosts.make()
            _run("unshare", "--uts", "true")
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        yield hosts
    finally:
        hosts.remove()
