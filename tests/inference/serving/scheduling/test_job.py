"""Readers of a job get every step once, and its end as often as they ask."""

from collections.abc import Callable
from itertools import islice

import pytest
from helpers.lanes import Work, requests_of
from helpers.models import tiny_llama

from inference import SpeculativeDecoder
from inference.engine.decode_step import DecodeStep
from inference.serving.scheduling.job import EngineCall, Job
from jakiro.errors import EngineStopped, JakiroError, PromptError


@pytest.fixture
def job() -> Job:
    decoder = SpeculativeDecoder(tiny_llama(vocab=11))
    return Job(requests_of(decoder, Work([1, 2], 0, {"temperature": 0, "max_new_tokens": 9}), 1))


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


def test_steps_that_were_taken_before_an_error_are_returned_first(job: Job) -> None:
    for token in (1, 2):
        job.deliver(_step(token))
    job.end(EngineStopped("the engine has stopped"))
    assert [step.token_ids for step in job.poll()] == [[1], [2]]
    for _ in range(2):
        with pytest.raises(JakiroError):
            job.poll()


def test_a_job_can_be_submitted_once(job: Job) -> None:
    job.claim()
    with pytest.raises(PromptError, match="submitted twice"):
        job.claim()


def test_the_end_of_the_thread_is_not_swallowed() -> None:
    def ends() -> None:
        raise SystemExit

    call = EngineCall(ends)
    with pytest.raises(SystemExit):
        call.run()
    assert isinstance(call.future.exception(0), SystemExit)


@pytest.mark.parametrize("end", [EngineCall.run, lambda call: call.fail(ValueError())])
def test_a_cancelled_function_does_not_run(end: Callable[[EngineCall[None]], None]) -> None:
    ran: list[int] = []
    call = EngineCall(lambda: ran.append(1))
    call.future.cancel()
    end(call)
    assert not ran
    assert call.future.cancelled()


def test_a_function_that_will_not_run_raises_the_reason() -> None:
    call = EngineCall(lambda: 3)
    call.fail(ValueError("stopped"))
    with pytest.raises(ValueError, match="stopped"):
        call.future.result(0)
