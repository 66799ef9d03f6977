"""The token loss compares the distributions of target and drafter at a temperature."""

from collections.abc import Iterator

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.training import batch_for, examples_of, tiny_training
from helpers.variants import FEEDBACK, OWN
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from inference.sampling.options import Sampling, processed_draft_of
from jakiro.drafter_settings import DrafterSettings
from jakiro.experts import joint_log_probs, posterior_log_weights
from jakiro.target.adapter import TargetAdapter
from training.loss.batch import Examples, TargetView
from training.loss.heads import Heads, normalizers_of
from training.loss.settings import TokenLoss
from training.loss.vocab_losses import at_token, compare_distributions, token_losses
from training.module import TargetReader

SETTINGS = {
    "whole-vocabulary": tiny_settings(trunk=FEEDBACK),
    "draft-vocabulary": tiny_settings(trunk=FEEDBACK, draft_vocab_size=23),
    "own-head": tiny_settings(trunk=FEEDBACK, draft_vocab_size=23, **OWN),
}


def _heads(settings: DrafterSettings) -> Heads:
    """Return heads with a draft vocabulary of any tokens."""
    target = TargetAdapter(tiny_llama().requires_grad_(False))
    drafter = tiny_drafter(target, settings)
    if drafter.draft_ids is not None:
        drafter.draft_ids.copy_(torch.randperm(61)[: len(drafter.draft_ids)].sort().values)
    return Heads.of(drafter.draft_head(target))


def _examples(count: int, levels: int) -> tuple[Examples, Tensor]:
    """Return examples, and the logits of their routers."""
    router = torch.randn(count, 2, requires_grad=True)
    features = torch.randn(count, levels, 2, 32, requires_grad=True)
    targets, tokens = torch.randn(count, levels, 32), torch.randint(0, 52, (count, levels))
    examples = examples_of(features, router.log_softmax(-1), targets, tokens)
    return examples, router


def _expected(
    heads: Heads, examples: Examples, kind: TokenLoss, sampling: Sampling
) -> Iterator[Tensor]:
    """Yield the losses of each level between the distributions that decoding compares."""
    weights = examples.log_weights
    for level in range(examples.features.shape[1]):
        target = sampling.processed_probs(heads.target(examples.targets[:, level]).clone())
        if heads.token_ids is not None:
            target = target[:, heads.token_ids]
        joint = joint_log_probs(heads.draft(examples.features[:, level]), weights)
        draft = processed_draft_of([sampling], joint.logsumexp(dim=1))
        lowest = torch.finfo(torch.float32).min
        yield token_losses(kind, target.float().log().clamp(min=lowest), draft.clamp(min=lowest))
        of_text = at_token(joint, examples.next_tokens[:, level], heads.token_ids)
        weights = posterior_log_weights(of_text, weights)


@pytest.mark.parametrize(
    ("name", "kind", "temperature"),
    [
        ("whole-vocabulary", "cross_entropy", 0.0),
        ("draft-vocabulary", "kl", 0.5),
        ("own-head", "kl", 1.0),
        ("draft-vocabulary", "reverse_kl", 2.0),
        ("own-head", "total_variation", 0.0),
    ],
)
def test_the_distributions_are_those_of_decoding(
    name: str, kind: TokenLoss, temperature: float
) -> None:
    heads = _heads(SETTINGS[name])
    examples, router = _examples(29, 3)
    importance = torch.rand(29, 3)
    got, results = compare_distributions(examples, importance, heads.at(temperature), kind, 4)
    warpers = [TemperatureLogitsWarper(temperature)] if temperature else []
    sampling = Sampling(LogitsProcessorList(warpers), do_sample=temperature > 0)
    losses = torch.stack(list(_expected(heads, examples, kind, sampling)), dim=1)
    torch.testing.assert_close(results.token_loss, losses.detach(), rtol=1e-4, atol=1e-5)
    expected, inputs = (losses * importance).sum(), (examples.features, router)
    slopes = (torch.autograd.grad(own, inputs, retain_graph=True) for own in (got, expected))
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_only_the_token_loss_depends_on_the_temperature() -> None:
    settings = tiny_settings(2, parallel_levels=1)
    tiny, batch = tiny_training(settings), batch_for(settings, [10, 11], [24])
    others = {"multiple_choice_weight": 0.5, "accepted_length_weight": 0.5}
    at_half, at_one = (
        tiny.loss(batch, token_temperature=temperature, **others)._asdict()
        for temperature in (0.5, 1.0)
    )
    for name in at_one:
        is_equal = torch.equal(at_half[name], at_one[name])
        assert is_equal == (name not in ("total", "token")), name


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_known_normalizers_change_no_loss_and_no_gradient(temperature: float) -> None:
    settings = tiny_settings(2, parallel_levels=2, draft_vocab_size=23)
    tiny, batch = tiny_training(settings), batch_for(settings, [10, 11], [24])
    reader, module = tiny.reader(24), tiny.module(token_temperature=temperature)
    computing = tiny.reader(24)
    computing.heads = computing.heads._replace(target_drafted=None)  # so that none are shared
    view = tiny.view(batch)
    stored = normalizers_of(view.features, batch.documents >= 0, reader.heads.target, 5)

    def results(view: TargetView, reader: TargetReader) -> list[Tensor]:
        terms = module(view, batch, reader)
        slopes = tiny.gradients(terms.total)
        return [terms.total.detach(), *(slope for slope in slopes if slope is not None)]

    expected = results(view, computing)
    for own in (view, view._replace(normalizers=stored)):
        torch.testing.assert_close(results(own, reader), expected, rtol=1e-4, atol=1e-5)
