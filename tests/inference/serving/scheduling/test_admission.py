"""Limits of the numbers of sequences that run, are prepared, and wait."""

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from inference.serving.answers.reply import Reply
from inference.serving.api_error import ApiError
from inference.serving.scheduling.admission import Admission
from inference.serving.scheduling.decoding_options import DecodingOptions


def _reply(count: int, lane: int = 0, user: str = "") -> Any:
    async def made() -> Reply:
        return Reply(["a"] * count, DecodingOptions(), lane=lane, user=user)

    return asyncio.run(made())


def test_room_is_freed_by_the_end_of_a_job_or_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admission = Admission(places=1, queue=2)
    first = _reply(2)
    with ExitStack() as running:
        running.enter_context(admission.admitted(first))
        running.enter_context(admission.admitted(_reply(1)))
        running.enter_context(admission.admitted(_reply(3, lane=1)))
        refused = admission.admitted(_reply(1))
        with pytest.raises(ApiError, match="too many requests are waiting") as info, refused:
            pass
        assert info.value.status == 429
        # As if its jobs had ended, although their reader has not taken all of their text.
        monkeypatch.setattr(first, "prompts", [])
        with admission.admitted(_reply(2)):
            pass
        with admission.admitted(_reply(2)):
            pass


def test_a_user_cannot_take_the_room_of_the_others() -> None:
    admission = Admission(places=2, queue=3, has_several_users=True)
    with ExitStack() as running:
        running.enter_context(admission.admitted(_reply(1, user="one")))
        with admission.admitted(_reply(2, user="one")):
            refused = admission.admitted(_reply(1, user="one"))
            with pytest.raises(ApiError, match="of this key; expected: at most 3") as info, refused:
                pass
            assert info.value.status == 429
            running.enter_context(admission.admitted(_reply(3, lane=1, user="one")))
            running.enter_context(admission.admitted(_reply(2, user="other")))
            nothing_left = admission.admitted(_reply(1, user="other"))
            with pytest.raises(ApiError), nothing_left:
                pass
        with admission.admitted(_reply(1, user="one")):
            pass
        never = admission.admitted(_reply(4, user="third"))
        with pytest.raises(ApiError, match="at most 3; got: 4") as info, never:
            pass
        assert info.value.status == 400


def test_the_time_after_which_to_try_again_follows_the_duration_of_requests() -> None:
    admission = Admission(places=2, queue=4)
    for _ in range(50):
        admission.observe(5.0)
    with admission.admitted(_reply(6)), pytest.raises(ApiError) as info:
        admission.admitted(_reply(1)).__enter__()
    assert info.value.headers == {"retry-after": "15"}
