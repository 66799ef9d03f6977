"""The long and the short names of dtypes mean the same."""

import torch

from jakiro.utils.dtype_names import SHORT_NAMES, long_dtype, short_dtype
from jakiro.utils.pretrained import TORCH_DTYPES


def test_each_name_becomes_the_other_and_the_same_dtype() -> None:
    for long, short in SHORT_NAMES.items():
        assert long_dtype(short) == long_dtype(long) == long
        assert short_dtype(long) == short_dtype(short) == short
        assert TORCH_DTYPES[long] is TORCH_DTYPES[short] is getattr(torch, long)


def test_other_values_are_unchanged() -> None:
    assert long_dtype("auto") == short_dtype("auto") == "auto"
    assert short_dtype(16) == 16
