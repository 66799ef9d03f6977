"""Tests of the random numbers of decoding steps."""

import numpy as np
import pytest
import torch

from inference.sampling.random_numbers import StepRandom, random_stream

KEYS = [(5, 0, 0, 3), (5, 1, 0, 3)]


def test_keys_that_agree_in_their_lower_bits_have_different_numbers() -> None:
    keys = [(5,), (5 + (1 << 32),), (5 + (1 << 64),), (5 + (1 << 128),), (-5,), (5, 0), (0, 5)]
    firsts = [random_stream(*key).random() for key in keys]
    assert len(set(firsts)) == len(keys)


def test_the_numbers_of_a_key_never_change() -> None:
    expected = [0.08822315, 0.91753575]
    np.testing.assert_allclose(random_stream(1, 2, 3).random(2), expected, rtol=1e-7)


def test_more_numbers_begin_with_the_same_numbers() -> None:
    few, many = StepRandom(KEYS), StepRandom(KEYS)
    assert torch.equal(few.uniforms(3), many.uniforms(9)[:, :3])
    one, two = few.exponentials([(1, 4)]), many.exponentials([(1, 4), (3, 4)])
    assert torch.equal(one[0], two[0])


@pytest.mark.parametrize("prepared", [0, 4, 9])
def test_uniform_numbers_do_not_depend_on_whether_noise_was_requested(prepared: int) -> None:
    random = StepRandom(KEYS, num_uniforms=prepared)
    random.exponentials([(1, 4), (2, 4)])
    assert torch.equal(random.uniforms(6), StepRandom(KEYS).uniforms(6))


def test_numbers_do_not_depend_on_the_other_sequences() -> None:
    both, alone = StepRandom(KEYS), StepRandom(KEYS[1:])
    assert torch.equal(both.uniforms(4)[1:], alone.uniforms(4))
    assert torch.equal(both.exponentials([(2, 3)])[0][1:], alone.exponentials([(2, 3)])[0])


def test_noise_is_exponential_and_independent_of_the_uniform_numbers() -> None:
    random = StepRandom([(seed,) for seed in range(200)], num_uniforms=50)
    (noise,) = random.exponentials([(1, 50)])
    uniform = random.uniforms(50)
    for quantile in (0.1, 0.5, 0.9):
        share = (noise < -np.log1p(-quantile)).double().mean().item()
        assert share == pytest.approx(quantile, abs=0.02)
        assert (uniform < quantile).double().mean().item() == pytest.approx(quantile, abs=0.02)
    both = torch.stack((noise.flatten(), uniform.flatten()))
    assert abs(float(both.corrcoef()[0, 1])) < 0.04
