"""Limits of the numbers of sequences that run, are prepared, and wait."""

import pytest
from helpers.lanes import Work, requests_of
from helpers.serving import tiny_decoder

from inference.serving.api_error import ApiError
from inference.serving.scheduling.admission import Admission
from inference.serving.scheduling.job import Job


def test_room_is_freed_by_the_end_of_a_job_or_of_the_request() -> None:
    admission = Admission(places=1, queue=2)
    first = admission.admit(0, 2)
    admission.admit(0, 1)
    admission.admit(1, 3)  # another lane
    with pytest.raises(ApiError, match="too many requests are waiting") as info:
        admission.admit(0, 1)
    assert info.value.status == 429
    work = Work([1, 2], 0, {"temperature": 0, "max_new_tokens": 9})
    job = Job(requests_of(tiny_decoder(), work, 2))
    first.jobs = [job]
    with pytest.raises(ApiError):
        admission.admit(0, 1)
    job.end()  # although its reader has not taken all of its text
    again = admission.admit(0, 2)
    admission.release(again)
    admission.admit(0, 2)


def test_a_user_cannot_take_the_room_of_the_others() -> None:
    admission = Admission(places=2, queue=3, has_several_users=True)
    one, other = object(), object()
    first = admission.admit(0, 2, one)
    admission.admit(0, 1, one)
    with pytest.raises(ApiError, match="of this key; expected: at most 3") as refused:
        admission.admit(0, 1, one)
    assert refused.value.status == 429
    admission.admit(1, 3, one)  # another lane
    admission.admit(0, 2, other)
    with pytest.raises(ApiError):
        admission.admit(0, 1, other)  # nothing is left
    admission.release(first)
    admission.admit(0, 1, other)
    with pytest.raises(ApiError, match="at most 3; got: 4") as never:
        admission.admit(0, 4, object())
    assert never.value.status == 400


def test_the_time_after_which_to_try_again_follows_the_duration_of_requests() -> None:
    admission = Admission(places=2, queue=4)
    for _ in range(50):
        admission.observe(5.0)
    admission.admit(0, 6)
    with pytest.raises(ApiError) as info:
        admission.admit(0, 1)
    assert info.value.headers == {"retry-after": "15"}
