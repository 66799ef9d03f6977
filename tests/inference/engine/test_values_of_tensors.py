"""Processors that wait for the device are known: captured steps must not use them."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LogitsProcessorList

from inference.engine.acceptance import never_waits
from inference.sampling.options import PREFIX_FREE, Sampling
from jakiro.errors import RequestError

SETTINGS: dict[str, dict[str, Any]] = {
    "EpsilonLogitsWarper": {"epsilon": 0.01},
    "EtaLogitsWarper": {"epsilon": 0.01},
    "MinPLogitsWarper": {"min_p": 0.1},
    "TemperatureLogitsWarper": {"temperature": 0.5},
    "TopKLogitsWarper": {"top_k": 3},
    "TopPLogitsWarper": {"top_p": 0.9},
}


@pytest.mark.parametrize("kind", sorted(PREFIX_FREE, key=lambda own: own.__name__))
def test_processors_that_wait_for_the_device_are_known(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first compilation of a process switches these checks off.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    warper = kind(**SETTINGS.get(kind.__name__, {}))
    sampling = Sampling(LogitsProcessorList([warper]), do_sample=True)
    logits = torch.randn(4, 9)
    with FakeTensorMode(allow_non_fake_inputs=True):
        if never_waits(sampling):
            assert sampling.processed_probs(logits).shape == (4, 9)
        else:
            with pytest.raises(RequestError, match="DataDependentOutput"):
                sampling.processed_probs(logits)
