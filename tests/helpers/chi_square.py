"""Exact distributions, computed from transformers' scores, and a chi-square test of samples."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from scipy.stats import chisquare
from transformers import PreTrainedModel

Probabilities = dict[tuple[int, ...], float]


def probs_of_continuations(
    model: PreTrainedModel, prompt: Sequence[int], length: int, **sampling: Any
) -> Probabilities:
    """Return the probability of each continuation of a prompt, from transformers' scores."""
    probs: Probabilities = {(): 1.0}
    for _ in range(length):
        longer = {}
        prefixes = list(probs)
        ids = torch.tensor([[*prompt, *prefix] for prefix in prefixes])
        step = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=0,
            max_new_tokens=1,
            do_sample=True,
            output_scores=True,
            return_dict_in_generate=True,
            **sampling,
        )
        for prefix, scores in zip(prefixes, step.scores[0], strict=True):
            shares = scores.double().softmax(-1).tolist()
            longer |= {
                (*prefix, token): probs[prefix] * share
                for token, share in enumerate(shares)
                if share > 0
            }
        probs = longer
    return probs


def p_value(counts: Counter[tuple[int, ...]], probs: Probabilities) -> float:
    """Return the p-value of a chi-square test; cells with expected counts below 5 are merged."""
    runs = counts.total()
    common = [key for key, probability in probs.items() if probability * runs >= 5]
    observed = [counts[key] for key in common]
    expected = [probs[key] * runs for key in common]
    rest = runs - sum(expected)
    if rest > 1e-6 * runs:
        observed.append(runs - sum(observed))
        expected.append(rest)
    return float(chisquare(observed, expected).pvalue)
