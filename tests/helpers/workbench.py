"""The tiny target and drafters that `jakiro profile gpu --quick` measures."""

from functools import cache

import torch

from inference.profiling.gpu.scale import QUICK
from inference.profiling.gpu.workbench import Workbench, build_workbench


@cache
def quick_workbench() -> Workbench:
    """Return the workbench of a quick run on a CPU."""
    return build_workbench(QUICK, torch.device("cpu"))
