"""Files of prompts: every form is read, and a mistake is reported with its file and line."""

import json
from pathlib import Path
from typing import Any

import pytest

from inference.generation.prompt_file import distinct, read_prompts
from jakiro.errors import PromptError

HELLO = {"role": "user", "content": "hello"}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _written(folder: Path, *records: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
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
    prompts = read_prompts(path)
    assert [prompt.first for prompt in prompts[:4]] == ["a text", [5, 6], [HELLO], [HELLO]]
    assert prompts[4].first == [{"role": "system", "content": "be brief"}, HELLO]
    assert [prompt.later_turns for prompt in prompts] == [(), (), (), ("and then?",), ()]
    assert [prompt.category for prompt in prompts] == ["all", "ids", "all", "writing", "all"]


def test_other_files_hold_one_text_per_line(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text('one\r\n\n  two\n{"prompt": "three"}')
    prompts = read_prompts(tmp_path / "p.txt")
    assert [prompt.first for prompt in prompts] == ["one", "  two", '{"prompt": "three"}']
    assert {prompt.category for prompt in prompts} == {"all"}


def test_the_next_turn_is_the_whole_dialogue(tmp_path: Path) -> None:
    prompt = read_prompts(_written(tmp_path, {"turns": ["one", "two", "three"]}))[0]
    assert prompt.num_turns == 3
    assert prompt.chat_turn([]) == [{"role": "user", "content": "one"}]
    assert prompt.chat_turn(["first", "second"]) == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "three"},
    ]
    assert prompt.chat_turn([]) == [{"role": "user", "content": "one"}]  # the prompt is unchanged
    with pytest.raises(ValueError, match="shorter"):
        prompt.chat_turn(["first", "second", "third"])


def test_identity_is_of_the_content_alone(tmp_path: Path) -> None:
    path = _written(
        tmp_path,
        {"prompt": "a", "category": "x"},
        {"prompt": "b"},
        {"prompt": "a", "category": "y"},
        {"turns": ["hello"]},
        {"messages": [HELLO]},
        {"turns": ["hello", "b"]},
    )
    prompts = read_prompts(path)
    names = [prompt.fingerprint for prompt in prompts]
    assert names[0] == names[2]
    assert names[3] == names[4]
    assert len(set(names)) == 4
    assert all(len(name) == 16 for name in names)
    kept = distinct(prompts)
    assert [prompt.fingerprint for prompt in kept] == [names[index] for index in (0, 1, 3, 5)]
    assert kept[0].category == "x"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", "", "holds no prompts"),
        ("p.txt", b"\xff\xfe", "cannot read the prompts"),
        ("p.jsonl", '{"question": "a"}', "exactly one of the keys"),
        ("p.jsonl", '{"prompt": "a", "turns": ["b"]}', "exactly one of the keys"),
        ("p.jsonl", '{"prompt": [1, "a"]}', "got: prompt"),
        ("p.jsonl", '{"turns": ["a", ""]}', "got: turns"),
        (
            "p.jsonl",
            '{"prompt": "a", "category": 3}',
            "got: category: Input should be a valid string",
        ),
        ("p.jsonl", '["a"]', "no usable prompt"),
        ("p.jsonl", r'{"prompt": "\ud800"}', "got: prompt"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"', "p.jsonl:2 is not JSON"),
        ("p.jsonl", '\n{"text": "a"}\n', "p.jsonl:2 has no usable prompt"),
        ("p.jsonl", '{"messages": [{"role": "user"}]}', "p.jsonl:1 has no usable prompt"),
        ("other.txt", None, "cannot read the prompts"),
    ],
)
def test_a_file_without_usable_prompts_is_refused(
    name: str, content: str | bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / name).write_bytes(data)
    with pytest.raises(PromptError, match=message):
        read_prompts(tmp_path / name)


def test_records_of_training_data_are_prompts_without_their_last_answers(tmp_path: Path) -> None:
    turns = [{"role": role, "content": "?"} for role in ("user", "assistant") * 2]
    records = [{"text": "def"}, {"messages": turns}, {"prompt": [*turns, turns[-1]]}]
    path = _written(tmp_path, *records, {"prompt": [3, 4]}, {"messages": turns[1:2]})
    prompts = read_prompts(path, 4, training_records=True)
    assert [prompt.first for prompt in prompts] == ["def", turns[:3], turns[:3], [3, 4]]
    with pytest.raises(PromptError, match=r"prompts\.jsonl:5 has no usable prompt"):
        read_prompts(path, training_records=True)
    with pytest.raises(PromptError, match=r"prompts\.jsonl:1 has no usable prompt"):
        read_prompts(path)
