"""Files are whole or absent, fingerprints follow from contents, folders are checked by writing."""

import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from jakiro.errors import ConfigError
from jakiro.utils.files import (
    ensure_new_file,
    ensure_writable_folder,
    explain_failed_access,
    fingerprint,
    publish,
    write_atomically,
)


def test_an_interrupted_write_keeps_the_old_content_and_leaves_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_descriptor: int) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_fingerprint_never_changes_between_versions_or_machines() -> None:
    expected = "1ce6048b47f01bb5980b2ca83c8adf61eeb7f183557cd8564f132bb3102207a5"
    assert fingerprint({"b": [1, 2.5, None], "a": "é"}, b"raw") == expected
    assert fingerprint({"a": "é", "b": [1, 2.5, None]}, b"raw") == expected


def test_fingerprint_sees_kinds_and_where_parts_end() -> None:
    pairs = ((("ab", "c"), ("a", "bc")), ((b'"a"',), ("a",)), (([],), ()), ((1,), (True,)))
    for one, other in pairs:
        assert fingerprint(*one) != fingerprint(*other)


def test_a_folder_below_a_file_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write into the folder .*expected.*got.*remedy"):
        ensure_writable_folder(tmp_path / "file" / "folder")


def test_whoever_may_read_a_published_folder_may_read_its_files(tmp_path: Path) -> None:
    partial = tmp_path / "partial"
    (partial / "below").mkdir(parents=True)
    for path in (partial / "a", partial / "below" / "b"):
        path.touch(mode=0o600)
    partial.chmod(0o755)
    (partial / "below").chmod(0o750)
    publish(partial, tmp_path / "final")
    modes = [(tmp_path / "final" / name).stat().st_mode & 0o777 for name in ("a", "below/b")]
    assert modes == [0o644, 0o640]


def test_a_new_file_replaces_nothing_not_even_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    (tmp_path / "folder").mkdir()
    for name in ("link", "folder"):
        with pytest.raises(ConfigError, match="a path that already exists"):
            ensure_new_file(tmp_path / name, "a drafter")
    with pytest.raises(ConfigError, match="no such folder"):
        ensure_new_file(tmp_path / "missing" / "drafter", "a drafter")
    ensure_new_file(tmp_path / "new", "a drafter")


def test_full_disks_and_forbidden_paths_are_recognized_in_the_errors_of_libraries() -> None:
    with pytest.raises(OSError, match="No space") as python:
        Path("/dev/full").write_text("content")
    rust = (SafetensorError(f"I/O error: text (os error {number})") for number in (28, 13, 2))
    errors = (python.value, *rust, PermissionError(13, "Denied", "a"), ValueError("28"))
    explained = [str(explain_failed_access(error)) for error in errors]
    remedies = ["free disk space" in text or "permissions" in text for text in explained]
    assert remedies == [True, True, True, False, True, False]
    assert "free disk space" in explained[1]
    assert "cannot read or write a;" in explained[4]
