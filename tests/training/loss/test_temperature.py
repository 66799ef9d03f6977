"""The token loss compares the distributions of target and drafter at a temperature."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.target_states import offline_run, with_drafter, write_target_states
from helpers.training import batch_for, curve, tiny_run, tiny_training
from helpers.variants import FEEDBACK, OWN, VARIANTS
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from inference.sampling.options import Sampling
from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import ConfigError
from jakiro.experts import joint_log_probs
from jakiro.target.adapter import TargetAdapter
from training.loss.heads import Heads
from training.loss.normalizers import normalizers_of
from training.loss.positions import Examples
from training.loss.settings import TokenLoss
from training.loss.views import TargetView
from training.loss.vocab_losses import compare_distributions, token_losses
from training.module import TargetReader
from training.train import train

DRAFTED = VARIANTS["draft-vocabulary"]
SETTINGS = {
    "whole-vocabulary": tiny_settings(trunk=FEEDBACK),
    "draft-vocabulary": tiny_settings(trunk=FEEDBACK, draft_vocab_size=23),
    "own-head": tiny_settings(trunk=FEEDBACK, draft_vocab_size=23, **OWN),
}


def _heads(settings: DrafterSettings) -> Heads:
    target = TargetAdapter(tiny_llama().requires_grad_(False))
    return Heads.of(tiny_drafter(target, settings).draft_head(target))


def _examples(count: int, router: Tensor) -> Examples:
    return Examples(
        features=torch.randn(count, 1, 2, 32, requires_grad=True),
        log_weights=router.log_softmax(-1),
        gate=router.softmax(-1),
        targets=torch.randn(count, 1, 32),
        next_tokens=torch.randint(0, 23, (count, 1)),
        valid=torch.ones(count, 1, dtype=torch.bool),
        weight=torch.ones(count),
        sequence_sizes=(count,),
        indices=torch.arange(count),
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["cross_entropy", "kl", "reverse_kl", "total_variation"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_distributions_are_those_that_decoding_samples_from(
    settings: DrafterSettings, kind: TokenLoss, temperature: float
) -> None:
    heads, router = _heads(settings), torch.randn(9, 2, requires_grad=True)
    examples = _examples(9, router)
    inputs = (examples.features, router)
    importance = torch.rand(9, 1)
    got, _ = compare_distributions(examples, importance, heads.at(temperature), kind, 4)
    warper = TemperatureLogitsWarper(temperature)
    sampling = Sampling(LogitsProcessorList([warper]), do_sample=True)
    logits = heads.target(examples.targets[:, 0])
    target = sampling.processed_probs(logits.clone()).log()
    if heads.token_ids is not None:
        target = target[:, heads.token_ids]
    joint = joint_log_probs(heads.draft(examples.features[:, 0]), examples.log_weights)
    draft = sampling.processed_draft(joint.logsumexp(dim=1))
    expected = (token_losses(kind, target.float(), draft) * importance[:, 0]).sum()
    torch.testing.assert_close(got, expected)
    slopes = (torch.autograd.grad(own, inputs, retain_graph=True) for own in (got, expected))
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_most_likely_token_is_learned_at_temperature_0(settings: DrafterSettings) -> None:
    heads, examples = _heads(settings).at(0), _examples(40, torch.randn(40, 2))
    importance = torch.ones(40, 1)
    total, results = compare_distributions(examples, importance, heads, "cross_entropy", 7)
    best = heads.target(examples.targets[:, 0]).argmax(dim=-1)
    joint = joint_log_probs(heads.draft(examples.features[:, 0]), examples.log_weights)
    draft = joint.logsumexp(dim=1)
    if heads.token_ids is not None:
        whole = torch.zeros(40, 61)  # no loss where the token is not in the draft vocabulary
        draft = whole.index_copy(1, heads.token_ids, draft)
    expected = -draft.gather(1, best[:, None]).sum()
    torch.testing.assert_close(total, expected)
    assert torch.equal(results.target_best[:, 0], best)


def test_the_loss_at_temperature_0_is_finite_where_nothing_can_be_drafted() -> None:
    heads = Heads(lambda rows: rows, lambda rows: rows[:, :, :2], torch.tensor([0, 1])).at(0)
    logits = torch.tensor([[0.0, 0.0, 5.0]])
    drafted, best = heads.log_probs_of_target(logits, None)
    assert best.item() == 2
    certain = torch.tensor([[0.5, 0.5]]).log()
    losses = [token_losses(kind, drafted, certain).item() for kind in ("cross_entropy", "kl")]
    assert losses == [0, 0]
    assert token_losses("total_variation", drafted, certain).item() == 1


@pytest.mark.parametrize("temperature", [0, 0.5])
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


@pytest.mark.parametrize("temperature", [0, 0.5])
def test_a_run_with_states_on_disk_has_the_curve_of_one_without(
    workshop: Path, temperature: float
) -> None:
    changes: dict[str, Any] = {"steps": 3, "evaluation": {"num_prompts": 0}}
    changes["objective"] = {"token_temperature": temperature}
    online = with_drafter(tiny_run(workshop, run_folder=str(workshop / "on"), **changes), DRAFTED)
    offline = with_drafter(offline_run(workshop, **changes), DRAFTED)
    write_target_states(offline)
    for settings in (online, offline):
        train(settings)
    assert curve(offline) == pytest.approx(curve(online), rel=1e-4)
    changes["objective"] = {}
    at_one = with_drafter(tiny_run(workshop, run_folder=str(workshop / "1"), **changes), DRAFTED)
    train(at_one)
    assert curve(at_one) != pytest.approx(curve(online), rel=1e-3)


def test_a_drafter_learns_the_most_likely_tokens() -> None:
    tiny = tiny_training(tiny_settings(2, parallel_levels=0))
    batch = batch_for(tiny_settings(2, parallel_levels=0), [24])
    only = {"feature_weight": 0.0, "contrast_weight": 0.0, "balance_weight": 0.0}
    optimizer = torch.optim.AdamW(tiny.drafter.parameters(), lr=1e-2)
    for _ in range(40):
        terms = tiny.loss(batch, token_weight=1.0, token_temperature=0, **only)
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
    assert terms.correct.sum() > 0.9 * terms.level_count.sum()


def test_a_divergence_from_a_certain_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token_temperature above 0"):
        tiny_run(tmp_path, objective={"token_temperature": 0, "token_loss": "reverse_kl"})
