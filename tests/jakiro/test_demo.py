"""The demo with a chat model: real training and a real comparison with a tiny model."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from helpers.models import tiny_drafter, tiny_llama
from helpers.templates import CHATML
from helpers.tokenizers import tiny_tokenizer

from inference.generation.prompt_file import read_prompts
from jakiro import demo
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.settings import load_settings
from training.config import TrainSettings
from training.data.sources import find_sources

# An installation from a wheel has no assets, so the tests read those of the repository.
SHIPPED = Path(__file__).parents[2] / "jakiro" / "assets" / demo.MODEL

RECIPE = """
target: {name_or_path: TARGET}
data: {paths: [nowhere], sequence_length: 64, validation_size: 2}
drafter:
  trunk: {kind: feedback, first_position: false}
  experts: {num_experts: 2, intermediate_size: 16}
  schedule: {autoregressive_levels: 2, parallel_levels: 0}
batch: {global_batch_size: 2, micro_batch_size: 2}
evaluation: {num_prompts: 0}
epochs: 1
"""


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with assets for a tiny model, which the demo uses instead of the repository's."""
    model, target = tiny_llama(vocab=300, max_position_embeddings=512), tmp_path / "target"
    model.generation_config.eos_token_id = [7]
    model.save_pretrained(target)
    tiny_tokenizer(CHATML).save_pretrained(target)
    folder = tmp_path / "assets"
    tiny_drafter(TargetAdapter(model)).save_pretrained(folder / "drafter")
    (folder / "train.yaml").write_text(RECIPE.replace("TARGET", str(target)))
    (folder / "prompts.jsonl").write_text(json.dumps({"turns": ["why is it so?"]}) + "\n")
    turns = [{"role": "user", "content": "and why?"}, {"role": "assistant", "content": "so it is"}]
    (folder / "conversations").mkdir()
    records = [{"record": number, "messages": turns * 4} for number in range(12)]
    Dataset.from_list(records).to_parquet(folder / "conversations" / "part-000.parquet")
    monkeypatch.setattr(demo, "ASSETS", folder)
    monkeypatch.setattr(demo, "MODEL", str(target))
    monkeypatch.setattr(demo, "fetch_model", lambda name, progress: None)
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 6)
    return folder


def test_a_drafter_is_trained_and_measured_beside_the_finished_one(
    assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    demo.run_demo(tmp_path / "cache", "cpu", steps=3, store=figures.write_text)
    document = json.loads(figures.read_text())
    names = {
        "fresh drafter",
        "finished drafter",
        "finished drafter + lookup",
        "transformers",
        "autoregressive",
        "lookup",
        "aded",
    }
    assert {method["name"] for method in document["methods"]} > names
    assert {method["temperature"] for method in document["methods"]} == {0.0, 1.0}
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Drafter")]
    assert Path(line.removeprefix("Drafter: "), "model.safetensors").exists()


def test_the_assets_in_the_repository_can_be_read_and_are_small() -> None:
    assert len(read_prompts(SHIPPED / "prompts.jsonl")) == 10
    settings = load_settings(TrainSettings, SHIPPED / "train.yaml")
    assert settings.target.name_or_path == demo.MODEL
    folder = SHIPPED / "drafter"
    for drafter in (settings.drafter, JakiroDrafter.from_pretrained(folder).config.settings):
        assert not drafter.trunk.first_position  # as other engines need it
        assert drafter.tail_layers == 0
    assert (folder / "model.safetensors").stat().st_size <= 25e6
    sources = find_sources([str(SHIPPED / "conversations")])
    assert all(Path(source.name).stat().st_size <= 2e6 for source in sources)
    records = [record for source in sources for record in source.records()]
    assert len(records) > 500
    assert all(record.fields["messages"] for record in records)
