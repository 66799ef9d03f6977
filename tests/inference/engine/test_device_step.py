"""The two parts of a step on the device: few operations, and trees at fixed addresses."""

from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.operations import OperationCounter

from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine import accept_batched
from inference.engine.captured_run import CapturedRun
from inference.engine.device_step import DraftPart, VerifyPart
from inference.engine.pipeline import PipelinePool
from inference.generation.preparation import prepare_requests
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter

# 1.1 times the counts of today: to draft, and to verify, accept and commit.
MOST_OPERATIONS = {"greedy": (240, 300), "sampled": (305, 630)}
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
    run = CapturedRun(target, drafter, requests, PipelinePool())
    steps = iter(run)
    for _ in range(3):
        next(steps)
    assert run._pipeline is not None
    (draft,), (verify,) = run._pipeline._draft_parts.values(), run._pipeline._verify_parts.values()
    steps.close()
    return draft, verify


@pytest.mark.parametrize("selection", SELECTIONS)
def test_both_parts_take_few_operations(selection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_batched._Descent, "_is_over", lambda self: False)
    counts = []
    draft, verify = _parts(selection)
    for part in (draft._draft, verify._verify):
        with torch.inference_mode(), OperationCounter() as counter:
            part()
        counts.append(counter.total)
    most = MOST_OPERATIONS[selection]
    assert [count <= bound for count, bound in zip(counts, most, strict=True)] == [True] * 2, counts


def test_drafts_are_written_to_the_tensors_that_are_verified() -> None:
    draft, verify = _parts("greedy")
    with torch.inference_mode():
        tokens = verify._buffer.tree.token_ids.zero_()
        addresses = [draft._draft().data_ptr() for _ in range(2)]
        assert addresses[0] == addresses[1] == verify._buffer.tree.token_ids.data_ptr()
        assert tokens.any()
