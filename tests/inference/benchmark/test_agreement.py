"""Agreement and tau of a drafter are measured on greedy continuations."""

import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings

from inference.benchmark.agreement import measure_agreement
from jakiro.target.adapter import TargetAdapter


@torch.no_grad()
def test_a_drafter_that_always_drafts_the_right_token_agrees_everywhere() -> None:
    model = tiny_llama(vocab=5)
    model.lm_head.weight.zero_()  # all tokens are equally likely, and the first one is chosen
    settings = tiny_settings(1, "sum", 0, autoregressive_levels=3, draft_vocab_size=1)
    measured = measure_agreement(
        model, tiny_drafter(TargetAdapter(model), settings), None, [[1, 2], [3]], 8
    )
    assert (measured.agreement, measured.floor) == (1.0, 1.0)
    assert measured.chain_tau == measured.tau
    assert 2 < measured.tau <= 4
    assert not measured.is_above_floor
    assert "agreement 100.0%" in str(measured)


@torch.no_grad()
def test_a_random_drafter_agrees_seldom() -> None:
    model = tiny_llama()
    measured = measure_agreement(model, tiny_drafter(TargetAdapter(model)), None, [[1, 2, 3]], 12)
    assert measured.agreement < 0.5
    assert measured.num_prompts == 1
    assert 0 < measured.num_steps <= 11
