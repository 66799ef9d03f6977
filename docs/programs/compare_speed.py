"""Speed of two checkouts on the same prompts, interleaved prompt by prompt on one machine.

    python docs/programs/compare_speed.py OLD NEW --target FOLDER --prompts FILE.jsonl

Each checkout has a process of its own, which waits while the other one decodes. Trees are fixed, so
tokens and tau of greedy decoding must be equal.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

METHODS = ("autoregressive", "lookup", "trained", "both")
DRAFTER = "jakiro/assets/smollm2-135m-instruct/drafter"


def work(target: str) -> None:
    """Decode the prompts that arrive on standard input, with the checkout on `PYTHONPATH`."""
    from inference.decoder import SpeculativeDecoder

    drafter = str(Path(os.environ["PYTHONPATH"]) / DRAFTER)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(target)
    decoders = {"autoregressive": SpeculativeDecoder(model, None, tokenizer, threads=2)}
    names = {"lookup": "lookup", "trained": drafter, "both": f"lookup+drafter={drafter}"}
    for method, name in names.items():
        decoders[method] = SpeculativeDecoder.from_pretrained(
            name,
            target,
            "fixed",
            threads=2,
            other_weights=method != "lookup",
            dtype="bfloat16",
        )
    answer({})
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        output = decoders[job["method"]].generate(job["prompt"], max_new_tokens=64, temperature=0)
        seconds = time.perf_counter() - start
        answer({"tokens": output.new_token_ids, "seconds": seconds, "tau": output.stats.tau})


def answer(values: dict[str, Any]) -> None:
    """Write a line for the other process."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


class Worker:
    """A process that decodes with a checkout."""

    def __init__(self, checkout: str, target: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", "--target", target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": checkout, "GOMP_SPINCOUNT": "10000"},
            text=True,
        )
        self.read()

    def read(self) -> dict[str, Any]:
        """Return the next values of the process."""
        assert self.process.stdout is not None
        values: dict[str, Any] = json.loads(self.process.stdout.readline())
        return values

    def decode(self, method: str, prompt: Any) -> dict[str, Any]:
        """Return tokens, tau and seconds of a prompt."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"method": method, "prompt": prompt}) + "\n")
        self.process.stdin.flush()
        return self.read()


def compare(workers: list[Worker], method: str, prompts: list[Any]) -> str:
    """Return a line with the ratio of the speeds, and a bootstrap interval over prompts."""
    logs, tau, num_equal = [], [], 0
    for prompt in prompts:
        # old, new, new, old: a drift of the machine's speed cancels out
        runs = [workers[index].decode(method, prompt) for index in (0, 1, 1, 0)]
        seconds = [run["seconds"] for run in runs]
        logs.append(np.log((seconds[0] + seconds[3]) / (seconds[1] + seconds[2])))
        tau.append([runs[0]["tau"], runs[1]["tau"]])
        num_equal += runs[0]["tokens"] == runs[1]["tokens"]
    draws = np.random.default_rng(0).choice(logs, (4000, len(logs))).mean(axis=1)
    low, ratio, high = np.exp([np.quantile(draws, 0.025), np.mean(logs), np.quantile(draws, 0.975)])
    old, new = np.mean(tau, axis=0)
    return (
        f"{method:15} equal texts {num_equal}/{len(prompts)}, tau {old:.4f} and {new:.4f}, "
        f"speed new/old {ratio:.3f} [{low:.3f}, {high:.3f}]"
    )


def main() -> None:
    """Compare all methods."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", help="old and new checkout")
    parser.add_argument("--target", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=Path, help="lines with the key messages")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.target)
        return
    lines = given.prompts.read_text().splitlines()[: given.num_prompts]
    prompts = [json.loads(line)["messages"] for line in lines]
    workers = [Worker(checkout, given.target) for checkout in given.checkouts]
    for method in METHODS:
        for worker in workers:
            worker.decode(method, prompts[0])
        sys.stdout.write(compare(workers, method, prompts) + "\n")
        sys.stdout.flush()
    for worker in workers:
        worker.process.kill()


if __name__ == "__main__":
    main()
