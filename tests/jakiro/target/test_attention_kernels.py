"""cuDNN attention is off exactly while any thread computes attention of changing shapes."""

from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from torch.overrides import TorchFunctionMode

from inference import SpeculativeDecoder
from jakiro.target import adapter, attention_kernels
from jakiro.target.adapter import TargetAdapter
from jakiro.target.attention_kernels import without_cudnn

GPU = torch.device("cuda")
ATTENTION = torch.nn.functional.scaled_dot_product_attention


def _is_enabled() -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled()


class _Attention(TorchFunctionMode):
    """Notes for each call of attention whether cuDNN may be used."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled: list[bool] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        if func is ATTENTION:
            self.enabled.append(_is_enabled())
        return func(*args, **(kwargs or {}))


def test_the_setting_is_restored_when_the_last_block_has_ended() -> None:
    before = _is_enabled()
    first, second = ExitStack(), ExitStack()  # as of two threads
    first.enter_context(without_cudnn(GPU))
    second.enter_context(without_cudnn(GPU))
    assert not _is_enabled()
    first.close()
    assert not _is_enabled()
    second.close()
    assert _is_enabled() == before


def test_decoding_never_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def as_on_a_gpu(device: torch.device) -> Any:
        with attention_kernels.without_cudnn(GPU):
            yield

    monkeypatch.setattr(adapter, "without_cudnn", as_on_a_gpu)
    monkeypatch.setattr("inference.drafters.trained.drafter.without_cudnn", as_on_a_gpu)
    model = tiny_llama()
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree="fixed")
    with _Attention() as attention:
        decoder.generate([1, 2, 3], temperature=0, max_new_tokens=6)
    assert len(attention.enabled) > 10
    assert not any(attention.enabled)
