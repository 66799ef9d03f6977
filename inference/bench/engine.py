"""Measures the decode engine itself: `python -m inference.bench.engine --target PATH`.

Prints progress to standard error and, as its last line, one JSON document to standard output.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from inference.decoder import SpeculativeDecoder
from jakiro.provenance import provenance

PROMPT_TOKENS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements and print the document."""
    options = _parse(arguments)
    model = _load(options.target)
    prompts = _prompts(model, options.prompts)
    decoder = SpeculativeDecoder(model)
    ours: list[float] = []
    theirs: list[float] = []
    overhead: list[float] = []
    for number, prompt in enumerate([prompts[0], *prompts]):
        started = time.perf_counter()
        _by_transformers(model, prompt, options.new_tokens)
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        output = decoder.generate(prompt, max_new_tokens=options.new_tokens)
        if number == 0:  # warm-up
            continue
        theirs.append(seconds)
        ours.append(time.perf_counter() - started)
        spent = output.stats.seconds
        overhead.append(1 - spent["verify"] / (spent["total"] - spent["prefill"]))
        sys.stderr.write(f"prompt {number}: {theirs[-1]:.2f} s, ours {ours[-1]:.2f} s\n")
    ratios = [one / other for one, other in zip(theirs, ours, strict=True)]
    document = {
        "plain_vs_transformers": _interval(ratios),
        "own_overhead_share": _interval(overhead),
        "environment": {
            **provenance(),
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "dtype": str(model.dtype),
            "parameters": model.num_parameters(),
            "new_tokens": options.new_tokens,
        },
    }
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the decode engine.")
    parser.add_argument("--target", help="folder or hub id; by default a random 12-layer Llama")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    return parser.parse_args(arguments)


def _load(target: str | None) -> PreTrainedModel:
    if target is not None:
        model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    else:
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=4096,
                hidden_size=256,
                intermediate_size=688,
                num_hidden_layers=12,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=1024,
            )
        )
    model.generation_config.eos_token_id = None  # every run has the same length
    return model.eval()


def _prompts(model: PreTrainedModel, count: int) -> list[list[int]]:
    source = random.Random(0)
    vocab = int(model.config.get_text_config().vocab_size)
    return [[source.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def _by_transformers(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> None:
    ids = torch.tensor([prompt], device=model.device)
    generate: Any = model.generate
    generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )


def _interval(values: list[float], resamples: int = 2000) -> dict[str, float]:
    """Return the median with its 95% bootstrap interval over prompts."""
    source = random.Random(0)
    medians = sorted(
        statistics.median(source.choices(values, k=len(values))) for _ in range(resamples)
    )
    return {
        "value": statistics.median(values),
        "low": medians[int(0.025 * resamples)],
        "high": medians[int(0.975 * resamples)],
    }


if __name__ == "__main__":
    sys.exit(main())
