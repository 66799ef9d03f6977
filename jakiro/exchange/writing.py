"""Writes imported drafters with their origin and settings for training, and exported drafters.

An exported drafter comes with the commands with which other engines serve it.
"""

import json
import shlex
from pathlib import Path
from typing import Any, Literal

import yaml
from safetensors.torch import save_file
from torch import Tensor

from jakiro import __version__
from jakiro.drafter import JakiroDrafter
from jakiro.exchange.plan import ImportPlan, described
from jakiro.utils.files import checksum, write_atomically, written_folder
from jakiro.utils.settings import merge

SETTINGS_FILE = "train.yaml"
_TOKENS_ONLY = {
    "token_weight": 1.0,
    "feature_weight": 0.0,
    "contrast_weight": 0.0,
    "distance_decay": 0.8,
}
_HEADER = """\
# Settings to train the imported drafter further. The file of a run contains `extends:` with the
# path of this file, data, and the settings that differ.
"""
Engine = Literal["vLLM", "SGLang"]


def record_of(plan: ImportPlan, measured: dict[str, Any]) -> dict[str, Any]:
    """Return the record of an import, which becomes part of the drafter's config."""
    checkpoint = plan.table.checkpoint
    return {
        "import": {
            "family": plan.family,
            "source": checkpoint.source,
            "revision": checkpoint.revision,
            "licence": checkpoint.licence,
            "files": checkpoint.checksums(),
            "jakiro": __version__,
            "measured": measured,
        }
    }


def write_import(drafter: JakiroDrafter, folder: Path) -> None:
    """Write an imported drafter and its settings, in full or not at all."""
    with written_folder(folder) as partial:
        drafter.save_pretrained(partial)
        write_atomically(partial / SETTINGS_FILE, _settings_file(drafter, folder))


def write_export(weights: dict[str, Tensor], config: dict[str, Any], folder: Path) -> None:
    """Write an exported drafter, in full or not at all."""
    with written_folder(folder) as partial:
        partial.mkdir()
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        write_atomically(partial / "config.json", json.dumps(config, indent=2) + "\n")


def checksums_in(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in an exported folder, in hexadecimal."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {file.name: checksum(file) for file in files}


def _settings_file(drafter: JakiroDrafter, folder: Path) -> str:
    """Return settings for training that start with the drafter's weights."""
    values: dict[str, object] = {
        "extends": "base",
        "target": {"name_or_path": drafter.config.target_record.name_or_path},
        "drafter": described(drafter.config.settings),
        "initialize": {
            "drafter": str(folder.absolute()),
            "attention_layer": None,
            "fit_tokens": 0,
        },
    }
    if drafter.own_head is not None:  # EAGLE-3 learns tokens only, on its own features too
        values["drafter"] = merge(described(drafter.config.settings), {"trunk": {"ttt_steps": 4}})
        values["objective"] = _TOKENS_ONLY
    return _HEADER + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def serve_commands(
    layout: Literal["eagle3", "speculators", "vllm"], folder: str, target: str, depth: int
) -> dict[Engine, str]:
    """Return the command of each engine that reads a layout, to be pasted into a shell."""
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
