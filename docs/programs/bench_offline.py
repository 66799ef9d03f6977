"""Program that measures how long drafters agree with the target when they write alone.

The target writes greedy text after each prompt. At each cut, a drafter that has seen prompt and
text so far continues it alone, as on a device whose connection is lost: without verification, and
without new states of the target. For each number of tokens since the cut, the program counts the
tokens that equal the target's at the same position, and those before the first difference, which
would stay. It also computes the target's negative log-likelihood of what was written.

A run can be interrupted at any time, and goes on where it has stopped, unless the target, a drafter
or a prompt has changed:

    make bench-offline ARGS="--target TARGET --prompts FILE.jsonl --method feedback=DRAFTER
                             --method lm=MODEL --method lookup --minutes 3 --json RESULT.json"
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList

from inference.benchmark.machine import environment_of
from inference.benchmark.stored_parts import continued_document, parts_of
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.context import PREFILL_CHUNK, Context
from inference.generation.prompt_file import read_prompts
from inference.generation.prompts import encode_prompt
from inference.protocol import Budget, Drafter
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.errors import JakiroError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.files import write_atomically
from jakiro.utils.packaged import packaged_drafter
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer

SINCE = (8, 16, 32, 64, 128, 256)  # numbers of tokens since the cut
GREEDY = Sampling(LogitsProcessorList(), do_sample=False)


def chain_drafter(method: str, target: TargetAdapter, length: int) -> Drafter:
    """Return a drafter whose trees are single paths.

    Args:
        method: `lookup`, `lm=MODEL`, or NAME=DRAFTER for a trained drafter.
        target: the target.
        length: number of tokens of a path.
    """
    name, _, path = method.partition("=")
    if name == "lookup":
        return LookupDrafter(LookupSettings(num_nodes=length, depth=length))
    if name == "lm":
        model = load_causal_lm(path, "the small language model", dtype=target.dtype)
        settings = SmallLMSettings.model_construct(depth=length, children=1, breadth=1)
        return SmallLMDrafter(model, target.model, settings)
    model = JakiroDrafter.from_pretrained(packaged_drafter(path) or path).eval()
    # `model_construct` skips the limit of depth, which suits drafting for speed.
    shape = TreeShape.model_construct(
        autoregressive_levels=length,
        parallel_levels=0,
        children=1,
        breadth=1,
        num_nodes=length,
        sampled=False,
    )
    return TrainedDrafter.for_target(model, target, trees=shape)


@torch.inference_mode()
def written_alone(
    target: TargetAdapter, drafter: Drafter, token_ids: Sequence[int], length: int
) -> list[int]:
    """Return the drafter's own continuation of tokens that the target has verified.

    Args:
        target: the target.
        drafter: drafter whose trees are single paths.
        token_ids: prompt and text so far.
        length: largest number of tokens to write.
    """
    known, context = list(token_ids), Context(target, drafter, GREEDY, 1, len(token_ids) + length)
    try:
        for offset in range(0, len(known) - 1, PREFILL_CHUNK):
            context.read([known[:-1]], offset, min(PREFILL_CHUNK, len(known) - 1 - offset))
        context.lengths = [len(known) - 1]
        tree = context.propose([known], Budget(length, length), StepRandom()).sequence_tree()
    finally:
        context.close()
    return [tree.token_ids[node] for node in tree.best_path()]


@torch.inference_mode()
def losses(target: TargetAdapter, token_ids: Sequence[int], count: int) -> list[float]:
    """Return the target's negative log-likelihood of each of the last `count` tokens, in nats.

    Args:
        target: the target.
        token_ids: all tokens.
        count: number of tokens at the end.
    """
    if not count:
        return []
    ids = torch.tensor([list(token_ids)], device=target.device)
    logits = target.model(ids).logits[0, -count - 1 : -1].float()
    chosen = logits.log_softmax(dim=-1).gather(1, ids[0, -count:, None])
    return [-value for value in chosen[:, 0].tolist()]


def record(
    target: TargetAdapter, known: Sequence[int], expected: Sequence[int], written: Sequence[int]
) -> dict[str, Any]:
    """Return what was measured for one continuation.

    Args:
        target: the target.
        known: tokens before the cut.
        expected: the target's tokens after it.
        written: the drafter's tokens after it.
    """
    equal = [own == other for own, other in zip(written, expected, strict=False)]
    kept = equal.index(False) if False in equal else len(equal)
    return {
        "num_expected": len(expected),
        "num_written": len(written),
        "num_kept": kept,
        "equal": "".join("01"[own] for own in equal),
        "losses": [round(own, 4) for own in losses(target, [*known, *written], len(written))],
        "target_losses": [
            round(own, 4) for own in losses(target, [*known, *expected], len(expected))
        ],
    }


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one method, for each number of tokens since the cut.

    Positions after the end of the target's text do not count, and those at which the drafter has
    written nothing count as different.

    Args:
        records: what was measured for each continuation.
    """
    found: dict[str, Any] = {
        "continuations": len(records),
        "kept": statistics.fmean(own["num_kept"] for own in records),
        "written": statistics.fmean(own["num_written"] for own in records),
    }
    for since in SINCE:
        full = [own for own in records if own["num_expected"] >= since]
        if not full:
            continue
        losses_of = {
            kind: [loss for own in full for loss in own[kind][:since]]
            for kind in ("losses", "target_losses")
        }
        found[str(since)] = {
            "continuations": len(full),
            "agreement": statistics.fmean(own["equal"][:since].count("1") / since for own in full),
            "unbroken": statistics.fmean(own["num_kept"] >= since for own in full),
            "nll": statistics.fmean(losses_of["losses"]) if losses_of["losses"] else None,
            "target_nll": statistics.fmean(losses_of["target_losses"]),
        }
    return found


def run(arguments: argparse.Namespace) -> bool:
    """Measure until the time is over, and return whether everything has been measured.

    Args:
        arguments: arguments of the program.
    """
    end = time.monotonic() + 60 * arguments.minutes
    path: Path = arguments.json
    tokenizer = load_tokenizer(arguments.target)
    model = load_causal_lm(arguments.target, dtype=torch.float32).requires_grad_(False).eval()
    target = TargetAdapter(model)
    prompts = read_prompts(arguments.prompts, arguments.num_prompts)
    length = max(SINCE) if arguments.length is None else arguments.length
    drafters = {name: chain_drafter(name, target, length) for name in arguments.method}
    encoded = [encode_prompt(own.first, tokenizer, target.spec.vocab_size) for own in prompts]
    most = max(arguments.cut) + length
    parts = parts_of(target, drafters, encoded, length=length, tokens=most)
    document = continued_document(path, parts, records={}, texts={})
    document["environment"] = environment_of(target, arguments.target).model_dump(mode="json")
    for number, ids in enumerate(encoded):
        for cut in arguments.cut:
            for name, drafter in drafters.items():
                key = f"{name} {number} {cut}"
                if key in document["records"]:
                    continue
                if time.monotonic() > end:
                    return False
                text = document["texts"].get(str(number)) or _greedy(model, ids, most)
                document["texts"][str(number)] = text
                known, expected = [*ids, *text[:cut]], text[cut : cut + length]
                if not expected:
                    continue
                written = written_alone(target, drafter, known, len(expected))
                document["records"][key] = {
                    "method": name,
                    "cut": cut,
                    **record(target, known, expected, written),
                }
                _write(path, document, arguments)
    _write(path, document, arguments)
    return True


def _greedy(model: Any, ids: Sequence[int], count: int) -> list[int]:
    prompt = torch.tensor([list(ids)])
    mask = torch.ones_like(prompt)
    output = model.generate(prompt, attention_mask=mask, max_new_tokens=count, do_sample=False)
    tokens: list[int] = output[0, len(ids) :].tolist()
    return tokens


def _write(path: Path, document: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write all records, and the figures of each method."""
    records = list(document["records"].values())
    document["summary"] = {
        name: summary([own for own in records if own["method"] == name])
        for name in arguments.method
        if any(own["method"] == name for own in records)
    }
    write_atomically(path, json.dumps(document, indent=1, default=str) + "\n")


def main(words: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        words: arguments; None for those of the command line.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=None)
    parser.add_argument("--method", action="append", required=True)
    parser.add_argument("--cut", type=int, action="append", default=None)
    parser.add_argument("--length", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args(words)
    arguments.cut = arguments.cut or [0, 64]
    is_complete = run(arguments)
    print("complete" if is_complete else "run the program again to go on")  # noqa: T201


if __name__ == "__main__":
    try:
        main()
    except JakiroError as error:
        sys.exit(f"error: {error}")
