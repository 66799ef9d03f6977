"""The demo: a drafter trained for a chat model in a few minutes, and a comparison of methods."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import platformdirs
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.benchmark.document import ComparisonDocument
from inference.benchmark.report import show
from inference.benchmark.run import compare, prompts_for
from inference.benchmark.settings import ComparisonSettings
from inference.benchmark.subject import Subject
from jakiro.utils.devices import Device, choose_device
from jakiro.utils.fetch import fetch_model
from jakiro.utils.files import checksum, ensure_writable_folder, fingerprint
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.packaged import assets_of, require_extra
from jakiro.utils.pretrained import load_target
from jakiro.utils.progress import ProgressDisplay, tracked
from jakiro.utils.settings import load_settings
from jakiro.utils.wording import dtype_name, short_dtype
from training.config import TrainSettings
from training.processes import launch_environment
from training.train import train

MODEL = "smollm2-135m-instruct"
ASSETS = assets_of(MODEL)
STEPS = 40  # largest number of steps of the drafter that the demo trains
MINUTES = 3.0  # largest number of minutes that these steps take
MAX_NEW_TOKENS = 32
TEMPERATURES = (0.0, 1.0)
QUESTION = "Why do cats purr?"


def run_demo(
    cache_folder: Path | None = None,
    device: Device = "auto",
    steps: int = STEPS,
    store: Callable[[str], object] | None = None,
) -> None:
    """Fetch the model, train a drafter, compare methods, and print the results.

    Args:
        cache_folder: folder for the trained drafter; None for the user's cache.
        steps: largest number of optimizer steps; training also ends after `MINUTES`.
    """
    require_extra("gguf")
    folder = ensure_writable_folder(cache_folder or Path(platformdirs.user_cache_dir("jakiro")))
    console = Console(stderr=True)
    fetch_model(MODEL, console.print)
    with (
        launch_environment(device),
        quiet_libraries(),
        ProgressDisplay(console=console) as progress,
    ):
        model, tokenizer = load_target(MODEL, "auto", choose_device(device))
        fresh = _train(folder, model, tokenizer, device, steps, progress)
        document = _compare(fresh, Subject(model, tokenizer, threads="auto"), progress)
    show(document, Console())  # before the file, which a full disk can prevent
    if store is not None:
        store(document.model_dump_json(indent=1) + "\n")
    command = shlex.join(["jakiro", "generate", str(fresh), QUESTION])
    line = f"Drafter: {fresh}\n  {command}"
    Console().print(line, soft_wrap=True, highlight=False, markup=False)


def _train(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    device: Device,
    steps: int,
    progress: Progress,
) -> Path:
    """Return the folder of a drafter trained for a few minutes; train it unless it is cached."""
    conversations = sorted((ASSETS / "conversations").glob("*.parquet"))[:1]
    changes = {
        "target.dtype": short_dtype(dtype_name(model.dtype)),
        "data.paths": [str(path) for path in conversations],
        "data.cache_folder": str(folder / "tokens"),
        "engine.device": device,
        "evaluation.every": max(1, steps // 2),
        "epochs": None,
        "steps": steps,
        "minutes": MINUTES,
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    settings = load_settings(TrainSettings, ASSETS / "train.yaml", overrides)
    key = fingerprint(settings.model_dump(mode="json"), [checksum(path) for path in conversations])
    run_folder = folder / f"drafter-{MODEL}-{key[:16]}"
    settings = settings.model_copy(update={"run_folder": run_folder})
    return train(settings, model=model, tokenizer=tokenizer, progress=progress)


def _compare(fresh: Path, subject: Subject, progress: Progress) -> ComparisonDocument:
    settings = ComparisonSettings(
        methods=(
            "transformers",
            "transformers-lookup",
            "autoregressive",
            "lookup",
            "aded",
            f"drafter={fresh},name=fresh drafter",
            f"drafter={ASSETS / 'drafter'},name=finished drafter",
            f"lookup+drafter={ASSETS / 'drafter'},name=finished drafter + lookup",
        ),
        prompts=str(ASSETS / "prompts.jsonl"),
        max_new_tokens=MAX_NEW_TOKENS,
        temperatures=TEMPERATURES,
    )
    return compare(settings, prompts_for(settings), subject, MODEL, tracked(progress))
