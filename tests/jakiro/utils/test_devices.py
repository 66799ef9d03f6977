"""Bfloat16 is native on processors with either of two extensions, and on no others."""

import pytest
import torch

from jakiro.utils.devices import computes_bfloat16, default_dtype, native_dtype


@pytest.mark.parametrize("name", ["_is_avx512_bf16_supported", "_is_amx_tile_supported", None])
def test_bfloat16_is_native_with_either_extension(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    computes_bfloat16.cache_clear()
    for check in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, check, lambda check=check: check == name)
    assert computes_bfloat16() == (name is not None)
    dtype = torch.float32 if name is None else torch.bfloat16
    assert native_dtype(torch.device("cpu")) == dtype
    assert native_dtype(torch.device("meta")) == torch.float32
    if not torch.cuda.is_available():
        assert default_dtype() == dtype
    computes_bfloat16.cache_clear()
