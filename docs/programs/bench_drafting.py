"""Program that compares the time that differently designed drafters take to draft a tree.

The drafters are the arms of a study, with the expert widths that make them as large as the base,
and the base with other expert widths. Their weights are random: only the choice of sparse experts
depends on the weights, and a trained router that prefers few experts takes less time. The drafters
take turns on each prompt, in a random order. The first step, in which they read the prompt, is left
out:

    make bench-drafting ARGS="--base configs/screening/base.yaml --width 3072
                              --config configs/screening/arms/experts-2.yaml
                              --prompts FILE.jsonl --json OUT.json"
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from inference.autotune.search import trees_of_size
from inference.benchmark.machine import environment_of
from inference.benchmark.stats import median_interval
from inference.benchmark.subject import Subject, load_target
from inference.decoder import SpeculativeDecoder
from inference.generation.prompt_file import read_prompts
from inference.generation.prompts import encode_prompt
from inference.trees.shape import TreePlan
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import ConfigError, DataError, JakiroError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import TargetRecord, record_target
from jakiro.utils.dtype_names import long_dtype
from jakiro.utils.files import ensure_new_file, write_atomically
from jakiro.utils.pretrained import choose_device
from jakiro.utils.settings import validate_settings
from training.studies.ablation.arms import (
    Arm,
    equally_sized,
    num_active_parameters,
    num_parameters,
    read_arms,
)

SEED = 0
READING = 1  # number of decoding steps in which a drafter also reads the prompt


def designs(
    arms: Sequence[Arm], widths: Sequence[int], target: TargetRecord
) -> dict[str, DrafterSettings]:
    """Return the settings of all drafters, the base first.

    Args:
        arms: arms of a study, the base first.
        widths: further expert widths of the base.
        target: record of the target.

    Raises:
        ConfigError: an arm cannot be made as large as the base, or a width cannot be used.
    """
    sized = equally_sized(arms, target)
    found = {own.name: own.arm.settings.drafter for own in sized}
    base = arms[0].settings.drafter.model_dump()
    for width in widths:
        name = f"{arms[0].name}-{width}"
        if name in found:
            raise ConfigError(
                f"two drafters have the name {name}",
                expected="different widths, and arms with other names",
                got=f"--width {width}",
                remedy="leave out one of them, or rename the file of the arm",
            )
        values = base | {"experts": base["experts"] | {"intermediate_size": width}}
        found[name] = validate_settings(DrafterSettings, values, source=f"--width {width}")
    return found


def measure(
    decoders: Mapping[str, SpeculativeDecoder],
    prompts: Sequence[list[int]],
    tokens: int,
    repeats: int,
) -> dict[str, list[float]]:
    """Return the milliseconds that each drafter takes in a decoding step, for each prompt.

    Args:
        decoders: a decoder for each drafter.
        prompts: token ids of each prompt.
        tokens: number of new tokens in each run.
        repeats: number of runs with each prompt, after one run that is not measured.

    Raises:
        DataError: an answer ends before the second decoding step.
    """
    found: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in decoders}
    order = random.Random(SEED)
    for repeat in range(-1, repeats):
        for number, prompt in enumerate(prompts[:1] if repeat < 0 else prompts):
            for name in order.sample(list(decoders), len(decoders)):
                seconds = _seconds_of_a_step(decoders[name], prompt, tokens)
                if repeat >= 0:
                    found[name][number].append(1e3 * seconds)
    return {name: [median(own) for own in several] for name, several in found.items()}


def _seconds_of_a_step(decoder: SpeculativeDecoder, prompt: list[int], tokens: int) -> float:
    """Return the median of the seconds of drafting in a step, without the first step."""
    run = decoder.start([prompt], temperature=0.0, max_new_tokens=tokens)
    # After the first token, and after each decoding step.
    totals = [run.seconds["draft"] for _ in run]
    if len(totals) <= READING + 1:
        raise DataError(
            "an answer is too short to measure drafting",
            expected=f"{READING + 1} or more decoding steps",
            got=len(totals) - 1,
            remedy="raise --tokens, or give other prompts",
        )
    steps = pairwise(totals[READING:])
    return median(after - before for before, after in steps)


def summary(
    found: Mapping[str, Sequence[float]],
    settings: Mapping[str, DrafterSettings],
    count: Callable[[DrafterSettings], tuple[int, int]],
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each drafter.

    Args:
        found: milliseconds for each prompt; the base first.
        settings: settings of each drafter.
        count: function that returns the numbers of parameters and of active ones.
    """
    base = next(iter(found.values()))
    for name, milliseconds in found.items():
        parameters, active = count(settings[name])
        ratios = [own / other for own, other in zip(milliseconds, base, strict=True)]
        yield {
            "drafter": name,
            "width": settings[name].experts.intermediate_size,
            "parameters": parameters,
            "active_parameters": active,
            "milliseconds": median(milliseconds),
            "ratio": list(median_interval(ratios)),
        }


def main(words: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        words: arguments; None for those of the command line.
    """
    arguments = _parser().parse_args(words)
    ensure_new_file(arguments.json, "the results", "--json")
    arms = read_arms(arguments.base, arguments.config, arguments.set)
    of_target = arms[0].settings.target
    device = choose_device(arguments.device)
    model, tokenizer = load_target(of_target.name_or_path, long_dtype(of_target.dtype), device)
    target = TargetAdapter(model.eval())
    record = record_target(target.spec, of_target.name_or_path, tokenizer)
    settings = designs(arms, arguments.width, record)
    prompts = [
        encode_prompt(own.first, tokenizer, target.spec.vocab_size)
        for own in read_prompts(arguments.prompts, arguments.num_prompts)
    ]
    torch.manual_seed(SEED)
    subject = Subject(model, tokenizer)
    decoders = {
        name: _decoder(subject, JakiroDrafter(config_for(own, record)), arguments.candidates)
        for name, own in settings.items()
    }
    environment = environment_of(target, of_target.name_or_path)
    found = measure(decoders, prompts, arguments.tokens, arguments.repeats)
    document = {
        "environment": environment.model_dump(mode="json"),
        "candidates": arguments.candidates,
        "prompts": len(prompts),
        "repeats": arguments.repeats,
        "results": list(summary(found, settings, partial(_sizes, record))),
    }
    write_atomically(arguments.json, json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["results"], indent=1))  # noqa: T201


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare drafting times of drafters.")
    parser.add_argument("--base", type=Path, required=True, help="settings of the base")
    parser.add_argument("--config", type=Path, action="append", default=[], help="an arm's file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--width", type=int, action="append", default=[])
    parser.add_argument("--candidates", type=int, default=60)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2, choices=range(1, 100))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, required=True)
    return parser


def _decoder(subject: Subject, drafter: JakiroDrafter, candidates: int) -> SpeculativeDecoder:
    return subject.decoder(drafter, TreePlan.of(trees_of_size(drafter, candidates).greedy))


def _sizes(record: TargetRecord, own: DrafterSettings) -> tuple[int, int]:
    return num_parameters(own, record), num_active_parameters(own, record)


if __name__ == "__main__":
    try:
        main()
    except JakiroError as error:
        sys.exit(f"error: {error}")
