"""A process that generates with vLLM; `bench_vllm.py` starts it in an environment with vLLM.

Standard input and output have one JSON object per line. The first input has the arguments of
`vllm.LLM`; the first output, when the model is loaded, has vLLM's version and number of threads.
Each further input is a group of prompts that are generated together:

    input   {"prompts": [[token ids]], "max_tokens": N, "stop": [token ids]}
    output  {"seconds": S, "texts": [[token ids]], "drafts": N, "accepted": N}
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process that waits without computing
PREFIX = "vllm:spec_decode_num_"


def main() -> None:
    """Load a model and generate until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what libraries print
    requests = _lines(sys.stdin)
    import torch
    import vllm

    engine = vllm.LLM(**next(requests), disable_log_stats=False, skip_tokenizer_init=True)
    _write(answers, {"vllm": vllm.__version__, "threads": torch.get_num_threads()})
    for request in requests:
        _write(answers, _generated(engine, request))


def _generated(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0,
        max_tokens=request["max_tokens"],
        stop_token_ids=request["stop"],
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    before = _counts(engine)
    started = time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    counts = {name: value - before[name] for name, value in _counts(engine).items()}
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    return {"seconds": seconds, "texts": texts} | counts


def _counts(engine: Any) -> dict[str, int]:
    """Return how many chains were drafted so far, and how many drafts were accepted."""
    found = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    names = {"drafts": f"{PREFIX}drafts", "accepted": f"{PREFIX}accepted_tokens"}
    return {name: found.get(counter, 0) for name, counter in names.items()}


def _lines(source: TextIO) -> Iterator[dict[str, Any]]:
    for line in source:
        yield json.loads(line)


def _write(sink: TextIO, content: dict[str, Any]) -> None:
    sink.write(json.dumps(content) + "\n")
    sink.flush()


if __name__ == "__main__":
    main()
