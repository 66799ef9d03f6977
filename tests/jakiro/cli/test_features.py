"""`jakiro prepare states` prints the size, then writes shards from which a run can be trained."""

from pathlib import Path

import pytest
from helpers.models import tiny_llama
from helpers.target_states import offline_run
from helpers.tokenizers import tiny_tokenizer
from helpers.training import TEXTS, tiny_run, write_jsonl

from jakiro.cli import main
from jakiro.utils.settings import dump_settings
from training.train import train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a target, texts and settings of a run."""
    tiny_llama(vocab=300, eos_token_id=0).save_pretrained(tmp_path / "target")
    tiny_tokenizer(texts=TEXTS).save_pretrained(tmp_path / "target")
    write_jsonl(tmp_path / "texts.jsonl", ({"text": text} for text in TEXTS))
    (tmp_path / "run.yaml").write_text(dump_settings(tiny_run(tmp_path)))
    return tmp_path


def run(folder: Path, *words: str) -> int:
    """Run the command and return its exit code."""
    given = ["--config", str(folder / "run.yaml"), "--out", str(folder / "features")]
    with pytest.raises(SystemExit) as exit_:
        main(["prepare", "states", *given, *words])
    return int(exit_.value.code or 0)


def test_a_run_is_trained_from_the_written_shards(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--set", "target_states.dtype=fp32") == 0
    size, end = capsys.readouterr().out.splitlines()
    assert " tokens x 512 bytes = " in size
    assert "in 1 shard, " in size
    assert end == f"all target states are in {folder / 'features'}"
    train(offline_run(folder, steps=2, evaluation={"num_prompts": 0}))


def test_damaged_shards_are_replaced_on_request(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder) == 0
    (shard,) = (folder / "features").glob("*.safetensors")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"x")
    assert run(folder) == 0  # without --check, only sizes are compared
    assert shard.read_bytes() != content
    capsys.readouterr()
    assert run(folder, "--check") == 0
    assert capsys.readouterr().out.startswith(f"damaged: {shard.name}\n")
    assert shard.read_bytes() == content
