"""Speed of this package beside transformers, vLLM and llama.cpp on the same prompts.

    python docs/programs/bench_peers.py --target FOLDER --drafter FOLDER --prompts FILE.jsonl \\
        --temperatures 0 1 --vllm PYTHON --llama-server PROGRAM --gguf FILE --out RESULT.json

Each engine runs in a process of its own, which waits while the others decode. All get the same
token ids, and continue groups of 1, 4 and 8 prompts, in an order that changes from group to group.
Prompts are also read alone, for a single new token. The first quarter of a file is left out: it is
for choosing settings. transformers, vLLM and this package compute with the same weights in
bfloat16, llama.cpp with a GGUF file. Engines whose program is not given are left out.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

Job = dict[str, Any]  # prompts (lists of token ids), max_new_tokens, temperature, seed
Decode = Callable[[Job], list[int]]  # returns the number of new tokens of each prompt
Speeds = dict[str, list[float]]  # tokens per second of each engine, for each group of prompts

OURS = {"autoregressive": None, "lookup": "lookup", "trained": "{0}", "both": "lookup+drafter={0}"}
TRANSFORMERS = ("transformers", "transformers-compiled", "transformers-lookup")
NGRAMS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
LLAMA_NGRAMS = ("--spec-type", "ngram-simple")
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # as our command line sets it
}
TOP = {"top_k": 50, "top_p": 1.0, "min_p": 0.0}  # as in `generate()` by default
PORT = 8137


def decoder_of(engine: str, given: argparse.Namespace) -> Decode:
    """Load an engine in this process."""
    if engine in OURS:
        return _ours(OURS[engine], given)
    return _vllm(engine, given) if engine.startswith("vllm") else _transformers(engine, given)


def _ours(drafter: str | None, given: argparse.Namespace) -> Decode:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from inference.decoder import SpeculativeDecoder

    options: dict[str, Any] = {"threads": "auto"}
    if drafter is None:
        model = AutoModelForCausalLM.from_pretrained(given.target, dtype="bfloat16")
        tokenizer = AutoTokenizer.from_pretrained(given.target)
        decoder = SpeculativeDecoder(model, None, tokenizer, **options)
    else:
        options |= {"dtype": "bfloat16", "other_weights": drafter != "lookup"}
        decoder = SpeculativeDecoder.from_pretrained(
            drafter.format(given.drafter), given.target, **options
        )

    def decode(job: Job) -> list[int]:
        limits = {key: job[key] for key in ("max_new_tokens", "temperature")}
        outputs = decoder.generate_batch(job["prompts"], **limits)
        return [len(output.new_token_ids) for output in outputs]

    return decode


def _transformers(engine: str, given: argparse.Namespace) -> Decode:
    import torch
    from transformers import AutoModelForCausalLM

    from inference.benchmark.methods import SamplingOptions
    from inference.benchmark.transformers_methods import CompiledDecoding, TransformersDecoding

    model = AutoModelForCausalLM.from_pretrained(given.target, dtype="bfloat16")
    torch._dynamo.config.recompile_limit = 64  # beyond the limit, steps would not be compiled
    kind = CompiledDecoding if engine == "transformers-compiled" else TransformersDecoding
    how: dict[str, Any] = {}
    if engine == "transformers-lookup":
        how["prompt_lookup_num_tokens"] = 10
    method = kind(engine, engine, model, **how)

    def decode(job: Job) -> list[int]:
        options = SamplingOptions(job["temperature"], job["max_new_tokens"])
        decoded = method.decode(job["prompts"], options, job["seed"])
        return [len(text.token_ids) for text in decoded.continuations]

    return decode


def _vllm(engine: str, given: argparse.Namespace) -> Decode:
    from vllm import LLM, SamplingParams

    how: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 8, "dtype": "bfloat16"}
    if engine == "vllm, n-grams":
        how["speculative_config"] = NGRAMS
    model = LLM(given.target, enable_prefix_caching=False, **how)  # others keep no prompts either

    def decode(job: Job) -> list[int]:
        limits = {"max_tokens": job["max_new_tokens"], "temperature": job["temperature"], **TOP}
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        outputs = model.generate(prompts, SamplingParams(**limits), use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return decode


@contextmanager
def llama_server(engine: str, given: argparse.Namespace) -> Iterator[Decode]:
    """Start llama.cpp's server, and yield a function that sends it prompts together."""
    port = PORT + (engine != "llama.cpp")
    words = [given.llama_server, "-m", given.gguf, "--port", str(port), "-np", "8", "-c", "16384"]
    words += ["-t", str(os.cpu_count()), *(LLAMA_NGRAMS if engine != "llama.cpp" else ())]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"http://127.0.0.1:{port}/{path}", data, headers)) as answer:
            return json.load(answer)

    def decode(job: Job) -> list[int]:
        def one(ids: list[int]) -> int:
            body = {"prompt": ids, "n_predict": job["max_new_tokens"], "cache_prompt": False}
            body |= {"temperature": job["temperature"], "seed": job["seed"], **TOP}
            return int(ask("completion", body)["tokens_predicted"])

        with ThreadPoolExecutor(len(job["prompts"])) as pool:
            return list(pool.map(one, job["prompts"]))

    try:
        for _ in range(240):
            try:
                ask("health")
                break
            except OSError:
                time.sleep(0.5)
        else:
            sys.exit(f"{given.llama_server} does not answer")
        yield decode
    finally:
        process.kill()
        process.wait()


@contextmanager
def worker(engine: str, python: str) -> Iterator[Decode]:
    """Start a process with an engine, and yield a function that sends it a job."""
    command = [python, __file__, *sys.argv[1:], "--engine", engine]
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )

    def decode(job: Job) -> list[int]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        line = next(line for line in process.stdout if line.startswith("{"))
        counts: list[int] = json.loads(line)["counts"]
        return counts

    try:
        # An engine that chooses its number of threads must not do so while others are loaded.
        decode({"prompts": [[1, 2, 3]], "max_new_tokens": 2, "temperature": 0.0, "seed": 0})
        yield decode
    finally:
        process.kill()
        process.wait()


def serve(engine: str, given: argparse.Namespace) -> None:
    """Decode the jobs that arrive on standard input."""
    decode = decoder_of(engine, given)
    for line in sys.stdin:
        sys.stdout.write(json.dumps({"counts": decode(json.loads(line))}) + "\n")
        sys.stdout.flush()


def engines_of(given: argparse.Namespace, stack: ExitStack) -> dict[str, Decode]:
    """Start all engines that are asked for, and for which there are programs."""
    ours = [name for name in OURS if given.drafter or name in ("autoregressive", "lookup")]
    starts = {name: partial(worker, name, sys.executable) for name in (*TRANSFORMERS, *ours)}
    for name in ("vllm", "vllm, n-grams") if given.vllm else ():
        starts[name] = partial(worker, name, given.vllm)
    for name in ("llama.cpp", "llama.cpp, n-grams") if given.llama_server else ():
        starts[name] = partial(llama_server, name, given)
    asked = given.engines or list(starts)
    return {name: stack.enter_context(starts[name]()) for name in asked}


def measure(engines: dict[str, Decode], groups: Sequence[list[list[int]]], job: Job) -> Speeds:
    """Return the tokens per second of each engine for each group.

    The shortest and the longest group warm up, so that nothing is compiled later. If there is a
    single new token, the tokens of the prompts are counted, otherwise new tokens.
    """
    speeds: Speeds = {name: [] for name in engines}
    ordered = sorted(groups, key=lambda group: sum(map(len, group)))
    for number, prompts in enumerate([ordered[0], ordered[-1], *groups]):
        job = {**job, "prompts": prompts, "seed": number}
        order = [name for name in engines if name != "transformers-lookup" or len(prompts) == 1]
        for name in random.Random(number).sample(order, len(order)):
            started = time.perf_counter()
            counts = engines[name](job)
            seconds = time.perf_counter() - started
            if job["max_new_tokens"] == 1:
                counts = [len(prompt) for prompt in prompts]
            if number > 1:
                speeds[name].append(sum(counts) / seconds)
    return {name: values for name, values in speeds.items() if values}


def columns_of(
    engines: dict[str, Decode], files: dict[str, list[list[int]]], given: argparse.Namespace
) -> Iterator[tuple[str, Speeds]]:
    """Yield the title and the speeds of each column of the table."""
    for name, prompts in files.items():
        singles = [[prompt] for prompt in prompts]
        job: Job = {"max_new_tokens": 1, "temperature": 0.0}
        yield f"{name}: prompts", measure(engines, singles, job)
        for temperature in given.temperatures:
            job = {"max_new_tokens": given.max_new_tokens, "temperature": temperature}
            for size in [size for size in given.requests if size <= len(prompts)]:
                groups = [prompts[i : i + size] for i in range(0, len(prompts) - size + 1, size)]
                yield f"{name}, T = {temperature:g}, {size} at once", measure(engines, groups, job)


def ratio(first: Sequence[float], second: Sequence[float]) -> str:
    """Return the mean ratio of speeds for the same groups, with a 95% bootstrap interval."""
    logs = np.log(first) - np.log(second)
    draws = np.random.default_rng(0).integers(len(logs), size=(4000, len(logs)))
    low, high = np.exp(np.quantile(logs[draws].mean(axis=1), (0.025, 0.975)))
    return f"{np.exp(logs.mean()):.2f} [{low:.2f}, {high:.2f}]"


def table(columns: dict[str, Speeds]) -> str:
    """Return a table of speeds, and of their ratios to the faster of the first two engines."""
    lines = [f"| engine | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name in next(iter(columns.values())):
        cells = [name]
        for speeds in columns.values():
            values, base = speeds.get(name), max(list(speeds.values())[:2], key=np.mean)
            cells.append(f"{np.mean(values):.1f}: {ratio(values, base)}" if values else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="folder of the model")
    parser.add_argument("--drafter", help="folder of a trained drafter")
    parser.add_argument("--prompts", type=Path, nargs="+", help="lines with messages or turns")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[1, 4, 8], help="sizes of groups"
    )
    parser.add_argument("--vllm", help="python of an environment with vLLM")
    parser.add_argument("--llama-server", help="server of llama.cpp")
    parser.add_argument("--gguf", help="file for llama.cpp")
    parser.add_argument("--engines", nargs="+", help="names of engines; all, if not given")
    parser.add_argument("--out", type=Path, help="file to write")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    return parser.parse_args()


def prompts_of(path: Path, given: argparse.Namespace) -> list[list[int]]:
    """Return the token ids of some prompts of a file."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(given.target)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    start = len(lines) // 4
    return [
        tokenizer.apply_chat_template(
            line.get("messages") or [{"role": "user", "content": line["turns"][0]}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for line in lines[start : start + given.num_prompts]
    ]


def main() -> None:
    """Measure all engines, print a table, and write all speeds."""
    given = arguments()
    if given.engine:
        serve(given.engine, given)
        return
    files = {path.stem: prompts_of(path, given) for path in given.prompts}
    columns: dict[str, Speeds] = {}
    with ExitStack() as stack:
        for title, speeds in columns_of(engines_of(given, stack), files, given):
            columns[title] = speeds
            means = ", ".join(f"{name} {np.mean(values):.1f}" for name, values in speeds.items())
            sys.stdout.write(f"{title}: {means}\n")
            sys.stdout.flush()
            if given.out:
                given.out.write_text(json.dumps(columns, indent=1) + "\n")
    sys.stdout.write(table(columns) + "\n")


if __name__ == "__main__":
    main()
