"""Integer weights sum exactly to their total, and are close to the probabilities."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from inference.sampling.integer_distribution import TOTAL, probabilities, quantized


@given(probs=arrays(np.float64, (2, 7), elements=st.floats(0, 1e6)))
def test_weights_sum_exactly_and_are_off_by_less_than_one(probs: np.ndarray) -> None:
    probs[:, 0] += 1e-3
    weights = quantized(probs)
    assert (weights.sum(axis=-1) == TOTAL).all()
    assert (np.abs(weights - TOTAL * probs / probs.sum(axis=-1, keepdims=True)) < 1).all()
    assert (weights >= 0).all()
    assert (weights[probs == 0] == 0).all()


def test_quantized_distributions_stay_the_same() -> None:
    weights = np.array([[TOTAL - 3, 2, 1, 0], [TOTAL, 0, 0, 0]])
    assert quantized(probabilities(weights)).tolist() == weights.tolist()


def test_equal_remainders_go_to_the_first_tokens() -> None:
    assert quantized(np.ones(3)).tolist() == [10923, 10923, 10922]


@pytest.mark.parametrize(
    "wrong", [[0.0, 0.0], [-0.1, 1.1], [float("nan"), 1.0], [float("inf"), 1.0]]
)
def test_no_distribution_is_refused(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="finite probabilities"):
        quantized(np.array(wrong))
