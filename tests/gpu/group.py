"""One process of one group of checks; gpu_check.py starts one for every rank.

    python tests/gpu/group.py GROUP CASE --lines FILE [--device cpu] [--kernel NAME] [--hosts 0,0,1,1]

RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set as torchrun sets them.
"""

import argparse
import faulthandler
import os
import sys
import threading
import time
import warnings
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("tests", "", "tests/gpu", "benchmarks")]

from lines import Lines, Place  # noqa: E402

from deepspeed_cad.exchange import probe  # noqa: E402


def leave_with_parent() -> None:
    """End this process when the one that started it is gone: a GPU must not stay busy for nobody."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    leave_with_parent()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", help="the module check_GROUP.py")
    parser.add_argument("case", help="what its function run() is called with; it may be empty")
    parser.add_argument("--lines", type=Path, required=True, help="where to write the lines of this rank")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--hosts", help="the host that each rank pretends to be on")
    parser.add_argument("--stall", type=float, default=60.0, help="seconds until every thread's stack is printed")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.stall, repeat=True)
    warnings.simplefilter("ignore", FutureWarning)
    check = import_module(f"check_{options.group}")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    backend, more = "gloo", {}
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend, more = "cpu:gloo,cuda:nccl", {"device_id": device}
    else:
        torch.set_num_threads(1)
    # Where servers are reserved, not all ranks are in one world.
    if not getattr(check, "OWN_WORLD", False):
        dist.init_process_group(backend, timeout=timedelta(seconds=120), **more)
    hosts = tuple(int(one) for one in options.hosts.split(",")) if options.hosts else None
    if hosts:
        # All that asks for a transport or plans, sessions too, takes this rank to be on the pretended host.
        probe.host_number = lambda: hosts[rank]
    place = Place(rank, ranks, device, hosts, options.kernel)
    check.run(place, Lines(place, options.lines), options.case)
    sys.stdout.flush()
    # Peers may be dead and communicators aborted: leaving in good order could hang, and is not what is checked.
    os._exit(0)


if __name__ == "__main__":
    main()
