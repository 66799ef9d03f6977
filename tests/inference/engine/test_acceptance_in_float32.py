"""Batched acceptance in float32 with large vocabularies keeps the target's distribution."""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inference.engine import siblings
from inference.engine.siblings import RecordedDistribution, Siblings, Support, check_siblings

DRAFTED = 48  # ids of the draft distribution
VOCABULARIES = [49_152, 131_072]
SMALL = 1e-3  # relative error; the sum of a draft distribution in float32 is not exactly 1


@dataclass(frozen=True)
class Pair:
    """A target's and a drafter's distribution in float32; the draft ids have nearly all mass."""

    vocab: int
    noise: float

    @cached_property
    def logits(self) -> Tensor:
        """The target's logits."""
        logits = torch.randn(self.vocab, generator=torch.Generator().manual_seed(3))
        logits[:: self.vocab // DRAFTED][:DRAFTED] += 16
        return logits

    @cached_property
    def recorded(self) -> RecordedDistribution:
        """The draft distribution, for a batch of one."""
        best = self.logits.topk(DRAFTED)
        noise = torch.randn(DRAFTED, generator=torch.Generator().manual_seed(4))
        draft_probs = (best.values + self.noise * noise).softmax(dim=0)
        return RecordedDistribution(best.indices[None], draft_probs[None])

    @property
    def exact_probs(self) -> Tensor:
        """The target's probabilities in float64: draft ids, then the sum of all others."""
        return self._summed(self.logits.double().softmax(dim=0))

    def output_probs(self) -> Tensor:
        """Return the distribution of the next token below two sampled candidates, as above.

        Every pair of candidates is checked, and is weighted by the probability of sampling it.
        """
        probs = self.logits.softmax(dim=0)
        pairs = (~torch.eye(DRAFTED, dtype=torch.bool)).nonzero()
        accept, residual = self._checked(probs, pairs)
        others = self._summed(probs)[-1]
        residual = torch.cat((residual[:, :DRAFTED], others.expand(len(pairs), 1)), dim=1)
        token = F.one_hot(pairs, DRAFTED + 1)
        first, second = accept[:, :1], (1 - accept[:, :1]) * accept[:, 1:]
        output = first * token[:, 0] + second * token[:, 1]
        output += (1 - first - second) * residual / residual.sum(dim=1, keepdim=True)
        return self._weights(pairs) @ output

    def _checked(self, probs: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities of acceptance, [pairs, 2], and residuals, [pairs, draft ids + 2]."""
        nodes = torch.arange(2).expand_as(pairs)
        tokens, every = self.recorded.ids[0][pairs], torch.ones_like(nodes).bool()
        one = Support.of(probs[None], tokens[:1], self.recorded)
        several = Support(*(field.expand(len(pairs), *field.shape[1:]) for field in one))
        column = torch.cat((several.column[:, :DRAFTED], pairs), dim=1)
        siblings = Siblings(nodes, tokens, every, every)
        checks = check_siblings(several._replace(column=column), siblings)
        return checks.accept_prob.clamp(max=1), checks.residual

    def _weights(self, pairs: Tensor) -> Tensor:
        sampled = self.recorded.probs[0].double()
        first, second = sampled[pairs].unbind(dim=1)
        return first * second / (sampled.sum() - first)

    def _summed(self, probs: Tensor) -> Tensor:
        ids = self.recorded.ids[0]
        is_other = torch.ones(self.vocab, dtype=torch.bool).index_fill(0, ids, False)
        return torch.cat((probs[ids].double(), probs[is_other].double().sum()[None]))


def _relative_error(pair: Pair) -> float:
    return float((pair.output_probs() / pair.exact_probs - 1).abs().max())


@pytest.mark.parametrize("noise", [1e-4, 1.0])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_every_probability_of_the_output_is_right(vocab: int, noise: float) -> None:
    pair = Pair(vocab, noise)
    assert 0.999 < float(pair.exact_probs[:-1].sum()) < 1
    assert _relative_error(pair) < SMALL


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_an_outside_mass_of_one_minus_inside_is_caught(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_minus_inside(probs: Tensor, ids: Tensor) -> Tensor:
        return 1 - probs.gather(1, ids[:, :DRAFTED]).sum(dim=1).double()

    monkeypatch.setattr(siblings, "outside_mass", one_minus_inside)
    assert _relative_error(Pair(vocab, noise=1e-4)) > 20 * SMALL
