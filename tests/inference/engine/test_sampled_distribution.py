"""Sampled sequences have the target's processed distribution: chi-square over whole requests."""

from collections import Counter

import pytest
import torch
from helpers.chi_square import p_value, probs_of_continuations
from helpers.models import tiny_drafter, tiny_llama
from helpers.quick import mostly_slow
from torch import Tensor

from inference import SpeculativeDecoder
from inference.sampling.options import Sampling
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter

PROMPT = [1, 2]
TREES = {
    "deterministic": TreeShape(children=4, breadth=3, num_nodes=12),
    "sampled": TreeShape(children=3, breadth=2, sampled=True),
}
THRESHOLD = 0.0001
RUNS, BATCH = 5_000, 2_500
# Few tokens, so that a quarter of the runs shows a bias, above all on the least likely token.
MODEL = tiny_llama(vocab=7, initializer_range=0.3)


def _counts(tree: TreeShape, sampling: dict[str, float]) -> Counter[tuple[int, ...]]:
    """Return how often each continuation of three tokens occurs."""
    decoder = SpeculativeDecoder(MODEL, tiny_drafter(TargetAdapter(MODEL)), tree=tree)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(RUNS // BATCH):
        outputs = decoder.generate_batch([PROMPT] * BATCH, seed=seed, max_new_tokens=3, **sampling)
        counts.update(tuple(output.new_token_ids) for output in outputs)
    return counts


@pytest.mark.parametrize("name", mostly_slow(TREES, quick=["sampled"]))
def test_sampled_sequences_of_few_tokens_have_the_target_distribution(name: str) -> None:
    sampling = {"temperature": 1.0, "top_p": 0.9}
    counts = _counts(TREES[name], sampling)
    probs = probs_of_continuations(MODEL, PROMPT, 3, **sampling)
    assert set(counts) <= set(probs)
    assert p_value(counts, probs) > THRESHOLD


def test_a_planted_bias_of_two_percent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Sampling.processed_probs

    def biased(sampling: Sampling, logits: Tensor) -> Tensor:
        probs = original(sampling, logits)
        towards_one = torch.zeros_like(probs)
        towards_one[:, 0] = 0.02
        return 0.98 * probs + towards_one

    monkeypatch.setattr(Sampling, "processed_probs", biased)
    counts = _counts(TREES["sampled"], {"temperature": 1.0})
    probs = probs_of_continuations(MODEL, PROMPT, 3, temperature=1.0)
    assert set(counts) <= set(probs)
    assert p_value(counts, probs) < THRESHOLD
