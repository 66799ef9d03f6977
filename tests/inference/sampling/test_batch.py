"""Sequences that are decoded together keep their own sampling options."""

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from inference.sampling.batch import BatchSampling, Kind
from inference.sampling.options import Sampling, processed_draft_of


def _sampling(temperature: float, top_p: float | None = None, do_sample: bool = True) -> Sampling:
    processors = LogitsProcessorList()
    if temperature != 1:  # as in transformers
        processors.append(TemperatureLogitsWarper(temperature))
    if top_p is not None:
        processors.append(TopPLogitsWarper(top_p))
    return Sampling(processors, do_sample)


GREEDY = Sampling(LogitsProcessorList(), do_sample=False)


def test_sequences_whose_options_differ_only_in_temperature_are_of_one_kind() -> None:
    each = [_sampling(0.7), GREEDY, _sampling(0.7), _sampling(0.8), GREEDY, _sampling(0.7, 0.5)]
    assert BatchSampling(each).kinds == [
        Kind((each[0], each[2], each[3]), (0, 2, 3)),
        Kind((GREEDY, GREEDY), (1, 4)),
        Kind((each[5],), (5,)),
    ]


@pytest.mark.parametrize(
    "each",
    [
        [_sampling(0.7)] * 3,
        [GREEDY] * 3,
        [_sampling(0.7), GREEDY, _sampling(1.4, 0.6)],
        [_sampling(0.7), _sampling(1.3), _sampling(0.3)],
        [_sampling(0.7, 0.5), _sampling(1.3), _sampling(0.3, 0.5)],
        [_sampling(1.0), _sampling(1.3), _sampling(1.0)],
        [_sampling(1.0, 0.5), _sampling(0.7, 0.5), _sampling(0.3, 0.5)],
    ],
)
def test_draft_distributions_in_a_batch_are_processed_as_those_of_single_sequences(
    each: list[Sampling],
) -> None:
    torch.manual_seed(0)
    log_probs = torch.randn(3, 4, 9).log_softmax(dim=-1)[:, :, :7]  # the likeliest tokens only
    batch = BatchSampling(each)
    assert batch.processes_drafts == any(own.do_sample for own in each)
    processed = batch.processed_draft(log_probs.clone())
    for own, before, after in zip(each, log_probs, processed, strict=True):
        assert torch.equal(processed_draft_of([own], before.clone()), after)


@pytest.mark.parametrize("top_p", [None, 0.5])
def test_temperatures_on_the_device_may_be_one(top_p: float | None) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 9)
    log_probs = torch.randn(3, 4, 9).log_softmax(dim=-1)[:, :, :7]
    each = [_sampling(1.0, top_p), _sampling(0.7, top_p), _sampling(1.0, top_p)]
    for several in (each, [each[0]] * 3):
        temperatures = torch.tensor([own.temperatures[0] for own in several], dtype=torch.float64)
        batch = BatchSampling(several, temperatures)
        drafts, probs = batch.processed_draft(log_probs.clone()), batch.processed_probs(logits)
        for index, own in enumerate(several):
            assert torch.equal(processed_draft_of([own], log_probs[index].clone()), drafts[index])
            assert torch.equal(own.processed_probs(logits[index : index + 1])[0], probs[index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_distributions_in_a_batch_are_processed_as_those_of_single_sequences(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 9, dtype=dtype)
    each = [_sampling(0.7), _sampling(1.0, 0.6), _sampling(1 / 3), _sampling(0.7, 0.6)]
    processed = BatchSampling(each).processed_probs(logits)
    for own, before, after in zip(each, logits, processed, strict=True):
        assert torch.equal(own.processed_probs(before[None])[0], after)


def test_sequences_leave_and_join_with_their_options() -> None:
    each = [_sampling(0.1 * number) for number in range(1, 6)]
    kept = BatchSampling(each[:3]).of_sequences([2, 0])
    assert (kept + BatchSampling(each[3:])).each == (each[2], each[0], each[3], each[4])
    assert BatchSampling(each).of_sequences([]).kinds == []
