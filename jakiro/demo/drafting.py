"""Training of the demo's drafter, with settings derived from the target's size."""

from pathlib import Path

from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jakiro.demo.presets import DrafterRecipe
from jakiro.utils.files import fingerprint
from jakiro.utils.pretrained import Device
from training.config import TrainSettings
from training.train import train


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
    """Return the folder of the drafter; train the drafter if `folder` does not contain it.

    The drafter is about as large as one layer of the target. It has layer self-attention over the
    keys and values of all layers, two experts, and one parallel level that uses the contrast
    between the experts.

    Args:
        recipe: settings of the training.
        target: folder or hub id that `model` was loaded from.
        texts: JSONL file of `{"text"}` records to train on.
        folder: folder of the cache.
        model: the target.
        tokenizer: the target's tokenizer.
        device: "auto", "cpu" or "cuda".
        progress: progress display.
    """
    width = int(model.config.get_text_config().hidden_size)
    memory = {"common_width": width // 2, "num_heads": 2, "mlp_width": width}
    data = {"paths": (str(texts),), "sequence_length": 256, "validation_size": 8}
    settings = TrainSettings.model_validate(
        {
            "target": {"name_or_path": target},
            "data": data | {"cache_folder": folder / "tokens"},
            "drafter": {
                "memory": memory | {"head_dim": 32 if width < 512 else 64},
                "experts": {"num_experts": 2, "intermediate_size": 2 * width},
                "schedule": {"autoregressive_levels": 2, "parallel_levels": 1},
            },
            "batch": {
                "global_batch_size": recipe.batch_size,
                "micro_batch_size": recipe.batch_size,
            },
            "optimizer": {
                "kind": "muon",
                "learning_rate": recipe.learning_rate,
                "warmup_steps": min(30, recipe.steps),
                "schedule": "cosine",
            },
            "engine": {"device": device},
            "evaluation": {"num_prompts": 0, "num_sequences": 16},
            "checkpoint": {"every": 100, "keep": 1},
            "steps": recipe.steps,
        }
    )
    key = fingerprint(settings.model_dump(mode="json"))
    settings = settings.model_copy(update={"run_folder": folder / f"drafter-{key[:16]}"})
    return train(settings, model=model, tokenizer=tokenizer, progress=progress)
