"""`python -m deepspeed_cad.cli` does what the console script `deepspeed-cad` does."""

import sys

from deepspeed_cad.cli import main

sys.exit(main())
