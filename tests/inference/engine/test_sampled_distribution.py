"""Sampled sequences have the target's processed distribution: chi-square over whole requests."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from helpers.chi_square import p_value, probs_of_continuations
from helpers.models import tiny_drafter, tiny_llama
from helpers.quick import mostly_slow
from torch import Tensor
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.sampling.options import Sampling
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
THRESHOLD = 0.001 / (len(TREES) * len(SETTINGS))
BATCH = 2_500


@dataclass(frozen=True)
class Experiment:
    """A target and the number of times that it continues the prompt by three tokens."""

    vocab: int
    spread: float  # standard deviation of the target's weights
    runs: int
    biased_token: int

    @property
    def model(self) -> LlamaForCausalLM:
        """The target."""
        return tiny_llama(vocab=self.vocab, initializer_range=self.spread)

    def counts(self, tree: TreeShape, sampling: dict[str, float]) -> Counter[tuple[int, ...]]:
        """Return how often each continuation occurs."""
        decoder = SpeculativeDecoder(self.model, tiny_drafter(TargetAdapter(self.model)), tree=tree)
        counts: Counter[tuple[int, ...]] = Counter()
        for seed in range(self.runs // BATCH):
            outputs = decoder.generate_batch(
                [PROMPT] * BATCH, seed=seed, max_new_tokens=3, **sampling
            )
            counts.update(tuple(output.new_token_ids) for output in outputs)
        return counts

    def p_value(self, tree: TreeShape, sampling: dict[str, float]) -> float:
        """Return the p-value of the counts; 0 if there is a continuation of probability 0."""
        counts = self.counts(tree, sampling)
        probs = probs_of_continuations(self.model, PROMPT, 3, **sampling)
        return p_value(counts, probs) if set(counts) <= set(probs) else 0.0


# Few tokens, so that a quarter of the runs shows a bias, above all on the least likely token.
SMALL = Experiment(vocab=7, spread=0.3, runs=5_000, biased_token=0)
# More tokens than top_k keeps, and distributions so wide that some drafts are rejected.
LARGE = Experiment(vocab=23, spread=0.15, runs=20_000, biased_token=5)
LARGER = replace(LARGE, runs=40_000)  # with fewer runs, some seeds do not show a bias


@pytest.mark.parametrize("name", mostly_slow(TREES, quick=["sampled"]))
def test_sampled_sequences_of_few_tokens_have_the_target_distribution(name: str) -> None:
    assert SMALL.p_value(TREES[name], {"temperature": 1.0, "top_p": 0.9}) > THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_sampled_sequences_have_the_target_distribution(
    name: str, sampling: dict[str, float]
) -> None:
    assert LARGE.p_value(TREES[name], sampling) > THRESHOLD


@pytest.mark.parametrize(
    ("name", "experiment"),
    [
        ("sampled", SMALL),
        *(pytest.param(name, LARGER, marks=pytest.mark.slow) for name in TREES),
    ],
    ids=["sampled-few", *TREES],
)
def test_a_planted_bias_of_two_percent_is_caught(
    name: str, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Sampling.processed_probs

    def biased(sampling: Sampling, logits: Tensor) -> Tensor:
        probs = original(sampling, logits)
        towards_one = torch.zeros_like(probs)
        towards_one[:, experiment.biased_token] = 0.02
        return 0.98 * probs + towards_one

    monkeypatch.setattr(Sampling, "processed_probs", biased)
    counts = experiment.counts(TREES[name], SETTINGS[1])
    probs = probs_of_continuations(experiment.model, PROMPT, 3, **SETTINGS[1])
    assert set(counts) <= set(probs)
    assert p_value(counts, probs) < THRESHOLD
