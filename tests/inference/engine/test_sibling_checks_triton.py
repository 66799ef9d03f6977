"""The sibling checks in Triton agree with those in torch, on a GPU and in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.e2e
@pytest.mark.skipif(
    Version(np.__version__) >= Version("2.5"),
    reason="Triton's interpreter turns arrays with one element into numbers, which NumPy rejects",
)
def test_the_interpreted_program_gives_the_results_of_torch() -> None:
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests"), *sys.path])
    subprocess.run(
        [sys.executable, "-m", "helpers.interpreted_checks"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        check=True,
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_the_program_gives_the_results_of_torch_on_a_gpu() -> None:
    from helpers.interpreted_checks import compare

    compare("cuda")
