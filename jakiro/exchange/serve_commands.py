"""Commands with which other engines serve an exported drafter."""

import json
import shlex
from typing import Literal

Engine = Literal["vLLM", "SGLang"]


def serve_commands(
    layout: Literal["eagle3", "speculators", "vllm"], folder: str, target: str, depth: int
) -> dict[Engine, str]:
    """Return the command of each engine that reads a layout, to be pasted into a shell.

    Args:
        layout: layout of the exported drafter.
        folder: folder of the exported drafter.
        target: folder or hub id of the target.
        depth: number of tokens to draft.
    """
    if layout == "speculators":
        return {"vLLM": shlex.join(("vllm", "serve", folder))}
    drafting = {"method": "eagle3", "model": folder, "num_speculative_tokens": depth}
    options = ("--speculative-config", json.dumps(drafting))
    commands: dict[Engine, str] = {"vLLM": shlex.join(("vllm", "serve", target, *options))}
    if layout == "eagle3":
        commands["SGLang"] = shlex.join(_for_sglang(folder, target, depth))
    return commands


def _for_sglang(folder: str, target: str, depth: int) -> tuple[str, ...]:
    """Return a command that drafts chains; a larger topk drafts trees."""
    values = {"num-steps": depth, "eagle-topk": 1, "num-draft-tokens": depth + 1}
    sizes = [word for name, value in values.items() for word in (f"--speculative-{name}", value)]
    return (
        *("python", "-m", "sglang.launch_server", "--model-path", target),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", folder),
        *map(str, sizes),
    )
