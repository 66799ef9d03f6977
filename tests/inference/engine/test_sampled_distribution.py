"""Sampled sequences have the target's processed distribution: chi-square over whole requests."""

from collections import Counter

import pytest
import torch
from helpers.chi_square import p_value, probs_of_continuations
from helpers.models import tiny_drafter, tiny_llama
from torch import Tensor

from inference import SpeculativeDecoder
from inference.sampling import Sampling
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter

PROMPT = [1, 2]
TREES = {
    "deterministic": TreeShape(children=4, breadth=3, num_nodes=12),
    "sampled": TreeShape(children=3, breadth=2, sampled=True),
}
SETTINGS = [
    {"temperature": 0.5},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "top_p": 1.0},
    {"temperature": 1.0, "repetition_penalty": 1.3},
]
# One test of each acceptance rule in `make test`: exact enumeration covers the rest.
QUICK = {"temperature": 1.0, "top_p": 0.9}
UNDER_TEST = [
    pytest.param(sampling, marks=() if sampling == QUICK else pytest.mark.slow, id=str(sampling))
    for sampling in SETTINGS[:-1]
]
THRESHOLD = 0.001 / (len(TREES) * len(SETTINGS))
RUNS = 20_000
BATCH = 2_500


def _counts(tree: TreeShape, sampling: dict[str, float], runs: int) -> Counter[tuple[int, ...]]:
    """Return how often each continuation of three tokens comes."""
    model = _model()
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree=tree)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(runs // BATCH):
        outputs = decoder.generate_batch([PROMPT] * BATCH, seed=seed, max_new_tokens=3, **sampling)
        counts.update(tuple(output.new_token_ids) for output in outputs)
    return counts


def _model() -> torch.nn.Module:
    # More tokens than top_k keeps, and distributions wide enough for drafts to be rejected, too.
    return tiny_llama(vocab=23, initializer_range=0.15)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("sampling", UNDER_TEST)
def test_sampled_sequences_have_the_target_distribution(
    name: str, sampling: dict[str, float]
) -> None:
    counts = _counts(TREES[name], sampling, RUNS)
    probs = probs_of_continuations(_model(), PROMPT, 3, **sampling)
    assert set(counts) <= set(probs)
    assert p_value(counts, probs) > THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_sequences_under_a_repetition_penalty_have_the_target_distribution(name: str) -> None:
    counts = _counts(TREES[name], SETTINGS[-1], RUNS)
    probs = probs_of_continuations(_model(), PROMPT, 3, **SETTINGS[-1])
    assert set(counts) <= set(probs)
    assert p_value(counts, probs) > THRESHOLD


@pytest.mark.parametrize("name", [pytest.param("deterministic", marks=pytest.mark.slow), "sampled"])
def test_a_planted_bias_of_two_percent_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Sampling.processed_probs

    def biased(sampling: Sampling, logits: Tensor) -> Tensor:
        probs = original(sampling, logits)
        towards_one = torch.zeros_like(probs).index_fill_(1, torch.tensor([5]), 0.02)
        return 0.98 * probs + towards_one

    monkeypatch.setattr(Sampling, "processed_probs", biased)
    counts = _counts(TREES[name], SETTINGS[1], RUNS)
    assert p_value(counts, probs_of_continuations(_model(), PROMPT, 3, **SETTINGS[1])) < THRESHOLD
