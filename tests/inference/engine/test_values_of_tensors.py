"""Recorded steps depend on no value of a tensor: they run on tensors without values."""

from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LogitsProcessorList

from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine import accept_batched
from inference.engine.acceptance import never_waits
from inference.engine.loop import DecodeRun
from inference.engine.pipeline import Pipeline, PipelinePool
from inference.generation.preparation import prepare_requests
from inference.sampling.options import PREFIX_FREE, Sampling
from inference.trees.shape import TreeShape
from jakiro.errors import RequestError
from jakiro.target.adapter import TargetAdapter

SELECTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "EpsilonLogitsWarper": {"epsilon": 0.01},
    "EtaLogitsWarper": {"epsilon": 0.01},
    "MinPLogitsWarper": {"min_p": 0.1},
    "TemperatureLogitsWarper": {"temperature": 0.5},
    "TopKLogitsWarper": {"top_k": 3},
    "TopPLogitsWarper": {"top_p": 0.9},
}


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("sampled", [False, True], ids=["deterministic", "sampled tree"])
def test_a_recorded_step_runs_on_tensors_without_values(
    selection: str, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept_batched._Descent, "_is_over", lambda self: False)  # as on a GPU
    target = TargetAdapter(tiny_llama())
    shape = TreeShape(children=2, breadth=2, num_nodes=6, sampled=sampled)
    drafter = TrainedDrafter(tiny_drafter(target), target, shape)
    requests, _ = prepare_requests(
        target.model,
        [[1, 2, 3], [4, 5]],
        {"max_new_tokens": 20, **SELECTIONS[selection]},
        seed=3,
        max_position=target.spec.max_position,
    )
    run = DecodeRun(target, drafter, requests, pipelines=PipelinePool())
    steps = iter(run)
    for _ in range(3):
        next(steps)
    pipeline = run.captured.pipeline
    assert isinstance(pipeline, Pipeline)
    (drafting,), (verification,) = pipeline._draft_parts.values(), pipeline._verify_parts.values()
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        fields = drafting._draft()
        outcome = verification._verify()
    assert len(fields) == len(outcome) == 2


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
