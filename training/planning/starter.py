"""Settings of a first training run for a target, as a YAML file that users can edit."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.devices import default_dtype
from jakiro.utils.packaged import config_names, config_path
from jakiro.utils.settings import read_layered_yaml
from training.input_settings import TargetSettings
from training.planning.memory import target_on_meta
from training.setup.target_layer import layers_of

_MOST_HELD_OUT = 32
_DTYPES = {"torch.bfloat16": "bf16", "torch.float32": "fp32"}

_TEMPLATE = """\
# Settings of a training run; see `jakiro train --help`. The reference of the configuration
# describes every key. Values that are not set here come from `base`, a file of the package.
extends: base

target:
  name_or_path: {target}
  dtype: {dtype}

data:
  paths: {paths}
  sequence_length: {sequence_length}{split}
  validation_size: {validation_size:<2}          # conversations held out to measure the drafter

{drafter}
# On several GPUs, raise global_batch_size. To use an engine.zero_stage above 0, change the
# optimizer to {{kind: adamw, learning_rate: 0.001}}.
optimizer: {{kind: muon, learning_rate: 0.005, schedule: cosine}}
batch: {{global_batch_size: 8, micro_batch_size: 4}}
evaluation: {{num_prompts: 8}}
checkpoint: {{every: 100}}

epochs: 4                      # or `steps`, or `minutes` for a run of limited time
run_folder: runs/{name}
"""

_DRAFTER = """\
drafter:
  # One layer that starts as the last layer of the target, and reads {reads}.
  trunk: {{kind: feedback, fusion_layers: {states}, ttt_steps: 2, first_position: false{form}}}
  experts: {{num_experts: 1, intermediate_size: {intermediate_size}, combine: mixture}}
  schedule: {{autoregressive_levels: 4, parallel_levels: 0}}
"""


def starter_yaml(name_or_path: str, paths: Sequence[str], drafter: str | None = None) -> str:
    """Return the settings of a first run as YAML; they suit the target's depth and width.

    Args:
        drafter: name of a file in `configs/drafters`; None for the shape of the drafter for
            SmolLM2-135M-Instruct that comes with the project.
    """
    dtype = _DTYPES[str(default_dtype())]
    target = target_on_meta(TargetSettings(name_or_path=name_or_path, dtype=dtype))
    name = short_name(name_or_path)
    return _TEMPLATE.format(
        target=json.dumps(name_or_path),  # valid YAML, whatever characters it contains
        name=name if drafter is None else f"{name}-{drafter}",
        dtype=dtype,
        paths=json.dumps(list(paths)),
        sequence_length=min(512, target.spec.max_position),
        split="\n  split: alone" if target.spec.is_recurrent else "",
        validation_size=validation_size(paths),
        drafter=_standard(target) if drafter is None else _named(drafter, target),
    )


def _standard(target: TargetAdapter) -> str:
    layers = fused_states(target.spec.num_hidden_states)
    return _DRAFTER.format(
        states="null" if layers is None else list(layers),
        form="".join(
            f", {key}: {json.dumps(value)}" for key, value in attention_form(target).items()
        ),
        reads="its last hidden state" if layers is None else "an early, a middle and a late state",
        intermediate_size=_intermediate_size(target),
    )


def _named(name: str, target: TargetAdapter) -> str:
    names = sorted(
        path_of.removeprefix("drafters/") for path_of in config_names() if "drafters/" in path_of
    )
    if name not in names:
        raise ConfigError(f"there is no drafter {name!r}", expected=f"one of {', '.join(names)}")
    path = Path("drafters", name)
    comment, sections = config_path(path).read_text().partition("\n")[0], read_layered_yaml(path)
    trunk = sections["drafter"].setdefault("trunk", {})
    if trunk.get("num_layers") != 0:
        trunk |= attention_form(target)
    if trunk.get("fusion_layers"):
        states = fused_states(target.spec.num_hidden_states)
        if states is not None and name == "eagle3-exact":
            states = (2, *states[1:])  # which engines read if a config names none
        trunk["fusion_layers"] = None if states is None else list(states)
    trunk.setdefault("first_position", False)  # as in vLLM
    experts = sections["drafter"].setdefault("experts", {})
    experts.setdefault("intermediate_size", _intermediate_size(target))
    dumped = yaml.safe_dump(sections, sort_keys=False, default_flow_style=None, width=120)
    return f"{comment}\n{dumped}"


def _intermediate_size(target: TargetAdapter) -> int:
    config = target.model.config.get_text_config()
    return getattr(config, "intermediate_size", None) or 4 * int(config.hidden_size)


def validation_size(paths: Sequence[str]) -> int:
    """Return how many conversations to hold out: 32, or a tenth of the data if that is less.

    Args:
        paths: training data. Only JSONL files are counted; other data is taken to be large.
    """
    files = [Path(path) for path in paths]
    if not all(file.suffix == ".jsonl" and file.is_file() for file in files):
        return _MOST_HELD_OUT
    num_records = 0
    for file in files:
        with file.open("rb") as lines:
            num_records += sum(1 for line in lines if line.strip())
    return min(_MOST_HELD_OUT, num_records // 10)


def fused_states(num_hidden_states: int | None) -> tuple[int, int, int] | None:
    """Return the hidden states that EAGLE-3 (arXiv 2503.01840) fuses; None if there are too few."""
    num_layers = (num_hidden_states or 1) - 1
    states = (max(1, num_layers // 10), num_layers // 2, num_layers - 3)
    return states if states[0] < states[1] < states[2] else None


def attention_form(target: TargetAdapter) -> dict[str, str | bool]:
    """Return settings that give a trunk's attention the form of the target's last layer."""
    shapes = {
        ".".join(name.split(".")[-2:]): tuple(parameter.shape)
        for name, parameter in layers_of(target)[-1].named_parameters()
    }
    form: dict[str, str | bool] = {}
    if "q_proj.bias" in shapes:
        form["attention_bias"] = "all" if "o_proj.bias" in shapes else "qkv"
    own_norms = {shapes.get("q_norm.weight"), shapes.get("k_norm.weight")}
    if own_norms == {(target.spec.attention.head_dim,)}:
        form["qk_norm"] = True
    return form


def short_name(name_or_path: str) -> str:
    """Return the last part of a target's name, for the names of files and folders."""
    last = name_or_path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf").lower()
    return re.sub(r"[^a-z0-9._-]+", "-", last)
