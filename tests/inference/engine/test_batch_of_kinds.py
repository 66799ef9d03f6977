"""Sequences of a batch that sample in different ways each have their own distribution."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.chi_square import p_value, probs_of_continuations
from helpers.losslessness import LEAST_P_VALUE, LENGTH, SHAPES, tiny_decoder
from helpers.quick import mostly_slow

from inference import SpeculativeDecoder

PROMPT = [1, 2, 1, 2, 1]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_k": 3},
]
SAMPLES = 400  # of each kind


def _p_values(decoder: SpeculativeDecoder, kinds: Sequence[dict[str, Any]] = KINDS) -> list[float]:
    first, *others = kinds
    prompts = [PROMPT] * SAMPLES
    run = decoder.start(prompts, seed=1, max_new_tokens=LENGTH, **first)
    for seed, kind in enumerate(others, start=2):
        decoder.admit(run, prompts, seed=seed, max_new_tokens=LENGTH, **kind)
    tokens = [tuple(state.new_token_ids) for state in run.finish().sequences]
    values = []
    for number, kind in enumerate(kinds):
        counts = Counter(tokens[number * SAMPLES : (number + 1) * SAMPLES])
        probs = probs_of_continuations(decoder.target.model, PROMPT, LENGTH, **kind)
        values.append(p_value(counts, probs) if set(counts) <= set(probs) else 0.0)
    return values


@pytest.mark.parametrize("name", mostly_slow(SHAPES, quick=["sampled"]))
def test_every_sequence_keeps_its_own_distribution(name: str) -> None:
    assert min(_p_values(tiny_decoder(SHAPES[name]))) > LEAST_P_VALUE
