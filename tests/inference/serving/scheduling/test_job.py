"""Readers of a job get every step once, and its end as often as they ask."""

from itertools import islice

import pytest
from helpers.lanes import Work, lane_of, requests_of
from helpers.models import tiny_llama

from inference import SpeculativeDecoder
from inference.engine.decode_step import DecodeStep
from inference.serving.scheduling.job import Job
from jakiro.errors import EngineStopped


@pytest.fixture
def job() -> Job:
    decoder = SpeculativeDecoder(tiny_llama(vocab=11))
    requests = requests_of(decoder, Work([1, 2], 0, {"temperature": 0, "max_new_tokens": 9}), 1)
    return Job(requests, lane_of(decoder, requests[0]))


def _step(token: int, *, finished: bool = False) -> DecodeStep:
    return DecodeStep([token], [0], finished)


def test_the_error_of_a_job_is_raised_in_every_iteration(job: Job) -> None:
    job.deliver(_step(1))
    job.end(EngineStopped("the engine has stopped"))
    seen: list[list[int]] = []
    for _ in range(2):
        steps = iter(job)
        seen += [step.token_ids for step in islice(steps, 1 - len(seen))]
        with pytest.raises(EngineStopped):
            next(steps)
    assert seen == [[1]]
