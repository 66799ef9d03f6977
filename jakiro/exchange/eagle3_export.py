"""Export of drafters in the two layouts of EAGLE-3, and what every export consists of.

An exported drafter comes with the commands with which these engines serve it.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from jakiro import __version__
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings, ScheduleSettings
from jakiro.errors import ConfigError
from jakiro.exchange.eagle3 import EXPORTED_BY, IDS, draft_vocabulary, eagle3_rows
from jakiro.exchange.mapping import Row
from jakiro.experts import MixtureOfExperts
from jakiro.utils.files import write_atomically, written_folder
from jakiro.utils.settings import flattened
from jakiro.utils.wording import dtype_name

Layout = Literal["eagle3", "speculators"]

_NUM_STATES = 3  # number of hidden states that all engines read
_REQUIRED = {
    "trunk.kind": "feedback",
    "trunk.input": "wide",
    "trunk.input_norms": True,
    "trunk.input_bias": False,
    "trunk.attention_bias": "none",
    "trunk.qk_norm": False,
    "trunk.mlp_width": None,
    "trunk.tokens": "single",
    "trunk.num_layers": 1,
    "trunk.first_position": False,
    "experts.num_experts": 1,
    "experts.head": "own",
    "schedule.parallel_levels": 0,
    "tail_layers": 0,
}


class ServedTarget(NamedTuple):
    """Facts about the target that an exported config contains."""

    name_or_path: str
    architecture: str
    max_position: int


class Exported(NamedTuple):
    """A drafter in another layout.

    Attributes:
        dropped: parts of the drafter that the layout does not have, with the reason.
    """

    weights: dict[str, Tensor]
    config: dict[str, Any]
    dropped: tuple[str, ...]


def export_eagle3(drafter: JakiroDrafter, layout: Layout, facts: ServedTarget) -> Exported:
    """Return a drafter in a layout of EAGLE-3."""
    settings, record = drafter.config.settings, drafter.config.target_record
    check_exportable(
        _problems(settings, (record.num_hidden_states or 0) - 1),
        "as EAGLE-3",
        "use `--to vllm`, which exports most other drafters for vLLM with a plug-in, or train one "
        "with the settings in configs/drafters/eagle3-exact.yaml",
    )
    prefix = "midlayer." if layout == "eagle3" else "layers.0."
    weights = exported_weights(drafter, eagle3_rows(settings, record.hidden_size, prefix))
    trunk, ids = settings.trunk, {IDS: list(settings.trunk.fusion_layers or ())}
    keys = ids | {
        "draft_vocab_size": drafter.config.draft_vocab_size or record.vocab_size,
        "norm_before_residual": trunk.residual == "normed",
        "norm_before_fc": trunk.fusion_norm == "all",
        "fc_norm": trunk.fusion_norm == "each",
        "norm_output": settings.experts.output_norm == "feedback",
        "torch_dtype": dtype_name(drafter.dtype),
    }
    layer = layer_keys(drafter, facts.max_position)
    layer |= older_rope_keys(layer["rope_parameters"])
    if layout == "eagle3":
        config = layer | keys | {"architectures": ["LlamaForCausalLMEagle3"]}
        config["eagle_config"] = {"use_aux_hidden_state": True} | ids
        config[EXPORTED_BY] = f"jakiro {__version__}"
        return Exported(weights, config, tuple(dropped_parts(drafter)))
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": settings.schedule.autoregressive_levels,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": facts.name_or_path, "architectures": [facts.architecture]}
    config = keys | {
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "speculators_model_type": "eagle3",
        "speculators_version": "0.4.0",
        "target_hidden_size": None,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }
    return Exported(weights, config, tuple(dropped_parts(drafter)))


class Problem(NamedTuple):
    """A setting that another format does not have, with the values that it may have."""

    expected: str
    got: object


def other_settings(settings: DrafterSettings, required: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the settings that differ from the required ones."""
    values = dict(flattened(settings.model_dump()))
    for name, expected in required.items():
        if values[name] != expected:
            shown = "null" if expected is None else expected
            yield Problem(f"drafter.{name} of {shown}", values[name])


def check_exportable(problems: Iterable[Problem], layout: str, remedy: str) -> None:
    """Raise an error if a drafter has settings that a layout does not have."""
    listed = list(problems)
    if listed:
        raise ConfigError(
            f"this drafter cannot be exported {layout}",
            expected=", ".join(problem.expected for problem in listed),
            got=", ".join(str(problem.got) for problem in listed),
            remedy=remedy,
        )


def _problems(settings: DrafterSettings, num_layers: int) -> Iterator[Problem]:
    """Yield the settings that differ from the architecture."""
    trunk, experts = settings.trunk, settings.experts
    yield from other_settings(settings, _REQUIRED)
    if experts.output_norm == "none":
        yield Problem("drafter.experts.output_norm of head or feedback", experts.output_norm)
    layers = trunk.fusion_layers or ()
    # Engines mean the state before the final norm by the last index, and some add 1 to lists that
    # begin with 1. Index 0 is the embedding.
    is_read_alike = (
        list(layers) == sorted(layers) and layers[:1] >= (2,) and layers[-1] < num_layers
    )
    if len(layers) != _NUM_STATES or not is_read_alike:
        yield Problem(
            f"three ascending drafter.trunk.fusion_layers from 2 to {num_layers - 1}", list(layers)
        )


def exported_weights(drafter: JakiroDrafter, rows: Iterable[Row]) -> dict[str, Tensor]:
    """Return the drafter's tensors under their published names, with its head if it has one."""
    state = drafter.state_dict()
    weights: dict[str, Tensor] = {}
    for row in rows:
        weights |= row.export(state[row.ours])
    if drafter.own_head is not None:
        weights["lm_head.weight"] = drafter.own_head.weight
    if drafter.draft_ids is not None:
        weights |= draft_vocabulary(drafter.draft_ids, drafter.config.target_record.vocab_size)
    return {name: part.detach().cpu().contiguous().clone() for name, part in weights.items()}


def layer_keys(drafter: JakiroDrafter, max_position: int) -> dict[str, Any]:
    """Return the keys of a Llama config that describe the drafter's layer."""
    settings, record = drafter.config.settings, drafter.config.target_record
    trunk = settings.trunk
    assert trunk.rope_theta is not None, "`config_for` completes the settings"
    return {
        "model_type": "llama",
        "hidden_size": record.hidden_size,
        "intermediate_size": settings.experts.intermediate_size,
        "num_attention_heads": trunk.num_heads,
        "num_key_value_heads": trunk.num_kv_heads,
        "head_dim": trunk.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": record.vocab_size,
        "rms_norm_eps": settings.norm_eps,
        "rope_theta": trunk.rope_theta,
        "rope_parameters": trunk.rope.parameters(trunk.rope_theta),
        "max_position_embeddings": max_position,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def older_rope_keys(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key in which older engines read a change of the rotary embedding, if any."""
    if parameters["rope_type"] == "default":
        return {}
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    return {"rope_scaling": scaling}


def dropped_parts(drafter: JakiroDrafter) -> Iterator[str]:
    """Yield the parts of a drafter that the layouts do not have."""
    yield "draft trees: vLLM drafts chains of the most likely tokens"
    if isinstance(drafter.experts, MixtureOfExperts) and drafter.experts.router.weight.any():
        yield "the router of the experts: with a single expert, it has no effect"


def write_export(weights: dict[str, Tensor], config: dict[str, Any], folder: Path) -> None:
    """Write an exported drafter, in full or not at all."""
    with written_folder(folder) as partial:
        partial.mkdir()
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        write_atomically(partial / "config.json", json.dumps(config, indent=2) + "\n")


def serve_command(
    layout: Literal[Layout, "dflash", "vllm"], folder: str, target: str, schedule: ScheduleSettings
) -> str:
    """Return the command with which vLLM serves an export, to be pasted into a shell."""
    if layout == "speculators":
        return shlex.join(("vllm", "serve", folder))
    method, depth = "eagle3", schedule.autoregressive_levels
    if layout == "dflash":
        method, depth = "dspark" if schedule.path == "tables" else "dflash", schedule.depth
    drafting = {"method": method, "model": folder, "num_speculative_tokens": depth}
    return shlex.join(("vllm", "serve", target, "--speculative-config", json.dumps(drafting)))
