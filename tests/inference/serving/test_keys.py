"""API keys."""

import hmac

import pytest

from inference.serving.keys import ApiKeys


def test_without_keys_everybody_is_accepted() -> None:
    assert ApiKeys([]).accept("")


@pytest.mark.parametrize(
    "sent", ["", "Bearer", "Bearer secret-", "Bearer secret-11", "Basic secret-1", "secret-1"]
)
def test_other_keys_are_refused(sent: str) -> None:
    keys = ApiKeys(["secret-1", "secret-2"])
    assert not keys.accept(sent)
    assert not keys.accept("Bearer " + "x" * 10_000)
    assert not keys.accept("Bearer \xff\xfe")
    assert keys.accept("Bearer secret-1")
    assert keys.accept("bearer secret-2")


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def counted(first: bytes, second: bytes) -> bool:
        lengths.append((len(first), len(second)))
        return first == second

    keys = ApiKeys(["secret-1", "secret-2", "secret-3"])
    monkeypatch.setattr(hmac, "compare_digest", counted)
    for sent in ("", "Bearer secret-1", "Bearer " + "x" * 10_000):
        lengths.clear()
        keys.accept(sent)
        assert lengths == [(32, 32)] * 3
