"""Generates with vLLM and writes token ids, counters and draft logits; a program of its own.

Arguments: a JSON file with `target`, `drafter` (or null), `drafts`, `prompts`, `max_tokens`,
`options` of the engine and `runs`; a JSON file to write; a file for logits, or "-" for none.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model is in this process, for the record
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def _record_logits(calls: list[Any]) -> None:
    """Keep the logits of every drafted token."""
    from inference.serving.vllm_plugin.model import VllmDrafter

    compute = VllmDrafter.compute_logits

    def recorded(self: Any, hidden_states: Any) -> Any:
        logits = compute(self, hidden_states)
        calls.append(logits.detach().float().clone())
        return logits

    VllmDrafter.compute_logits = recorded


def main(request: dict[str, Any], out: Path, record: Path | None) -> None:
    import torch
    from vllm import LLM, SamplingParams

    calls: list[Any] = []
    if record is not None:
        _record_logits(calls)
    speculative = None
    if request["drafter"] is not None:
        speculative = {
            "method": "eagle3",
            "model": request["drafter"],
            "num_speculative_tokens": request["drafts"],
        }
    options = {"max_num_seqs": 4, "max_model_len": 256} | request.get("options", {})
    engine = LLM(
        model=request["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        speculative_config=speculative,
        disable_log_stats=False,
        **options,
    )
    calls.clear()  # of the engine's own trial runs
    sampling = SamplingParams(
        temperature=0, max_tokens=request["max_tokens"], detokenize=False, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    texts = [
        [list(each.outputs[0].token_ids) for each in engine.generate(prompts, sampling)]
        for _ in range(request.get("runs", 1))
    ]
    counters = {
        metric.name.removeprefix("vllm:"): getattr(metric, "value", getattr(metric, "values", None))
        for metric in engine.get_metrics()
        if "spec_decode" in metric.name or "prefix_cache_hits" in metric.name
    }
    out.write_text(json.dumps({"texts": texts, "counters": counters}))
    if record is not None:
        torch.save(calls, record)


if __name__ == "__main__":
    wanted, answer, logits = sys.argv[1:]
    main(
        json.loads(Path(wanted).read_text()),
        Path(answer),
        None if logits == "-" else Path(logits),
    )
