"""The two parts of a step on the device: few operations, and trees at fixed addresses."""

from typing import Any

import torch
from helpers.models import tiny_drafter, tiny_llama

from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.device_step import DraftPart, VerifyPart
from inference.engine.loop import DecodeRun
from inference.engine.pipeline import PipelinePool
from inference.generation.preparation import prepare_requests
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter

SELECTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
}


def _parts(selection: str) -> tuple[DraftPart, VerifyPart]:
    """Return the parts of the steps of a run."""
    target = TargetAdapter(tiny_llama())
    shape = TreeShape(children=2, breadth=2, num_nodes=6, sampled=selection == "sampled")
    drafter = TrainedDrafter(tiny_drafter(target), target, shape)
    generation = {"max_new_tokens": 40, **SELECTIONS[selection]}
    limit = target.spec.max_position
    requests, _ = prepare_requests(target.model, [[1, 2]], generation, seed=0, max_position=limit)
    run = DecodeRun(target, drafter, requests, pipelines=PipelinePool())
    steps = iter(run)
    for _ in range(3):
        next(steps)
    assert run.captured is not None
    assert run.captured.pipeline is not None
    (draft,), (verify,) = (
        run.captured.pipeline._draft_parts.values(),
        run.captured.pipeline._verify_parts.values(),
    )
    steps.close()
    return draft, verify


def test_drafts_are_written_to_the_tensors_that_are_verified() -> None:
    draft, verify = _parts("greedy")
    with torch.inference_mode():
        tokens = verify._buffer.tree.token_ids.zero_()
        addresses = [draft._draft().data_ptr() for _ in range(2)]
        assert addresses[0] == addresses[1] == verify._buffer.tree.token_ids.data_ptr()
        assert tokens.any()
