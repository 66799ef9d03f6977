"""The sessions of a server by their ids."""

import pytest

from inference.serving.api_error import ApiError
from inference.serving.checks.keys import User
from inference.serving.checks.rate_limits import RateLimit
from inference.serving.remote import registry as module
from inference.serving.remote.registry import SessionRegistry


def _user(name: str = "one") -> User:
    return User(name, RateLimit())


def _status(registry: SessionRegistry, user: User, session_id: str) -> int:
    with pytest.raises(ApiError) as found:
        registry.find(user, session_id)
    return found.value.status


def test_a_session_belongs_to_its_user_even_if_another_has_the_same_name() -> None:
    registry, user, other = SessionRegistry(2, 2), _user(), _user()
    session = registry.add(user, "a")
    assert registry.find(user, session.id) is session
    assert _status(registry, other, session.id) == 404
    assert registry.of_text(user, "a") is session
    assert registry.of_text(other, "a") is None


def test_an_ended_session_is_gone_for_its_user_only() -> None:
    registry, user = SessionRegistry(2, 2), _user()
    session = registry.add(user, "a")
    registry.end(session)
    registry.end(session)
    assert session.is_ended
    assert (_status(registry, user, session.id), _status(registry, _user(), session.id)) == (
        410,
        404,
    )
    assert len(registry) == 0


def test_sessions_are_limited_for_each_user_and_for_all() -> None:
    registry, user = SessionRegistry(3, 2), _user()
    first, _ = registry.add(user, "a"), registry.add(user, "b")
    with pytest.raises(ApiError, match="2 sessions of this key"):
        registry.add(user, "c")
    registry.add(_user(), "a")
    with pytest.raises(ApiError, match="3 sessions of all keys") as found:
        registry.add(_user(), "a")
    assert (found.value.status, found.value.headers["retry-after"]) == (429, "5")
    registry.end(first)
    registry.add(user, "c")


def test_few_requests_to_a_session_may_wait() -> None:
    session = SessionRegistry(1, 1).add(_user(), "a")
    with session.answering(), session.answering(), session.answering(), session.answering():
        with pytest.raises(ApiError, match="4 requests"), session.answering():
            pass
        assert session.num_requests == 4
    assert session.num_requests == 0


def test_the_ids_of_old_sessions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_NUM_ENDED", 2)
    registry, user = SessionRegistry(1, 1), _user()
    ids = []
    for _ in range(3):
        session = registry.add(user, "a")
        ids.append(session.id)
        registry.end(session)
    assert [_status(registry, user, own) for own in ids] == [404, 410, 410]
