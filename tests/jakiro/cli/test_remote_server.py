"""The keys of servers are read from the environment."""

import pytest

from jakiro.cli.remote_server import KEY_VARIABLE, keys_in_environment, server_key


@pytest.mark.parametrize(
    ("value", "keys"), [("first, second", ("first", "second")), (" only ,", ("only",)), (" ", ())]
)
def test_keys_are_separated_by_commas_and_spaces_around_them_do_not_count(
    value: str, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, value)
    assert keys_in_environment() == keys
    assert server_key() == (keys[0] if keys else None)
    monkeypatch.delenv(KEY_VARIABLE)
    assert keys_in_environment() == ()
