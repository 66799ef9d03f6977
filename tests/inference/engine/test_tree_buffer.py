"""Recorded steps verify trees of changing sizes, whose missing nodes are padding."""

from itertools import cycle
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.recordings import Recorded

from inference.draft_tree import ROOT
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine import accept_batched, buffers, device_step, pipeline
from inference.engine.buffers import TreeBuffer
from inference.engine.loop import DecodeRun
from inference.engine.pipeline import PipelinePool
from inference.engine.policy import AlwaysDraft, RunProgress
from inference.generation.preparation import prepare_requests
from inference.protocol import Budget
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter

PROMPTS = [[1, 2, 3], [4, 5]]
TREES = {
    "deterministic": TreeShape(parallel_levels=0, children=3, breadth=3, num_nodes=12),
    "sampled": TreeShape(parallel_levels=0, children=3, breadth=2, sampled=True),
}
SELECTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.4},
}
SIZES = (12, 3, 7, 5, 9, None, 2)  # of trees, in turns; None for no tree


class _Turns(AlwaysDraft):
    """A policy with another size of trees in each step."""

    def __init__(self) -> None:
        super().__init__(None)
        self.sizes = cycle(SIZES)

    def new_run(self, *_: Any) -> "_Turns":
        """Return a policy that begins with the first size."""
        return _Turns()

    def next_budget(self, progress: RunProgress) -> Budget | None:
        """Return limits with the next size."""
        size = next(self.sizes)
        return None if size is None else Budget(size)


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_step, "RecordedFunction", Recorded)
    monkeypatch.setattr(pipeline, "STRIDE", 128)
    monkeypatch.setattr(accept_batched._Descent, "_is_over", lambda self: False)


def _runs(tree: str, selection: str) -> tuple[DecodeRun, DecodeRun]:
    """Return a run with ordinary steps, and one with recorded steps."""
    target = TargetAdapter(tiny_llama(vocab=11))
    drafter = TrainedDrafter(tiny_drafter(target), target, TREES[tree])
    generation = {"max_new_tokens": 40, **SELECTIONS[selection]}
    limit = target.spec.max_position
    requests, _ = prepare_requests(target.model, PROMPTS, generation, seed=3, max_position=limit)
    usual = DecodeRun(target, drafter, requests, _Turns()).finish()
    captured = DecodeRun(target, drafter, requests, policy=_Turns(), pipelines=PipelinePool())
    captured.finish()
    return usual, captured


def _assert_equal(usual: DecodeRun, captured: DecodeRun) -> None:
    for one, other in zip(usual.sequences, captured.sequences, strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats.accepted == other.stats.accepted
        assert one.stats.proposed_by_proposer == other.stats.proposed_by_proposer


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("tree", TREES)
def test_trees_of_changing_sizes_share_recorded_verifications(tree: str, selection: str) -> None:
    usual, captured = _runs(tree, selection)
    _assert_equal(usual, captured)
    own = captured.captured.pipeline
    assert own is not None
    sizes = [form.num_queries for form in own._buffers if form.batch == len(PROMPTS)]
    assert set(sizes) == {1, 8, 16}
    assert len(own._verify_parts) == len(own._buffers)
    if selection == "greedy":
        assert len(sizes) == 3


@pytest.mark.parametrize("fault", ["valid padding", "old nodes"])
def test_padding_that_is_visited_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "valid padding":
        monkeypatch.setattr(buffers, "_PADDING", (0, ROOT, 1, 0, 0, 0, 1))
    else:  # nodes of the last, larger tree are left
        original = TreeBuffer.fill

        def planted(self: TreeBuffer, tree: Any) -> torch.Tensor:
            count = tree.num_nodes
            left = self._fields[:, :, count:].clone()
            filled = original(self, tree)
            self._fields[:, :, count:] = left
            return filled

        monkeypatch.setattr(TreeBuffer, "fill", planted)
    with pytest.raises(AssertionError):
        _assert_equal(*_runs("deterministic", "greedy"))


def test_values_at_padding_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, _ = _runs("sampled", "sampled")
    monkeypatch.setattr(buffers, "_PADDING", (7, ROOT, 1, 1, 2, 1, 0))
    _, captured = _runs("sampled", "sampled")
    _assert_equal(usual, captured)
