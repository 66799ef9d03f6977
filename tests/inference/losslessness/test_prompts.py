"""Prompts to verify with: built in, or from a file whose errors are reported with their line."""

from pathlib import Path

import pytest

from inference.generation.prompt_file import BUILT_IN, read_prompts
from jakiro.errors import PromptError


def test_prompts_are_read_from_lines_of_text_or_of_json(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\r\n\n  two\n{three}")
    assert read_prompts(tmp_path / "p.txt") == ["one", "  two", "{three}"]
    chat = [{"role": "user", "content": "hello"}]
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "a\\nb", "more": 1}\n\n'
        '{"prompt": [{"role": "user", "content": "hello"}]}\n'
        '{"messages": [{"role": "user", "content": "hello"}]}\n'
    )
    assert read_prompts(tmp_path / "p.jsonl") == ["a\nb", chat, chat]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"\n \n", "holds no prompts"),
        ("p.txt", b"\xff\xfe", "cannot read the prompts"),
        ("p.jsonl", b"", "holds no prompts"),
        ("p.jsonl", b'{"prompt": "a"}\nplain text\n', "p.jsonl:2 is not JSON"),
        ("p.jsonl", b'\n{"text": "a"}\n', "p.jsonl:2 has no usable prompt"),
        ("p.jsonl", b'{"prompt": ""}', "p.jsonl:1 has no usable prompt"),
        ("p.jsonl", b'{"prompt": [1, 2]}', "p.jsonl:1 has no usable prompt"),
        ("p.jsonl", b'{"messages": [{"role": "user"}]}', "p.jsonl:1 has no usable prompt"),
        ("p.json", b'["a", "b"]', "p.json:1 has no usable prompt"),
    ],
)
def test_a_malformed_file_of_prompts_is_refused_with_its_line(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptError, match=message) as error:
        read_prompts(tmp_path / name)
    assert "expected: " in str(error.value)


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_a_missing_file_of_prompts_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"cannot read the prompts.*remedy"):
        read_prompts(tmp_path / name)


def test_the_built_in_prompts_are_all_different() -> None:
    assert len(set(BUILT_IN)) == len(BUILT_IN) >= 4
