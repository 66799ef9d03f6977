"""Prompt files of a comparison: their forms, and mistakes that are named by their line."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tokenizers import tiny_tokenizer

from inference.generation.prompt_file import distinct, read_bench_prompts
from inference.generation.prompts import encode_prompt
from jakiro.errors import PromptError

HELLO = {"role": "user", "content": "hello"}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _written(folder: Path, *rows: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_every_form_is_read(tmp_path: Path) -> None:
    path = _written(
        tmp_path,
        {"prompt": "a text", "question_id": 3},
        {"prompt": [5, 6], "category": "ids"},
        {"prompt": [HELLO]},
        {"turns": ["hello", "and then?"], "category": "writing", "reference": []},
        {"messages": [{"role": "system", "content": "be brief"}, HELLO]},
    )
    prompts = read_bench_prompts(path)
    assert [one.first for one in prompts[:4]] == ["a text", [5, 6], [HELLO], [HELLO]]
    assert prompts[4].first == [{"role": "system", "content": "be brief"}, HELLO]
    assert [one.later_turns for one in prompts] == [(), (), (), ("and then?",), ()]
    assert [one.category for one in prompts] == ["all", "ids", "all", "writing", "all"]


def test_other_files_hold_one_text_per_line(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text('one\r\n\n  two\n{"prompt": "three"}')
    prompts = read_bench_prompts(tmp_path / "p.txt")
    assert [one.first for one in prompts] == ["one", "  two", '{"prompt": "three"}']
    assert {one.category for one in prompts} == {"all"}


def test_the_next_turn_is_the_whole_dialogue(tmp_path: Path) -> None:
    prompt = read_bench_prompts(_written(tmp_path, {"turns": ["one", "two", "three"]}))[0]
    assert prompt.num_turns == 3
    assert prompt.chat_turn([]) == [{"role": "user", "content": "one"}]
    assert prompt.chat_turn(["first", "second"]) == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "three"},
    ]
    assert prompt.chat_turn([]) == [{"role": "user", "content": "one"}]  # and nothing was changed
    with pytest.raises(ValueError, match="shorter"):
        prompt.chat_turn(["first", "second", "third"])


def test_turns_are_written_in_the_chat_template(tmp_path: Path) -> None:
    prompt = read_bench_prompts(_written(tmp_path, {"turns": ["a", "b"]}))[0]
    tokenizer = tiny_tokenizer(TEMPLATE)
    ids = encode_prompt(prompt.chat_turn(["x"]), tokenizer, len(tokenizer))
    assert tokenizer.decode(ids) == "<user>a<assistant>x<user>b<assistant>"
    with pytest.raises(PromptError, match="no chat template"):
        encode_prompt(prompt.chat_turn([]), tiny_tokenizer(), len(tokenizer))


def test_identity_is_of_the_content_alone(tmp_path: Path) -> None:
    path = _written(
        tmp_path,
        {"prompt": "a", "category": "x"},
        {"prompt": "b"},
        {"prompt": "a", "category": "y"},
        {"turns": ["hello"]},
        {"messages": [HELLO]},
        {"turns": ["hello", "b"]},
        {"prompt": "\ud800"},
    )
    prompts = read_bench_prompts(path)
    names = [one.identity for one in prompts]
    assert names[0] == names[2]
    assert names[3] == names[4]
    assert len(set(names)) == 5
    assert all(len(name) == 16 for name in names)
    kept = distinct(prompts)
    assert [one.identity for one in kept] == [names[place] for place in (0, 1, 3, 5, 6)]
    assert kept[0].category == "x"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "a"}, "exactly one of the keys.*question"),
        ({"prompt": "a", "turns": ["b"]}, "exactly one of the keys.*'prompt', 'turns'"),
        ({"prompt": ""}, "'prompt' to be a text"),
        ({"prompt": 3}, "'prompt' to be a text"),
        ({"prompt": []}, "'prompt' to be a text"),
        ({"prompt": [1, True]}, "'prompt' to be a text"),
        ({"prompt": [1, "a"]}, "'prompt' to be a text"),
        ({"turns": []}, "'turns' to be a list of texts"),
        ({"turns": "a"}, "'turns' to be a list of texts"),
        ({"turns": ["a", ""]}, "'turns' to be a list of texts"),
        ({"messages": "a"}, "'messages' to be "),
        ({"messages": []}, "'messages' to be "),
        ({"messages": [HELLO, {"role": "assistant", "content": "a"}]}, "not by the assistant"),
        ({"prompt": "a", "category": 3}, "'category' to be a text.*got: 3"),
        ({"prompt": "a", "category": None}, "'category' to be a text"),
        (["a"], "one object per line"),
    ],
)
def test_a_malformed_line_is_refused_by_its_number(row: Any, expected: str, tmp_path: Path) -> None:
    path = _written(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(PromptError, match=rf"jsonl:2 .*expected: .*{expected}.*remedy: ") as error:
        read_bench_prompts(path)
    assert "got: " in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", "", "holds no prompts"),
        ("p.txt", " \n\n", "holds no prompts"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"', "p.jsonl:2 is not JSON"),
        ("other.txt", None, "cannot read the prompts"),
    ],
)
def test_a_file_without_prompts_is_refused(
    name: str, content: str | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(PromptError, match=rf"{message}.*expected: .*got: .*remedy: "):
        read_bench_prompts(tmp_path / name)
