"""The sessions of a server by their ids."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.remote import opening

from inference.remote.messages import OpenSession, SessionOpened
from inference.remote.step_book import StepBook
from inference.serving.api_error import ApiError
from inference.serving.remote.registry import SessionRegistry


def _status(registry: SessionRegistry, user: str, session_id: str) -> int:
    with pytest.raises(ApiError) as found:
        registry.find(user, session_id)
    return found.value.status


def test_a_session_belongs_to_its_user() -> None:
    registry, user, other = SessionRegistry(2, 2), "one", "other"
    session = registry.add(user, "a")
    assert registry.find(user, session.id) is session
    assert _status(registry, other, session.id) == 404
    assert registry.of_text(user, "a") is session
    assert registry.of_text(other, "a") is None


def test_an_ended_session_is_gone_for_its_user_only() -> None:
    registry, user = SessionRegistry(2, 2), "one"
    session = registry.add(user, "a")
    registry.end(session)
    registry.end(session)
    assert session.is_ended
    assert (_status(registry, user, session.id), _status(registry, "third", session.id)) == (
        410,
        404,
    )
    assert len(registry) == 0


def test_sessions_are_limited_for_each_user_and_for_all() -> None:
    registry, user = SessionRegistry(3, 2), "one"
    first, _ = registry.add(user, "a"), registry.add(user, "b")
    with pytest.raises(ApiError, match="2 sessions of this key"):
        registry.add(user, "c")
    registry.add("third", "a")
    with pytest.raises(ApiError, match="3 sessions of all keys") as found:
        registry.add("third", "a")
    assert (found.value.status, found.value.headers["retry-after"]) == (429, "5")
    registry.end(first)
    registry.add(user, "c")


def test_few_requests_to_a_session_may_wait() -> None:
    session = SessionRegistry(1, 1).add("third", "a")
    with session.answering(), session.answering(), session.answering(), session.answering():
        with pytest.raises(ApiError, match="4 requests"), session.answering():
            pass
        assert session.num_requests == 4
    assert session.num_requests == 0


REQUEST = OpenSession(prompt=[0], seed=0, max_tokens=9)


def test_a_session_answers_only_the_request_that_opened_it_and_only_before_a_step() -> None:
    async def opened() -> SessionOpened:
        return opening()

    async def check() -> None:
        session: Any = SessionRegistry(1, 1).add("third", REQUEST.text_id)
        assert not session.answers(REQUEST)
        session.begin(REQUEST, asyncio.ensure_future(opened()))
        assert session.answers(REQUEST)
        assert not session.answers(REQUEST.model_copy(update={"seed": 1}))
        await session.opening
        book = StepBook()
        session.verification = SimpleNamespace(book=book)
        assert session.answers(REQUEST)
        book.next_step = 2
        assert not session.answers(REQUEST)
        book.next_step = 1
        book.close()  # as after a step that has failed
        assert not session.answers(REQUEST)

    asyncio.run(check())


def test_an_ended_session_counts_until_its_opening_ends() -> None:
    async def check() -> None:
        registry, user = SessionRegistry(2, 1), "third"
        allowed = asyncio.Event()

        async def opened() -> SessionOpened:
            await allowed.wait()
            return opening()

        session = registry.add(user, "a")
        session.begin(REQUEST, asyncio.ensure_future(opened()))
        registry.end(session)
        with pytest.raises(ApiError, match="1 sessions of this key"):
            registry.add(user, "a")
        other = registry.add("fourth", "a")
        with pytest.raises(ApiError, match="2 sessions of all keys"):
            registry.add("fifth", "a")
        allowed.set()
        assert session.opening is not None
        await session.opening
        registry.add(user, "a")
        registry.end(other)

    asyncio.run(check())
