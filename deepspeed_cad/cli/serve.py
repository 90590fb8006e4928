"""`deepspeed-cad serve --rendezvous HOST:PORT`: one attention server that joins a training of another launch."""

import argparse

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.notice import counted, notice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rendezvous", required=True, metavar="HOST:PORT", help="MASTER_ADDR:MASTER_PORT of the training")
    add("--device", default="", help="such as cuda:1; default: LOCAL_RANK's GPU, or the CPU")
    add("--timeout", type=float, default=CADConfig.timeout_s, metavar="S", help="seconds to wait for the training")


def main(args: argparse.Namespace) -> int:
    place = args.rendezvous
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        raise CADConfigError(f"--rendezvous is {place!r}; expected HOST:PORT, such as 10.0.0.1:29500")
    from deepspeed_cad.server.meeting import take_place  # both bring torch
    from deepspeed_cad.server.process import choose_device, serve

    device = choose_device(args.device)  # before it takes a place
    notice(f"waits at most {args.timeout:g} s for a training at {place} that has reserved servers")
    role, config = take_place(place, args.timeout)
    trainers = counted(role.trainers, "trainer")
    notice(f"server {role.rank} has found the training at {place} and waits for its {trainers} to turn CAD on")
    return serve(role, config, device)
