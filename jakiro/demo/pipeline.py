"""The demo with a toy target or the user's target: training of a drafter, then measurements."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs
import torch
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.autotune.costs import known_costs
from inference.autotune.measurement import target_facts
from inference.autotune.search import PlanChoice, choose_plan
from inference.benchmark.document import ComparisonDocument
from inference.benchmark.method_names import AUTOREGRESSIVE, DRAFTER, LOOKUP, TRANSFORMERS
from inference.benchmark.methods import Method, OwnDecoding
from inference.benchmark.run import Comparison
from inference.benchmark.settings import ComparisonSettings
from inference.benchmark.transformers_methods import TransformersDecoding
from inference.decoder import SpeculativeDecoder
from inference.generation.prompt_file import prompt_of
from jakiro.demo.corpus import Corpus, cached_texts, load_corpus
from jakiro.demo.presets import PRESETS, DrafterRecipe, Preset
from jakiro.demo.prompts import prompts_from_split
from jakiro.demo.report import JAKIRO, results_of, show_next, show_results, show_text
from jakiro.demo.target import read_record, train_target
from jakiro.drafter import JakiroDrafter
from jakiro.errors import JakiroError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.files import ensure_writable_folder, fingerprint, write_atomically
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.pretrained import Device, choose_device, load_causal_lm, load_tokenizer
from jakiro.utils.progress import ProgressDisplay, tracked
from training.config import TrainSettings
from training.distributed.processes import launch_environment
from training.train import train

TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class _Demo:
    """Data shared by all parts of a demo; the target is the toy model or the user's model."""

    preset: Preset
    corpus: Corpus
    folder: Path
    progress: Progress
    target: str  # folder or hub id
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    validation_loss: float | None  # nats per token; None for the user's target

    def prompts(self, split: Literal["dev", "test"], count: int) -> list[list[int]]:
        """Return the token ids of `count` held-out prompts of a split."""
        prompts = prompts_from_split(self.corpus, split, self.tokenizer, count=count)
        return [self.tokenizer.encode(prompt.text, add_special_tokens=False) for prompt in prompts]


def run_demo(
    preset: str = "small",
    cache_dir: Path | None = None,
    device: Device = "auto",
    target: str | None = None,
    store: Callable[[str], object] | None = None,
) -> None:
    """Train the models that are not cached, compare decoding methods, and print the results.

    Args:
        preset: "smoke" or "small".
        cache_dir: folder for trained models; None for the user's cache folder.
        device: "auto", "cpu" or "cuda".
        target: folder or hub id of a causal LM; None to train and use the toy target.
        store: function that receives all figures as JSON, to write them to a file; None for none.

    Raises:
        ConfigError: the cache folder cannot be written to, or the device does not exist.
        CheckpointError: the target cannot be loaded.
        DataError: the source of the standard library is missing.
        JakiroError: a method's greedy tokens differ from those of transformers.
    """
    folder = ensure_writable_folder(cache_dir or Path(platformdirs.user_cache_dir("jakiro")))
    with (
        launch_environment(device),
        quiet_libraries(),
        ProgressDisplay() as progress,
    ):
        demo = _prepare(PRESETS[preset], folder, device, target, progress)
        drafter_folder = _train(demo, device)
        drafter = JakiroDrafter.from_pretrained(drafter_folder)
        choice = _choose_trees(demo, drafter, drafter_folder)
        decoder = SpeculativeDecoder(demo.model, drafter, demo.tokenizer, choice.plan)
        measured = _compare(demo, decoder)
    results = results_of(measured, choice)
    facts = {
        "path": demo.target,
        "parameters": demo.model.num_parameters(),
        "validation_loss": demo.validation_loss,
        "repeated_4gram_share": measured.figures(TRANSFORMERS, 0.0).repeated_4gram_share,
    }
    prompt = demo.prompts("test", demo.preset.num_prompts)[0]
    output = decoder.generate(prompt, temperature=0, max_new_tokens=demo.preset.max_new_tokens)
    show_text(Console(), output, prompt, demo.tokenizer)
    show_results(Console(), results, facts, choice)
    drafted = {"path": str(drafter_folder), "parameters": drafter.num_parameters()}
    drafted["trees"] = choice.plan.model_dump()
    document = {"preset": preset, "target": facts, "drafter": drafted, "results": results}
    if store is not None:
        store(json.dumps(document, indent=1) + "\n")
    if preset == "smoke":
        Console().print(
            "The preset smoke only checks that everything runs: its drafter was trained for "
            "seconds. The presets chat and small show speed."
        )
    show_next(Console(), str(drafter_folder), demo.target)
    if any(row["identical_to_target"] is False for row in results):
        raise JakiroError("a method's greedy tokens differ from those of transformers' generate()")


def _prepare(
    preset: Preset, folder: Path, device: Device, target: str | None, progress: Progress
) -> _Demo:
    corpus, where = load_corpus(), choose_device(device)
    own = None if target else train_target(preset, corpus, folder, progress, device=where)
    location = target or str(own)
    model = load_causal_lm(location, dtype=torch.float32, device=where)
    loss = read_record(own).validation_loss if own else None
    tokenizer = load_tokenizer(location, "the target")
    return _Demo(preset, corpus, folder, progress, location, model, tokenizer, loss)


def _train(demo: _Demo, device: Device) -> Path:
    preset, folder, model, tokenizer = demo.preset, demo.folder, demo.model, demo.tokenizer
    texts = cached_texts(preset.texts, demo.corpus, model, tokenizer, folder, demo.progress)
    return train_drafter(
        preset.drafter, demo.target, texts, folder, model, tokenizer, device, demo.progress
    )


def _choose_trees(demo: _Demo, drafter: JakiroDrafter, drafter_folder: Path) -> PlanChoice:
    """Return the trees that are fastest on this machine; measure trees if no choice is cached."""
    target = TargetAdapter(demo.model)
    key = fingerprint(str(drafter_folder), *target_facts(target))
    path = demo.folder / f"trees-{key[:16]}.json"
    try:
        return PlanChoice.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        task = demo.progress.add_task("Selecting draft trees", total=None)
        torch.nn.Module.to(drafter.eval(), target.device)
        prompts = demo.prompts("dev", demo.preset.num_tree_prompts)
        costs = known_costs(target, drafter)
        choice = choose_plan(target, drafter, prompts, temperature=TEMPERATURES[-1], costs=costs)
        write_atomically(path, choice.model_dump_json(indent=2))
        demo.progress.update(task, total=1, completed=1)
        return choice


def _compare(demo: _Demo, drafting: SpeculativeDecoder) -> ComparisonDocument:
    model, tokenizer = demo.model, demo.tokenizer
    methods: list[Method] = [
        TransformersDecoding(TRANSFORMERS, TRANSFORMERS, model),
        TransformersDecoding(LOOKUP, LOOKUP, model, prompt_lookup_num_tokens=5),
        OwnDecoding(AUTOREGRESSIVE, AUTOREGRESSIVE, SpeculativeDecoder(model, tokenizer=tokenizer)),
        OwnDecoding(JAKIRO, DRAFTER, drafting),
    ]
    settings = ComparisonSettings(
        methods=tuple(method.name for method in methods),
        prompts="headers of functions and classes in held-out files",
        max_new_tokens=demo.preset.max_new_tokens,
        temperatures=TEMPERATURES,
    )
    prompts = [prompt_of(ids) for ids in demo.prompts("test", demo.preset.num_prompts)]
    comparison = Comparison(settings, prompts, methods, model, tokenizer, demo.target)
    return comparison.run(tracked(demo.progress))


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
                "trunk": {"kind": "hybrid"},
                "memory": memory | {"head_dim": 32 if width < 512 else 64},
                "experts": {"num_experts": 2, "intermediate_size": 2 * width},
                "schedule": {"autoregressive_levels": 2, "parallel_levels": 1},
            },
            "objective": {"contrast_weight": 0.1},
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
