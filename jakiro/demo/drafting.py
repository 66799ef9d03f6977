"""The demo's drafter: settings that follow from the target's size, and its training."""

from pathlib import Path

from pydantic import PositiveFloat, PositiveInt
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jakiro.config import (
    BankSettings,
    DrafterSettings,
    MemorySettings,
    ScheduleSettings,
)
from jakiro.files import fingerprint
from jakiro.settings import Settings
from training.config import (
    CheckpointSettings,
    EngineSettings,
    EvaluationSettings,
    OptimizerSettings,
    TrainSettings,
)
from training.input_settings import BatchSettings, DataSettings, TargetSettings
from training.processes import Device
from training.train import train


class DrafterRecipe(Settings):
    """How long and how fast the drafter learns.

    Attributes:
        steps: optimizer steps.
        rows: packed rows of a step, of 256 tokens.
        learning_rate: at the peak.
    """

    steps: PositiveInt
    rows: PositiveInt = 4
    learning_rate: PositiveFloat = 0.02


def drafter_settings(hidden_size: int) -> DrafterSettings:
    """Return a drafter of about one layer of a target with this hidden size.

    It has what the demo is to show: layer self-attention over all layers' keys and values, two
    experts, and one parallel level that sees the contrast between them.
    """
    return DrafterSettings(
        memory=MemorySettings(
            common_width=hidden_size // 2,
            num_heads=2,
            head_dim=32 if hidden_size < 512 else 64,
            mlp_width=hidden_size,
        ),
        bank=BankSettings(num_experts=2, expert_width=2 * hidden_size),
        schedule=ScheduleSettings(autoregressive_levels=2, parallel_levels=1),
    )


def train_drafter(
    recipe: DrafterRecipe,
    target: str,
    texts: Path,
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    device: Device,
    progress: Progress,
) -> Path:
    """Return the folder of the drafter; train it unless the cache holds it.

    Args:
        recipe: how long to train.
        target: where the target was loaded from.
        texts: a JSONL file.
        folder: the cache.
        model: the target.
        tokenizer: its tokenizer.
        device: "auto", "cpu" or "cuda".
        progress: shows the steps.
    """
    settings = TrainSettings.model_validate(
        {
            "target": TargetSettings(name_or_path=target),
            "data": DataSettings(
                paths=(str(texts),), row_length=256, held_out=8, cache_folder=folder / "tokens"
            ),
            "drafter": drafter_settings(int(model.config.get_text_config().hidden_size)),
            "batch": BatchSettings(rows=recipe.rows, micro_batch=recipe.rows),
            "optimizer": OptimizerSettings(
                kind="muon",
                learning_rate=recipe.learning_rate,
                warmup_steps=min(30, recipe.steps),
                schedule="cosine",
            ),
            "engine": EngineSettings(device=device),
            "evaluation": EvaluationSettings(num_prompts=0, held_out_rows=16),
            "checkpoint": CheckpointSettings(every=100, keep=1),
            "steps": recipe.steps,
        }
    )
    identity = fingerprint(settings.model_dump(mode="json"))
    run_folder = folder / f"drafter-{identity[:16]}"
    return train(
        settings.model_copy(update={"run_folder": run_folder}),
        model=model,
        tokenizer=tokenizer,
        progress=progress,
    )
