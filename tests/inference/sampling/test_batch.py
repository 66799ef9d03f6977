"""Sequences that are decoded together keep their own sampling options."""

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from inference.sampling.batch import BatchSampling
from inference.sampling.options import Sampling


def _sampling(temperature: float, top_p: float | None = None, do_sample: bool = True) -> Sampling:
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_p is not None:
        processors.append(TopPLogitsWarper(top_p))
    return Sampling(processors, do_sample)


GREEDY = Sampling(LogitsProcessorList(), do_sample=False)


def test_sequences_with_equal_options_form_a_group() -> None:
    each = [_sampling(0.7), GREEDY, _sampling(0.7), _sampling(0.8), GREEDY]
    groups = BatchSampling(each).groups
    assert [(sampling, indices) for sampling, indices in groups] == [
        (each[0], [0, 2]),
        (GREEDY, [1, 4]),
        (each[3], [3]),
    ]


@pytest.mark.parametrize(
    "each", [[_sampling(0.7)] * 3, [GREEDY] * 3, [_sampling(0.7), GREEDY, _sampling(1.4, 0.6)]]
)
def test_every_draft_distribution_is_processed_as_that_of_its_sequence_alone(
    each: list[Sampling],
) -> None:
    torch.manual_seed(0)
    log_probs = torch.randn(3, 4, 9).log_softmax(dim=-1)
    batch = BatchSampling(each)
    assert batch.processes_drafts == any(own.do_sample for own in each)
    processed = batch.processed_draft(log_probs.clone())
    for own, before, after in zip(each, log_probs, processed, strict=True):
        assert torch.equal(own.processed_draft(before.clone()), after)


def test_sequences_leave_and_join_with_their_options() -> None:
    each = [_sampling(0.1 * number) for number in range(1, 6)]
    kept = BatchSampling(each[:3]).of_sequences([2, 0])
    assert (kept + BatchSampling(each[3:])).each == (each[2], each[0], each[3], each[4])
    assert BatchSampling(each).of_sequences([]).groups == []
