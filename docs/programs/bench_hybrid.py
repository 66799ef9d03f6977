"""Speed of chains on a target with recurrent layers, beside transformers' own `generate()`.

    python docs/programs/bench_hybrid.py --dtype float32 --rounds 8 --out RESULT.json

The target has the layers of Qwen3.5 (three delta networks for each attention layer) and random
weights. The drafter knows the text, and each of its drafts is wrong with a probability that gives
the wanted number of tokens per step. All methods continue the same prompt, in turns.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from inference import SpeculativeDecoder
from inference.benchmark.stats import Rate, ratio
from inference.drafters.base import TokenDrafter, Tokens
from inference.drafters.candidates import Candidates
from jakiro.target import recurrence


class Oracle(TokenDrafter):
    """Drafter of chains of a known text."""

    def __init__(self, text: list[int], depth: int, tau: float) -> None:
        super().__init__("oracle", depth, depth)
        self._text, self._random = np.array(text), np.random.default_rng(0)
        rates = np.linspace(0, 1, 10_001)
        taus = np.sum([rates**level for level in range(depth + 1)], axis=0)
        self._rate = rates[np.searchsorted(taus, tau)]

    def draft(self, token_ids: Tokens, num_nodes: int, depth: int) -> Candidates:
        drafts = self._text[len(token_ids) :][: min(num_nodes, depth)].copy()
        drafts[self._random.random(len(drafts)) > self._rate] = 0
        return Candidates.chain(drafts)


def target_of(hidden: int, layers: int) -> Any:
    torch.manual_seed(0)
    fields: dict[str, Any] = {"vocab_size": 32_000, "tie_word_embeddings": True}
    fields |= {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    fields |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256 or 1}
    fields |= {"linear_num_key_heads": hidden // 128, "linear_num_value_heads": hidden // 64}
    fields |= dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 64)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields, initializer_range=0.05)).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = {"hidden": 1024, "layers": 12, "depth": 4, "tau": 2.5, "tokens": 128, "rounds": 8}
    for name, number in (numbers | {"replayed": recurrence.MOST_REPLAYED}).items():
        parser.add_argument(f"--{name}", type=type(number), default=number)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compiled", action="store_true", help="compile transformers' model, too")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    recurrence.MOST_REPLAYED = given.replayed
    model = target_of(given.hidden, given.layers).to(getattr(torch, given.dtype))
    eager, prompt = model.forward, torch.randint(1, 32_000, (1, 128))
    options = {"max_new_tokens": given.tokens, "eos_token_id": None, "do_sample": False}

    def generate(forward: Callable[..., Any]) -> list[int]:
        model.forward = forward
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        model.forward = eager
        return list(output[0].tolist())

    text = generate(eager)
    decoders = [
        SpeculativeDecoder(model, drafter, tree="fixed")
        for drafter in (None, Oracle(text, given.depth, given.tau))
    ]
    methods: dict[str, Callable[[], Any]] = {"transformers": partial(generate, eager)}
    for name, decoder in zip(("alone", "chains"), decoders, strict=True):
        methods[name] = partial(decoder.generate, prompt[0].tolist(), **options)
    if given.compiled:
        methods["compiled"] = partial(generate, torch.compile(eager, dynamic=True))
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    outputs: dict[str, Any] = {}
    for number in range(given.rounds + 1):
        for name in sorted(methods, reverse=number % 2 == 1):
            started = time.perf_counter()
            outputs[name] = methods[name]()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
    counts = np.full((1, given.rounds), given.tokens)
    speeds = {name: Rate(counts, np.array([taken])) for name, taken in seconds.items()}
    ratios = {name: ratio(speed, speeds["transformers"]) for name, speed in speeds.items()}
    result = {
        "settings": {name: str(value) for name, value in vars(given).items()},
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "threads": torch.get_num_threads(),
        "tau": outputs["chains"].stats.tau,
        "is_same_text": outputs["chains"].sequences[0].tolist() == text,
        "tokens_per_second": {name: round(speed.pooled, 2) for name, speed in speeds.items()},
        "times_transformers": {name: item.shown(2) for name, item in ratios.items()},
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
