"""Makes the examples run from a checkout that is not installed, and on machines without a GPU. Importing it is enough.

A script of your own needs neither: the installed package attaches itself to DeepSpeed.
"""

import os
import sys

try:
    import deepspeed_cad
except ImportError:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import deepspeed_cad

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed

if not torch.cuda.is_available():
    # Without this DeepSpeed compiles an operator for a minute and a half when it starts on a CPU.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

deepspeed_cad.install()
