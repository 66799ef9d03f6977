"""Generates with vLLM and writes token ids, counters and draft logits; a program of its own.

Arguments: a JSON file with a request, a JSON file for the answer, and a file for the logits of
drafted tokens, or "-" for none. The request has these keys:

- `target`: folder of the model.
- `speculative`: vLLM's `speculative_config`, or null.
- `options`: further arguments of `vllm.LLM`.
- `patched`: whether to mend vLLM on the CPU (see `helpers/vllm_patches.py`).
- `batches`: list of `{prompts, max_tokens, temperature, top_p, chunk}`, which are generated in
  turn. A prompt is read in chunks of `chunk` tokens, unless this is 0 or absent. If it differs from
  that of the batch before, cached prefixes are forgotten.

The answer has a list with `texts` and `counters` for each batch.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model is in this process, for the record
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

COUNTED = ("spec_decode", "prefix_cache_hits", "num_preemptions")


def _record_logits(calls: list[Any]) -> None:
    """Keep the logits of every drafted token."""
    from inference.vllm_plugin.model import VllmDrafter

    compute = VllmDrafter.compute_logits

    def recorded(self: Any, hidden_states: Any) -> Any:
        logits = compute(self, hidden_states)
        calls.append(logits.detach().float().clone())
        return logits

    VllmDrafter.compute_logits = recorded


def _counters(engine: Any) -> dict[str, Any]:
    values = {
        metric.name.removeprefix("vllm:"): getattr(metric, "value", getattr(metric, "values", None))
        for metric in engine.get_metrics()
        if any(name in metric.name for name in COUNTED)
    }
    return {name: value for name, value in values.items() if value is not None}


def _since(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return by how much each counter has grown; it may be a list of numbers."""

    def grown(name: str) -> Any:
        value, start = now[name], earlier.get(name)
        if isinstance(value, list):
            start = start or [0] * len(value)
            return [new - old for new, old in zip(value, start, strict=True)]
        return value - (start or 0)

    return {name: grown(name) for name in now}


def main(request: dict[str, Any], out: Path, record: Path | None) -> None:
    import torch
    from vllm import LLM, SamplingParams

    if request.get("patched"):
        from helpers.vllm_patches import mend_vllm

        mend_vllm()
    calls: list[Any] = []
    if record is not None:
        _record_logits(calls)
    options = {"max_num_seqs": 4, "max_model_len": 256, "dtype": "float32"}
    engine = LLM(
        model=request["target"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        speculative_config=request["speculative"],
        disable_log_stats=False,
        **options | request.get("options", {}),
    )
    calls.clear()  # of the engine's own trial runs
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    answer, earlier, chunk = [], _counters(engine), 0
    for batch in request["batches"]:
        if batch.get("chunk", 0) != chunk:
            chunk = batch["chunk"]
            scheduler.scheduler_config.long_prefill_token_threshold = chunk
            engine.reset_prefix_cache()
        sampling = SamplingParams(
            temperature=batch.get("temperature", 0),
            top_p=batch.get("top_p", 1),
            max_tokens=batch["max_tokens"],
            detokenize=False,
            ignore_eos=True,
        )
        prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        texts = [list(each.outputs[0].token_ids) for each in outputs]
        now = _counters(engine)
        answer.append({"texts": texts, "counters": _since(earlier, now), "calls": len(calls)})
        earlier = now
    out.write_text(json.dumps(answer))
    if record is not None:
        torch.save(calls, record)


if __name__ == "__main__":
    wanted, answer, logits = sys.argv[1:]
    main(
        json.loads(Path(wanted).read_text()),
        Path(answer),
        None if logits == "-" else Path(logits),
    )
