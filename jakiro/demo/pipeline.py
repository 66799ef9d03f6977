"""The demo from nothing to figures: a target, a drafter for it, and what drafting gains."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from inference.comparison.comparison import Comparison
from inference.comparison.document import ComparisonDocument, ComparisonSettings
from inference.comparison.method_names import DRAFTER, LOOKUP, PLAIN, TRANSFORMERS
from inference.comparison.methods import Method, OwnDecoding
from inference.comparison.prompt_file import prompt_of
from inference.comparison.transformers_methods import TransformersDecoding
from inference.decoder import SpeculativeDecoder
from inference.tree_budget import PlanChoice, choose_plan
from jakiro.demo.corpus import Corpus, load_corpus
from jakiro.demo.drafting import train_drafter
from jakiro.demo.presets import PRESETS, Preset
from jakiro.demo.prompts import held_out_prompts
from jakiro.demo.report import JAKIRO, results_of, show_results, show_text
from jakiro.demo.target import read_record, train_target
from jakiro.demo.texts import write_texts
from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError, JakiroError
from jakiro.files import ensure_writable_folder, fingerprint, write_atomically
from jakiro.logs import quiet_libraries
from jakiro.target import TargetAdapter
from training.processes import Device, choose_device, launch_environment

TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class LoadedTarget:
    """The demo's target, embedded or the user's."""

    place: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    held_out_loss: float | None  # nats per token; unknown for the user's target


def run_demo(
    preset: str = "small",
    cache_dir: Path | None = None,
    device: Device = "auto",
    target: str | None = None,
) -> None:
    """Train what is not in the cache, generate by all methods, and print what was measured.

    The last line of standard output is one JSON document.

    Args:
        preset: "smoke" or "small".
        cache_dir: where trained models are kept; by default the user's cache folder.
        device: "auto", "cpu" or "cuda".
        target: folder or hub id of a causal LM to use instead of the embedded one.

    Raises:
        ConfigError: the cache folder cannot be written to, or there is no such device.
        CheckpointError: the target cannot be loaded.
        DataError: the standard library's source is not there to learn from.
        JakiroError: a method's greedy tokens differ from those of transformers.
    """
    recipe = PRESETS[preset]
    folder = ensure_writable_folder(cache_dir or Path(platformdirs.user_cache_dir("jakiro")))
    console = Console()
    corpus = load_corpus()
    with (
        launch_environment(device),
        quiet_libraries(),
        Progress(console=Console(stderr=True)) as progress,
    ):
        loaded = _load_target(recipe, corpus, folder, device, target, progress)
        drafter_folder = _train(recipe, corpus, loaded, folder, device, progress)
        drafter = JakiroDrafter.from_pretrained(drafter_folder)
        choice = _choose_trees(recipe, corpus, loaded, drafter, drafter_folder, progress)
        decoder = SpeculativeDecoder(loaded.model, drafter, loaded.tokenizer, choice.plan)
        measured = _compare(recipe, corpus, loaded, decoder, progress)
    results = results_of(measured, choice)
    facts = _facts_of_target(loaded, measured)
    prompt = _prompt_ids(corpus, "test", loaded, recipe.num_prompts)[0]
    output = decoder.generate(prompt, temperature=0, max_new_tokens=recipe.max_new_tokens)
    show_text(console, output, prompt, loaded.tokenizer)
    show_results(console, results, facts, choice)
    document = {
        "preset": preset,
        "target": facts,
        "drafter": {
            "path": str(drafter_folder),
            "parameters": drafter.num_parameters(),
            "trees": choice.plan.model_dump(),
        },
        "results": results,
    }
    print(json.dumps(document))  # noqa: T201 - for programs, so no console that wraps lines
    if any(row["identical_to_target"] is False for row in results):
        raise JakiroError("greedy tokens differ from those of transformers' generate()")


def _load_target(
    preset: Preset,
    corpus: Corpus,
    folder: Path,
    device: Device,
    target: str | None,
    progress: Progress,
) -> LoadedTarget:
    where = choose_device(device)
    own = None if target else train_target(preset, corpus, folder, progress, device=where)
    place = target or str(own)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot load the target {place}",
            expected="a folder or hub id of a causal LM with its tokenizer",
            got=str(error).strip().splitlines()[0],
        ) from error
    loss = None if own is None else read_record(own).held_out_loss
    model.to(where)
    return LoadedTarget(place, model.eval(), tokenizer, loss)


def _train(
    preset: Preset,
    corpus: Corpus,
    loaded: LoadedTarget,
    folder: Path,
    device: Device,
    progress: Progress,
) -> Path:
    texts = write_texts(
        preset.texts,
        corpus,
        loaded.model,
        loaded.tokenizer,
        TargetAdapter(loaded.model).spec.fingerprint,
        folder,
        progress,
    )
    return train_drafter(
        preset.drafter,
        loaded.place,
        texts,
        folder,
        loaded.model,
        loaded.tokenizer,
        device,
        progress,
    )


def _choose_trees(
    preset: Preset,
    corpus: Corpus,
    loaded: LoadedTarget,
    drafter: JakiroDrafter,
    drafter_folder: Path,
    progress: Progress,
) -> PlanChoice:
    """Return the trees for this machine; measured once and kept beside the drafter."""
    identity = fingerprint(str(drafter_folder), torch.get_num_threads(), str(loaded.model.device))
    path = drafter_folder.parent.parent / f"trees-{identity[:16]}.json"
    try:
        return PlanChoice.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        task = progress.add_task("Choosing draft trees", total=None)
        ids = _prompt_ids(corpus, "dev", loaded, preset.num_tree_prompts)
        target = TargetAdapter(loaded.model)
        torch.nn.Module.to(drafter.eval(), target.device)
        choice = choose_plan(target, drafter, ids, temperature=TEMPERATURES[-1])
        write_atomically(path, choice.model_dump_json(indent=2))
        progress.update(task, total=1, completed=1)
        return choice


def _compare(
    preset: Preset,
    corpus: Corpus,
    loaded: LoadedTarget,
    drafting: SpeculativeDecoder,
    progress: Progress,
) -> ComparisonDocument:
    model, tokenizer = loaded.model, loaded.tokenizer
    plain = SpeculativeDecoder(model, tokenizer=tokenizer)
    methods: list[Method] = [
        TransformersDecoding(TRANSFORMERS, TRANSFORMERS, model),
        TransformersDecoding(LOOKUP, LOOKUP, model, prompt_lookup_num_tokens=5),
        OwnDecoding(PLAIN, PLAIN, plain),
        OwnDecoding(JAKIRO, DRAFTER, drafting),
    ]
    settings = ComparisonSettings(
        methods=tuple(method.name for method in methods),
        prompts="heads of functions and classes of held-out files",
        max_new_tokens=preset.max_new_tokens,
        temperatures=TEMPERATURES,
    )
    ids = _prompt_ids(corpus, "test", loaded, preset.num_prompts)
    comparison = Comparison(
        settings, [prompt_of(one) for one in ids], methods, model, tokenizer, loaded.place
    )
    task = progress.add_task("Comparing")

    def track(total: int) -> Callable[[], None]:
        progress.update(task, total=total)
        return lambda: progress.advance(task)

    return comparison.run(track)


def _prompt_ids(corpus: Corpus, split: Any, loaded: LoadedTarget, count: int) -> list[list[int]]:
    prompts = held_out_prompts(corpus, split, loaded.tokenizer, count=count)
    return [loaded.tokenizer.encode(one.text, add_special_tokens=False) for one in prompts]


def _facts_of_target(loaded: LoadedTarget, document: ComparisonDocument) -> dict[str, Any]:
    return {
        "path": loaded.place,
        "parameters": loaded.model.num_parameters(),
        "held_out_loss": loaded.held_out_loss,
        "repeated_4gram_share": document.figures(TRANSFORMERS, 0.0).repeated_4gram_share,
    }
