"""An imported drafter is compared with its target, and written with settings to train it."""

from pathlib import Path

import pytest
import torch
from helpers.families import tiny_family
from helpers.imports import converted, imported
from helpers.models import tiny_llama
from helpers.published import eagle_config, eagle_weights, save_published

from jakiro.drafter import JakiroDrafter
from jakiro.errors import TargetMismatch, TargetNotSupported
from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.exchange.families import plan_import
from jakiro.exchange.plan import SETTINGS_FILE, record_of, write_import
from jakiro.utils.settings import load_settings
from training.config import TrainSettings


@pytest.mark.parametrize("changes", [{"vocab": 62}, {"hidden_size": 64}])
def test_a_target_of_another_size_is_refused(changes: dict[str, int], tmp_path: Path) -> None:
    folder = save_published(tmp_path, eagle_weights(), eagle_config())
    with pytest.raises(TargetMismatch, match=r"size differs.*as --target"):
        imported(folder, tiny_llama(**changes))


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_tuned_copy_of_the_targets_matrices_is_refused(name: str, tmp_path: Path) -> None:
    model = tiny_llama()
    matrix = dict(model.named_parameters())["lm_head.weight" if "head" in name else f"model.{name}"]
    tuned = matrix.detach().clone()
    tuned[5, 3] += 0.25
    folder = save_published(tmp_path, eagle_weights() | {name: tuned}, eagle_config())
    with pytest.raises(TargetMismatch, match=rf"{name} in .*differs.*of up to 0\.25"):
        imported(folder, model)


@pytest.mark.parametrize("family", ["gemma3", "granite"])
def test_a_target_that_scales_embeddings_or_logits_is_refused(family: str, tmp_path: Path) -> None:
    model = tiny_family(family)
    config = model.config.get_text_config()
    folder = save_published(
        tmp_path,
        eagle_weights(),
        eagle_config(vocab_size=config.vocab_size, hidden_size=config.hidden_size),
    )
    assert config.hidden_size == 32
    with pytest.raises(TargetNotSupported, match="scales its embeddings or logits"):
        imported(folder, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtype_of_the_weights_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = {name: part.to(dtype) for name, part in eagle_weights().items()}
    folder = save_published(tmp_path / "head", weights, eagle_config())
    drafter = converted(folder, tiny_llama())
    assert {part.dtype for part in drafter.parameters()} == {dtype}
    drafter.save_pretrained(tmp_path / "drafter")
    loaded = type(drafter).from_pretrained(tmp_path / "drafter")
    for name, part in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], part)


@pytest.fixture
def drafter(tmp_path: Path) -> JakiroDrafter:
    folder = save_published(tmp_path / "head", eagle_weights(), eagle_config())
    drafter = converted(folder, tiny_llama())
    drafter.config.record = record_of(plan_import(read_checkpoint(folder)), {"agreement": 0.5})
    return drafter


def test_a_written_drafter_has_its_record_and_settings(
    drafter: JakiroDrafter, tmp_path: Path
) -> None:
    write_import(drafter, tmp_path / "drafter")
    loaded = JakiroDrafter.from_pretrained(tmp_path / "drafter")
    assert loaded.config.record == drafter.config.record
    assert loaded.config.record["import"]["measured"] == {"agreement": 0.5}
    file = tmp_path / "drafter" / SETTINGS_FILE
    settings = load_settings(TrainSettings, file, ["data.paths=[any.jsonl]"])
    assert settings.drafter == loaded.config.settings
    assert settings.initialize.drafter == str(tmp_path / "drafter")


def test_an_existing_folder_is_never_replaced(drafter: JakiroDrafter, tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        write_import(drafter, tmp_path / "drafter")
    assert [path.name for path in (tmp_path / "drafter").iterdir()] == ["notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "head"]
