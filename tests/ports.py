"""Ports for processes that meet on this machine."""

import random
import socket

RANGE = range(10000, 32000)
"""Below those that the system gives to whoever connects."""


def free_port() -> int:
    """A port that nobody listens on. Drawn at random: other tests, beside these, draw too before they listen."""
    while True:
        port = random.SystemRandom().choice(RANGE)
        with socket.socket() as found:
            try:
                found.bind(("", port))
                return port
            except OSError:
                continue
