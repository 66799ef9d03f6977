"""Loading of targets with adapters, and properties that are known without the weights."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer
from helpers.training import TEXTS, tiny_run, write_jsonl
from peft import LoraConfig, get_peft_model

from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError, ConfigError, JakiroError
from training.input_settings import TargetSettings
from training.loop.metrics import read_metrics
from training.setup.preparation import load_model, vocab_size_of
from training.train import train

UNEVALUATED = {"num_prompts": 0}


# The warning comes from the code in transformers that loads adapters.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_have_the_config_of_their_base_model(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    base = tiny_llama().from_pretrained(tmp_path / "base")
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "adapters")
    settings = TargetSettings(name_or_path=str(tmp_path / "adapters"))
    assert vocab_size_of(settings) == 61
    assert any("lora" in name for name, _ in load_model(settings).named_parameters())


@pytest.fixture(scope="module")
def _start(_workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(_workshop, tmp_path_factory.mktemp("start") / "workshop")
    drafter = {"draft_vocab_size": 24}
    return train(tiny_run(folder, steps=2, drafter=drafter, evaluation=UNEVALUATED))


@pytest.fixture
def start(workshop: Path, _start: Path) -> Path:
    """Return the folder of a drafter with a draft vocabulary, after two optimizer steps."""
    return shutil.copytree(_start, workshop / "start")


def warm(workshop: Path, start: Path | str, **changes: Any) -> Any:
    """Return the settings of a run that starts with a drafter's weights and hardly changes them."""
    changes = {"drafter": {"draft_vocab_size": 24}, **changes}
    still = {"learning_rate": 1e-12, "warmup_steps": 0}
    folder = str(workshop / "warm")
    return tiny_run(
        workshop,
        initialize={"drafter": str(start)},
        run_folder=folder,
        **{"steps": 1, "optimizer": still, "evaluation": UNEVALUATED, **changes},
    )


def test_a_run_starts_with_the_weights_and_the_tokens_of_another_drafter(
    workshop: Path, start: Path
) -> None:
    before = JakiroDrafter.from_pretrained(start).state_dict()
    folder = train(warm(workshop, start))
    after = JakiroDrafter.from_pretrained(folder).state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)
    assert [line["step"] for line in read_metrics(workshop / "warm") if "loss" in line] == [1]
    # If the drafter is moved, the run remains the same; if its weights change, it does not.
    moved = shutil.move(start, workshop / "moved")
    assert train(warm(workshop, moved)) == folder
    other = JakiroDrafter.from_pretrained(moved)
    torch.nn.init.zeros_(other.experts.router.weight)
    other.save_pretrained(moved)
    with pytest.raises(ConfigError, match="start_fingerprint differs"):
        train(warm(workshop, moved))


def test_a_run_on_other_texts_drafts_the_tokens_of_its_start_drafter(
    workshop: Path, start: Path
) -> None:
    before = JakiroDrafter.from_pretrained(start).draft_ids
    data = {"paths": [str(write_jsonl(workshop / "few.jsonl", [{"text": "total " * 60}] * 8))]}
    settings = warm(workshop, start, data=data, drafter={"draft_vocab_size": "auto"})
    after = JakiroDrafter.from_pretrained(train(settings)).draft_ids
    assert before is not None
    assert after is not None
    assert after.tolist() == before.tolist()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"drafter": {"draft_vocab_size": 24, "experts": {"combine": "sum"}}},
            ConfigError,
            r"a different value of drafter\.experts\.combine; expected: sum; got: mixture",
        ),
        ({"start": "missing"}, CheckpointError, "cannot load a drafter from"),
        ({"wide": True}, ConfigError, r"of a different shape \(.*expected: .*48.*got: .*32"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_before_the_run_folder_is_touched(
    workshop: Path,
    start: Path,
    changes: dict[str, Any],
    error: type[JakiroError],
    message: str,
) -> None:
    changes = dict(changes)
    if changes.pop("wide", False):
        tiny_llama(vocab=300, hidden_size=48).save_pretrained(workshop / "target")
        tiny_tokenizer(texts=TEXTS).save_pretrained(workshop / "target")
    where = workshop / changes.pop("start", "start")
    with pytest.raises(error, match=message):
        train(warm(workshop, where, **changes))
    assert not (workshop / "warm").exists()
