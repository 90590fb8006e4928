"""`-m deepspeed_cad.run` on ranks that pretend to be on several hosts, servers too.

    torchrun --nproc-per-node 2 benchmarks/run_on_hosts.py 0,1 host --cad '{"servers": {"reserved": 1}}' SCRIPT ...

First the host of every rank, then what is between hosts (see `--link` of train_step.py), then what the launcher takes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from train_step import pretend_hosts  # noqa: E402

from deepspeed_cad.run import main  # noqa: E402

if __name__ == "__main__":
    pretend_hosts([int(one) for one in sys.argv[1].split(",")], sys.argv[2])
    sys.exit(main(sys.argv[3:]))
