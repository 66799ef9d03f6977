"""Program that measures drafting ahead, with the gain that is expected from its parts.

Two decoders with the same small model answer the same prompts alternately: one drafts, verifies and
drafts again, and the other drafts the next tree while the target verifies. Both give the same text.
The expected gain is computed from the seconds to draft and to verify, from the share of right
guesses, and from the seconds of verification beside the drafter:

    make bench-ahead ARGS="--target TARGET --draft-model MODEL --prompts FILE.jsonl --json OUT.json"
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from inference.ahead import AheadDecoder, AheadRun, expected_gain
from inference.benchmark.machine import environment_of
from inference.benchmark.stats import interval_of
from inference.benchmark.stored_parts import PARTS, parts_of
from inference.decoder import SpeculativeDecoder
from inference.draft_tree import DraftTree, SequenceTree
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.engine.stats import DecodeStats
from inference.generation.prompt_file import read_prompts
from inference.generation.prompts import encode_prompt
from jakiro.errors import JakiroError
from jakiro.utils.files import write_atomically
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer

RESAMPLES = 1000


class _Timed(AheadRun):
    """A run that keeps the seconds of verification and of drafting ahead."""

    seconds_of: dict[str, list[float]]

    def _drafted(self, tree: SequenceTree) -> Any:
        started = time.perf_counter()
        found = super()._drafted(tree)
        self.seconds_of["ahead"].append(time.perf_counter() - started)
        return found

    def _target_logits(self, tree: DraftTree) -> Float[Tensor, "batch queries vocab"]:
        started = time.perf_counter()
        logits = super()._target_logits(tree)
        self.seconds_of["beside"].append(time.perf_counter() - started)
        return logits


class _TimedDecoder(AheadDecoder):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seconds_of: dict[str, list[float]] = defaultdict(list)

    def _run(self, group: Any, options: Any = None) -> _Timed:
        run = _Timed(self, requests=group.requests, **self._parts(group, options))
        run.seconds_of = self.seconds_of
        return run


def measure(
    usual: SpeculativeDecoder,
    alike: SpeculativeDecoder,
    ahead: "_TimedDecoder",
    prompts: Sequence[list[int]],
    temperature: float,
    tokens: int,
) -> dict[str, Any]:
    """Return the figures of both decoders at one temperature.

    Args:
        usual: decoder that drafts when the target has verified.
        alike: the same with as many threads as the target has in `ahead`.
        ahead: decoder that drafts meanwhile.
        prompts: token ids.
        temperature: temperature; 0 for greedy decoding.
        tokens: number of new tokens of each prompt.
    """
    ahead.num_guesses = ahead.num_right = 0
    ahead.seconds_of.clear()
    options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": tokens, "seed": 1}
    pairs, stats, stats_alike, num_equal = [], [], [], 0
    for number, prompt in enumerate(prompts):
        order = (usual, alike, ahead) if number % 2 else (ahead, alike, usual)
        outputs = {own: own.generate(prompt, **options) for own in order}
        one, other = outputs[usual], outputs[ahead]
        num_equal += one.new_token_ids == other.new_token_ids
        speeds = [own.stats.decoded / _decoding_seconds(own.stats) for own in (one, other)]
        pairs.append(speeds)
        stats.append(one.stats)
        stats_alike.append(outputs[alike].stats)
    steps = sum(own.target_forwards for own in stats)
    parts = {
        name: sum(own.seconds[name] for own in stats) / steps
        for name in ("draft", "verify", "commit")
    }
    right = ahead.num_right / max(ahead.num_guesses, 1)
    beside = statistics.fmean(ahead.seconds_of["beside"]) / parts["verify"]
    alone = sum(own.seconds["verify"] for own in stats_alike) / steps
    drafted = statistics.fmean(ahead.seconds_of["ahead"])
    ratios = np.array([own[1] / own[0] for own in pairs])
    index = np.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    return {
        "temperature": temperature,
        "prompts": len(prompts),
        "equal_texts": num_equal,
        "tau": DecodeStats.pooled(stats).tau,
        "seconds_per_step": parts,
        "draft_share": parts["draft"] / (parts["draft"] + parts["verify"]),
        "right_guesses": right,
        "verify_beside_over_alone": beside,
        "verify_alone_over_usual": alone / parts["verify"],  # because of fewer threads
        "ahead_seconds": drafted,
        "expected_gain": expected_gain(
            parts["draft"], parts["verify"], parts["commit"], beside, drafted, right
        ),
        "expected_gain_of_a_free_device": expected_gain(
            parts["draft"], parts["verify"], parts["commit"], 1.0, drafted, right
        ),
        "gain": list(interval_of(float(ratios.mean()), ratios[index].mean(axis=1))),
        "tokens_per_second": [statistics.fmean(own[side] for own in pairs) for side in (0, 1)],
    }


def _decoding_seconds(stats: Any) -> float:
    return float(stats.seconds["total"] - stats.seconds["prefill"])


def main(words: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        words: arguments; None for those of the command line.
    """
    parser = argparse.ArgumentParser(description="Measure drafting ahead.")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, action="append", default=None)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--children", type=int, default=4)
    parser.add_argument("--threads", type=int, default=None, help="threads of each of the two")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args(words)
    tokenizer = load_tokenizer(arguments.target)
    target = load_causal_lm(arguments.target, dtype=torch.float32)
    small = load_causal_lm(arguments.draft_model, dtype=torch.float32)
    settings = SmallLMSettings(depth=arguments.depth, children=arguments.children)
    drafter = SmallLMDrafter(small, target, settings)
    usual = SpeculativeDecoder(target, drafter, tokenizer, tree="fixed")
    alike = SpeculativeDecoder(target, drafter, tokenizer, tree="fixed", threads=arguments.threads)
    ahead = _TimedDecoder(
        target,
        drafter,
        tokenizer,
        tree="fixed",
        threads=arguments.threads,
        draft_threads=arguments.threads,
    )
    vocab_size = usual.target.spec.vocab_size
    prompts = [
        encode_prompt(own.first, tokenizer, vocab_size)
        for own in read_prompts(arguments.prompts, arguments.num_prompts)
    ]
    for decoder in (usual, alike, ahead):
        decoder.generate(prompts[0], max_new_tokens=8, temperature=0)
    document = {
        "environment": environment_of(usual.target, arguments.target).model_dump(mode="json"),
        PARTS: parts_of(usual.target, {"small LM": drafter}, prompts, tokens=arguments.tokens),
        "threads": arguments.threads,
        "results": [
            measure(usual, alike, ahead, prompts, temperature, arguments.tokens)
            for temperature in arguments.temperature or [0.0, 1.0]
        ],
    }
    write_atomically(arguments.json, json.dumps(document, indent=1, default=str) + "\n")
    print(json.dumps(document["results"], indent=1))  # noqa: T201


if __name__ == "__main__":
    try:
        main()
    except JakiroError as error:
        sys.exit(f"error: {error}")
