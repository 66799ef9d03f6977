"""API keys."""

import hmac
from hashlib import sha256
from pathlib import Path

import pytest

from inference.serving.checks.keys import ApiKeys, new_key, read_keys
from jakiro.errors import ConfigError


def test_without_keys_everybody_is_accepted() -> None:
    assert ApiKeys().user_of("")


@pytest.mark.parametrize(
    "sent", ["", "Bearer", "Bearer secret-", "Bearer secret-11", "Basic secret-1", "secret-1"]
)
def test_other_keys_are_refused(sent: str) -> None:
    keys = ApiKeys(keys=["secret-1", "secret-2"])
    assert not keys.user_of(sent)
    assert not keys.user_of("Bearer " + "x" * 10_000)
    assert not keys.user_of("Bearer \xff\xfe")
    assert keys.user_of("Bearer secret-1")
    assert keys.user_of("bearer secret-2")


@pytest.mark.parametrize(
    "key", ["schlüssel-1", "key\udcff-1234", "key\n-1234", " secret-1", "ключ"]
)
def test_keys_that_no_client_can_send_are_refused_without_showing_them(key: str) -> None:
    with pytest.raises(ConfigError, match="characters of ASCII") as info:
        ApiKeys(keys=["secret-1", key])
    assert key not in str(info.value)


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def counted(first: bytes, second: bytes) -> bool:
        lengths.append((len(first), len(second)))
        return first == second

    keys = ApiKeys(keys=["secret-1", "secret-2", "secret-3"])
    monkeypatch.setattr(hmac, "compare_digest", counted)
    for sent in ("", "Bearer secret-1", "Bearer " + "x" * 10_000):
        lengths.clear()
        keys.user_of(sent)
        assert lengths == [(32, 32)] * 3


def test_a_file_has_the_hashes_of_named_keys(tmp_path: Path) -> None:
    key, digest = new_key()
    assert sha256(key.encode()).hexdigest() == digest
    assert len(key) >= 43
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n  alice: {{sha256: {digest}, tokens_per_minute: 0.5}}\n")
    path.chmod(0o600)
    keys = ApiKeys(keys=["secret-1"], named=read_keys(path))
    user = keys.user_of(f"Bearer {key}")
    assert user is not None
    assert user.name == "alice"
    assert keys.user_of(f"Bearer {digest}") is None
    other = keys.user_of("Bearer secret-1")
    assert other is not None
    assert other.rate is not user.rate


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("keys: {}", "at least 1"),
        ("keys: {alice: {sha256: my-own-key}}", "64 hexadecimal digits; got: 10 characters"),
        ("keys: {alice: {}}", "sha256"),
        ("keys: {alice: {sha256: x, rate: 3}}", "rate"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_a_key(
    tmp_path: Path, content: str, reason: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=reason) as info:
        ApiKeys(named=read_keys(path))
    assert "my-own-key" not in str(info.value)


def test_a_file_that_others_can_change_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: {{alice: {{sha256: {new_key()[1]}}}}}")
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(path)
