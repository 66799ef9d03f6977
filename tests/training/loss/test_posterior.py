"""Losses of parallel levels weight experts by their posterior given the true next tokens."""

import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.training import one_document

from jakiro.target.adapter import TargetAdapter
from training.loss.drafting import draft_all_positions
from training.loss.objectives import Goals, drafter_loss
from training.loss.settings import ObjectiveSettings
from training.module import TargetReader


@torch.no_grad()
def test_token_losses_of_parallel_levels_equal_a_brute_force_sum() -> None:
    target = TargetAdapter(tiny_llama())
    drafter = tiny_drafter(target, tiny_settings(parallel_levels=2))
    count = 9
    batch = one_document(torch.randint(0, 61, (1, count)), (torch.arange(count) - 1).clamp(min=0))
    reader = TargetReader(target, drafter, count, torch.float32)
    view = reader.view(batch)
    output = next(iter(draft_all_positions(drafter, view, batch)))
    terms = drafter_loss(output, Goals(view.features), batch, 0, reader.heads, ObjectiveSettings())

    probs = target.logits(output.features[0]).softmax(-1)  # [position, level, expert, vocab]
    wanted = target.logits(view.features[0]).softmax(-1)
    tokens = batch.token_ids[0]
    expected = torch.zeros(3)
    for position in range(1, count):  # the first position has no anchor before it
        weights = output.log_weights[0, position].exp()
        for level in range(3):
            if position + level + 1 >= count:
                break
            blended = weights @ probs[position, level]
            expected[level] -= (wanted[position + level] * blended.log()).sum()
            weights = weights * probs[position, level, :, tokens[position + level + 1]]
            weights = weights / weights.sum()
    torch.testing.assert_close(terms.token, expected, atol=1e-3, rtol=1e-4)
