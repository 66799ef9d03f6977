"""The trees that are returned are those that were verified, and returning them changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.lanes import Work, lane_of, request_of
from helpers.models import tiny_drafter, tiny_llama
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.draft_tree import ROOT
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.repeating import RepeatingDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.decode_step import TARGET, DecodeStep, VerifiedTree
from inference.engine.request import OutputOptions, SequenceState
from inference.protocol import Drafter
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter

VOCAB = 11
PROMPT = [2, 1, 2, 1, 2]
SAMPLED = TreeShape(children=3, breadth=2, sampled=True)


def _trained(model: LlamaForCausalLM, shape: TreeShape | None = None) -> TrainedDrafter:
    target = TargetAdapter(model)
    return TrainedDrafter.for_target(tiny_drafter(target), target, trees=shape)


DRAFTERS: dict[str, Callable[[LlamaForCausalLM], Drafter | None]] = {
    "none": lambda model: None,
    "trained": _trained,
    "sampled": lambda model: _trained(model, SAMPLED),
    "repeating": lambda model: RepeatingDrafter(LookupDrafter()),
    "pair": lambda model: CombinedDrafter(_trained(model), LookupDrafter()),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.9},
}


def _steps(name: str, options: dict[str, Any], record: OutputOptions) -> list[DecodeStep]:
    model = tiny_llama(VOCAB)
    decoder = SpeculativeDecoder(model, DRAFTERS[name](model), tree="fixed")
    work = Work(PROMPT, 7, {**options, "max_new_tokens": 24})
    state = SequenceState.of(0, replace(request_of(decoder, work), record=record))
    lane = lane_of(decoder, state.request)
    steps: list[DecodeStep] = []
    prefill = lane.prefill_of([state])
    with torch.inference_mode():
        while not prefill.is_complete:
            prefill.read_chunk()
    steps += lane.start(prefill, [state])
    while lane.live:
        steps += lane.step()
    return steps


CASES = [("none", "greedy"), ("sampled", "sampled"), ("repeating", "greedy"), ("pair", "sampled")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_tokens_and_log_probs_are_the_same_with_trees(name: str, kind: str) -> None:
    own = OutputOptions(raw_log_probs=True, num_likeliest=2)
    found = _steps(name, OPTIONS[kind], replace(own, trees=True))
    expected = _steps(name, OPTIONS[kind], own)
    without_trees = [replace(step, details=replace(step.details, tree=None)) for step in found]
    assert without_trees == expected


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_path_of_a_tree_is_what_was_emitted(name: str, kind: str) -> None:
    steps = _steps(name, OPTIONS[kind], OutputOptions(trees=True))
    last = PROMPT[-1]
    for step in steps:
        assert step.details is not None
        tree = step.details.tree
        assert tree is not None
        assert tree.root == last
        tokens = [tree.token_ids[node] for node in tree.path]
        proposers = [tree.proposer_ids[node] for node in tree.path]
        if tree.next_token is not None:
            tokens, proposers = [*tokens, tree.next_token], [*proposers, TARGET]
        assert tokens == step.token_ids
        assert proposers == step.proposer_ids
        assert [ROOT, *tree.path][: len(tree.path)] == [tree.parents[node] for node in tree.path]
        last = tokens[-1]
    sizes = [_tree(step).token_ids for step in steps]
    assert any(sizes[1:]) == (name != "none")
    assert sizes[0] == []


def _tree(step: DecodeStep) -> VerifiedTree:
    assert step.details is not None
    assert step.details.tree is not None
    return step.details.tree


def test_probabilities_are_those_of_the_target_after_the_parent() -> None:
    model = tiny_llama(VOCAB)
    before = list(PROMPT)
    for step in _steps("trained", {"temperature": 0.5}, OutputOptions(trees=True)):
        tree = _tree(step)
        for node, probability in enumerate(tree.target_probs):
            path: list[int] = []
            at = tree.parents[node]
            while at != ROOT:
                path, at = [tree.token_ids[at], *path], tree.parents[at]
            with torch.no_grad():
                logits = model(torch.tensor([[*before, *path]])).logits[0, -1]
            expected = logits.softmax(dim=-1)[tree.token_ids[node]].item()
            assert probability == pytest.approx(expected, abs=1e-5)
        before += step.token_ids
