"""Agreement and tau of a drafter are measured on greedy continuations."""

import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings

from inference.benchmark.agreement import Agreement, choose_best, measure_agreement
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


def _measured(agreement: float, num_steps: int) -> Agreement:
    shared = {"floor": 0.0, "chain_tau": 1.0, "tau": 1.0, "num_prompts": 1}
    return Agreement(agreement=agreement, num_steps=num_steps, **shared)


def test_drafters_that_are_not_clearly_worse_than_the_best_one_are_named() -> None:
    few = [_measured(4 / 55, 55), _measured(5 / 54, 54)]
    assert choose_best(few) == (1, [0])
    many = [_measured(0.4, 300), _measured(0.6, 250), _measured(0.58, 250), _measured(0.1, 400)]
    assert choose_best(many) == (1, [2])
    assert choose_best(many[:2]) == (1, [])
    for certain in (0.0, 1.0):
        assert choose_best([_measured(certain, 9)] * 2) == (0, [1])
    assert not _measured(0.6, 0).is_clearly_above(_measured(0.0, 0))
