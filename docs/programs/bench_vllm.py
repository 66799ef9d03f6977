"""Program that compares vLLM with and without drafts with this package: `make bench-vllm`.

All engines are loaded first, vLLM in processes of its own environment, and then continue the same
prompts greedily. Groups of prompts, sizes of a group and engines are interleaved in random order,
so that a drift of the machine's speed affects all of them. A group of several prompts is what that
many users at once ask for. Nothing else should run on the machine.

    make bench-vllm ARGS="--prompts PROMPTS.jsonl --out RESULT.json"
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, Protocol, Self

import torch
from transformers import PreTrainedModel

from inference.benchmark.machine import environment_of
from inference.benchmark.methods import OwnDecoding, SamplingOptions
from inference.benchmark.stats import median_interval
from inference.benchmark.subject import Subject, load_target
from inference.drafters.lookup import LookupDrafter
from inference.generation.prompt_file import distinct, read_prompts
from inference.generation.prompts import encode_prompt
from inference.loading import combined_drafter
from inference.trees.shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.exchange.vllm_export import export_vllm
from jakiro.exchange.writing import write_export
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.pretrained import local_model

WORKER = Path(__file__).with_name("vllm_worker.py")
UNAIDED = "vLLM"
PAUSE = 0.25  # seconds after which threads of the previous engine no longer spin
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}


class Run(NamedTuple):
    """One generation of a group of prompts.

    Attributes:
        engine: name of the engine.
        group: number of the group.
        size: number of prompts in the group.
        seconds: duration, with the time to read the prompts.
        texts: new tokens of each prompt.
        steps: number of decoding steps after the prompts were read, summed over prompts.
    """

    engine: str
    group: int
    size: int
    seconds: float
    texts: list[list[int]]
    steps: int

    @property
    def num_tokens(self) -> int:
        """The number of new tokens."""
        return sum(map(len, self.texts))


def tau(runs: Sequence[Run]) -> float:
    """Return the tokens per decoding step, without the tokens from reading the prompts."""
    return sum(run.num_tokens - run.size for run in runs) / sum(run.steps for run in runs)


class Engine(Protocol):
    """Something that continues groups of prompts."""

    name: str

    def generate(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Return the `seconds`, `texts` and `steps` of a `Run`."""
        ...


class VllmEngine:
    """vLLM in a process of its own.

    Args:
        name: name of the engine.
        python: interpreter of an environment with vLLM.
        arguments: arguments of `vllm.LLM`.
        limits: `max_tokens` and `stop` of requests.
        log: file for the output of vLLM.
    """

    def __init__(
        self,
        name: str,
        python: Path,
        arguments: dict[str, Any],
        limits: dict[str, Any],
        log: Path,
    ) -> None:
        self.name = name
        self.limits = limits
        speculation = arguments.get("speculative_config") or {}
        self._drafts_always = speculation.get("method") == "eagle3"
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [str(python), str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | _environment(python),
        )
        self.facts = self._ask(arguments)

    def generate(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Continue prompts together."""
        answer = self._ask({"prompts": prompts} | self.limits)
        # With n-grams, vLLM does not draft in every step and counts only the steps in which it
        # does. A step emits one token more than it accepts drafts.
        num_tokens = sum(len(text) - 1 for text in answer["texts"])
        steps = answer["drafts"] if self._drafts_always else num_tokens - answer["accepted"]
        return {"seconds": answer["seconds"], "texts": answer["texts"], "steps": steps}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)  # closes its input, which ends it
        self._log.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            self.__exit__()
            lines = Path(self._log.name).read_text().splitlines()
            raise SystemExit("\n".join([*lines[-20:], f"error: {self.name} has ended"]))
        answer: dict[str, Any] = json.loads(line)
        return answer


def _environment(python: Path) -> dict[str, str]:
    """Return the variables of vLLM's processes; vLLM is slower without the OpenMP of Intel."""
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    preloaded = {"LD_PRELOAD": str(openmp.absolute())} if openmp.exists() else {}
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"} | preloaded


class OwnEngine:
    """This package in this process.

    Args:
        name: name of the engine.
        method: method that decodes.
        max_new_tokens: largest number of new tokens of a prompt.
    """

    def __init__(self, name: str, method: OwnDecoding, max_new_tokens: int) -> None:
        self.name = name
        self.method = method
        self.sampling = SamplingOptions(0.0, max_new_tokens)

    def generate(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Continue prompts together."""
        started = time.perf_counter()
        decoded = self.method.decode(prompts, self.sampling, 0)
        seconds = time.perf_counter() - started
        stats = [each.stats for each in decoded.continuations]
        return {
            "seconds": seconds,
            "texts": [each.token_ids for each in decoded.continuations],
            "steps": sum(each.target_forwards for each in stats),
        }


def measured(
    engines: Sequence[Engine], prompts: list[list[int]], sizes: Sequence[int], repeats: int
) -> Iterator[Run]:
    """Yield the generations of all engines, after a warm-up of each engine with each size.

    Args:
        engines: engines to compare.
        prompts: token ids of each prompt.
        sizes: numbers of prompts that are generated at once.
        repeats: number of times that each group is generated by each engine.
    """
    for engine in engines:
        for size in sizes:
            engine.generate(prompts[:size])
    source = random.Random(0)
    groups = [
        (size, start)
        for size in sizes
        for start in range(0, len(prompts) - size + 1, size)
        for _ in range(repeats)
    ]
    source.shuffle(groups)
    for number, (size, start) in enumerate(groups):
        for engine in source.sample(engines, len(engines)):
            time.sleep(PAUSE)
            answer = engine.generate(prompts[start : start + size])
            yield Run(engine.name, start, size, **answer)
        sys.stderr.write(f"\r{number + 1} of {len(groups)} groups")
    sys.stderr.write("\n")


def figures(runs: Sequence[Run], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the figures of each engine.

    Args:
        runs: all generations.
        sizes: numbers of prompts that were generated at once.
    """
    names = list(dict.fromkeys(run.engine for run in runs))
    texts = {(run.group, run.size): run.texts for run in runs if run.engine == UNAIDED}
    rows = []
    for name in sorted(names, key=lambda name: (name != UNAIDED, name)):
        own = [run for run in runs if run.engine == name]
        alone = [run for run in own if run.size == min(sizes)]
        equal = [
            mine == other
            for run in own
            for mine, other in zip(run.texts, texts[run.group, run.size], strict=True)
        ]
        row: dict[str, Any] = {
            "engine": name,
            "tau": tau(alone),
            "equal": sum(equal) / len(equal),
        }
        for size in sizes:
            row[f"at_{size}"] = _speed([run for run in runs if run.size == size], name)
        rows.append(row)
    return rows


def _speed(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """Return an engine's tokens per second, and its speed-up over vLLM without drafts.

    Both are medians over groups, of which each has the mean of its repeats. The two runs of a
    speed-up have the same group and follow each other closely; groups are resampled for its
    interval.
    """
    own = [run for run in runs if run.engine == name]
    unaided = [run for run in runs if run.engine == UNAIDED]
    rates, ratios = defaultdict(list), defaultdict(list)
    for run, other in zip(own, unaided, strict=True):
        rate = run.num_tokens / run.seconds
        rates[run.group].append(rate)
        ratios[run.group].append(rate * other.seconds / other.num_tokens)
    return {
        "tokens_per_second": median(map(fmean, rates.values())),
        "speed_up": list(median_interval(list(map(fmean, ratios.values())))),
    }


def table(rows: Sequence[dict[str, Any]], sizes: Sequence[int]) -> str:
    """Return the figures as a table in Markdown.

    Args:
        rows: figures as `figures` returns them.
        sizes: numbers of prompts that were generated at once.
    """
    heads = [f"tokens/s at {size} | speed-up" for size in sizes]
    lines = [
        f"| engine | tau | {' | '.join(heads)} | texts equal |",
        "|" + "---|" * (3 + 2 * len(sizes)),
    ]
    for row in rows:
        cells = [row["engine"], f"{row['tau']:.2f}"]
        for size in sizes:
            found = row[f"at_{size}"]
            value, low, high = found["speed_up"]
            cells.append(f"{found['tokens_per_second']:.1f}")
            cells.append(f"{value:.2f} [{low:.2f}, {high:.2f}]")
        cells.append(f"{row['equal']:.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _own_engines(model: PreTrainedModel, options: argparse.Namespace) -> Iterator[OwnEngine]:
    """Yield the engines of this package."""
    from jakiro.utils.pretrained import load_tokenizer

    tokenizer = load_tokenizer(options.target, "the tokenizer of the target")
    subject = Subject(model, tokenizer, threads="auto", packed="auto", draft_forms="auto")
    drafter = JakiroDrafter.from_pretrained(options.drafter)
    chain = TreeShape(
        autoregressive_levels=options.drafts,
        parallel_levels=0,
        children=1,
        breadth=1,
        num_nodes=options.drafts,
    )
    both = combined_drafter(drafter, LookupDrafter(), model, tokenizer, draft_forms="auto")
    decoders = {
        "Jakiro, autoregressive": subject.decoder(),
        "Jakiro, lookup": subject.decoder(LookupDrafter()),
        "Jakiro, drafter, chains": subject.decoder(drafter, chain),
        "Jakiro, drafter, trees": subject.decoder(drafter),
        "Jakiro, lookup + drafter, trees": subject.decoder(both),
    }
    for name, decoder in decoders.items():
        yield OwnEngine(name, OwnDecoding(name, "own", decoder), options.tokens)


def _vllm_arguments(options: argparse.Namespace, exported: Path) -> dict[str, dict[str, Any]]:
    """Return the arguments of `vllm.LLM` of each engine."""
    common = {
        "model": local_model(options.target, options.torch_dtype),
        "dtype": options.dtype,
        "max_model_len": options.context,
        "max_num_seqs": max(options.sizes),
        "enforce_eager": options.eager,
        "enable_prefix_caching": False,  # every prompt is read in every run, as in this package
    }
    count = {"num_speculative_tokens": options.drafts}
    trained = {"method": "eagle3", "model": str(exported)} | count
    return {
        UNAIDED: common,
        "vLLM, n-grams": common | {"speculative_config": NGRAM | count},
        "vLLM, drafter of Jakiro, chains": common | {"speculative_config": trained},
    }


def _prompts(options: argparse.Namespace, model: PreTrainedModel) -> list[list[int]]:
    """Return the token ids of as many prompts of each file as the options say."""
    from jakiro.utils.pretrained import load_tokenizer

    tokenizer = load_tokenizer(options.target, "the tokenizer of the target")
    source, found = random.Random(options.seed), []
    for path in options.prompts:
        encoded = [
            encode_prompt(prompt.first, tokenizer, model.config.vocab_size)
            for prompt in distinct(read_prompts(path))
        ]
        fitting = [ids for ids in encoded if len(ids) + options.tokens < options.context]
        found += source.sample(fitting, min(options.num_prompts, len(fitting)))
    source.shuffle(found)
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--prompts", type=Path, nargs="+", required=True, help="files with prompts")
    add("--python", type=Path, required=True, help="interpreter of an environment with vLLM")
    add("--target", default="smollm2-135m-instruct")
    add("--drafter", default="smollm2-135m-instruct")
    add("--out", type=Path, help="JSON file to write")
    add("--num-prompts", type=int, default=4, help="prompts of each file")
    add("--tokens", type=int, default=64, help="new tokens of each prompt")
    add("--sizes", type=int, nargs="+", default=[1, 4, 8], help="prompts that run at once")
    add("--repeats", type=int, default=1, help="times that each group is measured")
    add("--drafts", type=int, default=4, help="length of the chains")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--context", type=int, default=1024, help="most tokens of a prompt and its answer")
    add("--eager", action="store_true", help="run vLLM without compilation")
    add("--seed", type=int, default=0, help="seed of the choice of prompts")
    options = parser.parse_args()
    options.torch_dtype = getattr(torch, options.dtype)
    return options


def main() -> None:
    """Measure all engines, write the data, and print the table."""
    options = _options()
    model, _ = load_target(options.target, options.torch_dtype, torch.device("cpu"))
    target = TargetAdapter(model)
    prompts = _prompts(options, model)
    ends = model.generation_config.eos_token_id
    stop = ends if isinstance(ends, list) else [ends]
    limits = {"max_tokens": options.tokens, "stop": stop}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = export_vllm(JakiroDrafter.from_pretrained(options.drafter), target)
        write_export(files.weights, files.config, folder / "drafter")
        engines: list[Engine] = []
        facts: dict[str, Any] = {}
        for name, arguments in _vllm_arguments(options, folder / "drafter").items():
            log = folder / f"{len(engines)}.log"
            engine = VllmEngine(name, options.python, arguments, limits, log)
            engines.append(stack.enter_context(engine))
            facts = engine.facts
        engines += _own_engines(model, options)
        runs = list(measured(engines, prompts, options.sizes, options.repeats))
    rows = figures(runs, options.sizes)
    environment = environment_of(target, str(options.target)).model_dump(mode="json")
    document = {
        "environment": environment,
        "vllm": facts | {"preloaded": _environment(options.python).get("LD_PRELOAD") is not None},
        "load_average": os.getloadavg()[0],
        "settings": {name: str(value) for name, value in vars(options).items()},
        "prompt_tokens": [len(ids) for ids in prompts],
        "figures": rows,
        "runs": [run._replace(texts=[])._asdict() | {"tokens": run.num_tokens} for run in runs],
    }
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(table(rows, options.sizes) + "\n")


if __name__ == "__main__":
    main()
