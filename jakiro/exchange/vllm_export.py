"""Export of drafters for this project's plug-in for vLLM.

The plug-in runs trunks of every kind.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from jakiro.config import last_hidden_state
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import ConfigError, TargetNotSupported
from jakiro.exchange.eagle3 import IDS
from jakiro.exchange.eagle3_export import Exported, check_exportable, layer_keys, other_settings
from jakiro.exchange.plan import check_scales
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import StateSource
from jakiro.target.step import chain_step
from jakiro.utils.files import fingerprint
from jakiro.utils.wording import dtype_name
from moa.layers import Rotary
from moa.target_kv import TargetKV

ARCHITECTURE = "Eagle3JakiroForCausalLM"
_REQUIRED = {
    "trunk.first_position": False,  # vLLM has no row for this token
    "trunk.num_layers": 1,
    "trunk.tokens": "single",
    "experts.active_experts": None,
    "tail_layers": 0,
}
_PROBE = 8  # tokens whose keys and values are compared
_CLOSE = 2e-2  # relative difference of probed values, in half precision
_OTHER_LEVELS = ("experts.level_down", "experts.beta", "level_heads.", "level_masks.", "path_")
_LEFT_OUT = (*_OTHER_LEVELS, "experts.router.weight", "own_head.weight")  # starts of names


class _Parts(NamedTuple):
    """Copies of the target's weights, and facts about the target for the exported config."""

    weights: dict[str, Tensor]
    norm_eps: float | None = None
    kv: dict[str, Any] | None = None


def export_vllm(drafter: JakiroDrafter, target: TargetAdapter) -> Exported:
    """Return a drafter as the plug-in `inference.vllm_plugin` loads it.

    Args:
        drafter: drafter with any kind of trunk of one layer, in which no token attends to
            position 0, with experts that all run, and without tail layers.
    """
    settings = drafter.config.settings
    if settings.trunk.is_block:
        raise ConfigError(
            "a block drafter cannot be exported for Jakiro's plug-in for vLLM",
            expected="drafter.trunk.kind of moa, feedback or hybrid",
            got="block",
            remedy="use `--to dflash`, if its settings are those of DFlash or DSpark",
        )
    problems = other_settings(settings, _REQUIRED)
    check_exportable(problems, "for vLLM", "train a drafter with these settings")
    check_scales(target, remedy="decode with `jakiro generate`, which applies these scales")
    memory, features = drafter.state_sources
    head = _head_rows(drafter, target)
    norm = _final_norm(drafter, target)
    kv = _Parts({})
    if memory is not None and memory.kind == "kv":
        kv = _keys_and_values(target, memory.layers)
    state, ids = drafter.state_dict(), drafter.draft_ids
    weights = {name: part for name, part in state.items() if not name.startswith(_LEFT_OUT)}
    num_experts = settings.experts.num_experts  # further rows of the router are for other levels
    weights["experts.router.weight"] = state["experts.router.weight"][:num_experts]
    weights |= head | norm.weights | kv.weights
    read = {layer for source in (memory, features) if source for layer in source.layers}
    width, ages = _handed_widths(drafter, kv)
    schedule = settings.schedule.model_copy(update={"parallel_levels": 0})
    first_level = settings.model_copy(update={"schedule": schedule})
    config = _config(drafter, target) | {
        "hidden_size": width,
        IDS: sorted(read),
        "jakiro": {
            "drafter": first_level.model_dump(mode="json"),
            "target": drafter.config.target_record.model_dump(mode="json"),
            "facts": {
                "norm_eps": norm.norm_eps,
                "kv": kv.kv,
                "num_ages": ages,
                # By this hash, the plug-in recognizes other ids. With them, texts would be the same
                # and hardly any draft would be accepted, so that nobody would see an error.
                "draft_ids": None if ids is None else fingerprint(ids.tolist()),
            },
        },
    }
    copies = {
        name: part.detach().cpu().contiguous().clone() for name, part in sorted(weights.items())
    }
    return Exported(copies, config, tuple(_dropped(settings)))


def _config(drafter: JakiroDrafter, target: TargetAdapter) -> dict[str, Any]:
    """Return the keys of a Llama config from which vLLM derives the drafter's cache."""
    record, trunk = drafter.config.target_record, drafter.config.settings.trunk
    return layer_keys(drafter, target.spec.max_position) | {
        "architectures": [ARCHITECTURE],
        "draft_vocab_size": drafter.config.draft_vocab_size or record.vocab_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": trunk.rope_theta},
        "torch_dtype": dtype_name(drafter.dtype),
    }


def _handed_widths(drafter: JakiroDrafter, kv: _Parts) -> tuple[int, int]:
    """Return the width of the vector that vLLM hands from token to token, and its number of ages.

    An age is the number of drafted tokens since the last verified one. One age would be enough, but
    vLLM requires that the number of heads divides the width.
    """
    hidden, trunk = drafter.config.target_record.hidden_size, drafter.config.settings.trunk
    features = hidden if trunk.reads_features else 0
    is_raw = kv.kv is not None and drafter.config.settings.memory.rotated
    memory = 2 * kv.kv["width"] * kv.kv["num_layers"] if kv.kv and is_raw else hidden
    assert trunk.num_heads is not None, "`config_for` completes the settings"
    if not trunk.attends_memory:
        ages = -features % trunk.num_heads
        return features + ages, ages
    ages = trunk.num_heads - (features + memory) % trunk.num_heads
    return features + memory + ages, ages


def _head_rows(drafter: JakiroDrafter, target: TargetAdapter) -> dict[str, Tensor]:
    """Return the rows of the head, unless it is the whole head of the target."""
    if drafter.own_head is not None:
        return {"lm_head.weight": drafter.own_head.weight}
    if drafter.draft_ids is None:
        return {}
    if type(target.head) is not nn.Linear or target.head.bias is not None:
        raise _unsupported("the head of the target", "a matrix without a bias", target.head)
    return {"lm_head.weight": target.head.weight[drafter.draft_ids.to(target.device)]}


def _final_norm(drafter: JakiroDrafter, target: TargetAdapter) -> _Parts:
    """Return the target's final norm if the drafter reads the state after it."""
    last = last_hidden_state(drafter.config.target_record)
    if last not in drafter.state_sources.hidden_states:
        return _Parts({})
    norm: Any = getattr(target.decoder, "norm", None)
    weight, eps = getattr(norm, "weight", None), _epsilon(norm)
    if weight is not None and eps is not None:
        probe = torch.randn(len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
        if _is_close(norm(probe), rms_norm(probe, probe.shape, weight, eps)):
            return _Parts({"target_norm.weight": weight}, norm_eps=float(eps))
    raise _unsupported("the final norm of the target", "an RMSNorm", norm)


def _epsilon(norm: nn.Module) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _keys_and_values(target: TargetAdapter, layers: tuple[int, ...]) -> _Parts:
    """Return copies of the weights that compute keys and values, after a test on a few tokens."""
    read: Any = target.decoder
    shape = target.spec.head_shapes[layers[0]]
    try:
        attentions = [read.layers[index].self_attn for index in layers]
        norms = [read.layers[index].input_layernorm for index in layers]
        weights = [torch.cat([part.k_proj.weight, part.v_proj.weight]) for part in attentions]
        parts = {
            "norm": torch.stack([norm.weight for norm in norms]).detach(),
            "weight": torch.stack(weights).detach(),
        }
        kv = {
            "num_layers": len(layers),
            "width": shape.num_kv_heads * shape.key_dim,
            "head_dim": shape.key_dim,
            "norm_eps": float(_epsilon(norms[0])),
            "frequencies": read.rotary_emb.inv_freq.float().tolist(),
            "scale": float(getattr(read.rotary_emb, "attention_scaling", 1.0)),
        }
        is_equal = _are_computed(target, layers, kv, parts)
    except (AttributeError, RuntimeError, TypeError):  # other parts, other formats, other shapes
        is_equal = False
    if not is_equal:
        raise TargetNotSupported(
            "the target's keys and values cannot be computed again from its hidden states",
            expected="layers like those of Llama, without biases and norms of keys",
            got=type(target.model).__name__,
            remedy="train a drafter with drafter.memory.source=hidden",
        )
    return _Parts({f"target_kv.{name}": part for name, part in parts.items()}, kv=kv)


@torch.no_grad()
def _are_computed(
    target: TargetAdapter, layers: tuple[int, ...], kv: dict[str, Any], parts: dict[str, Tensor]
) -> bool:
    """Return whether keys and values that are computed again equal the cached ones."""
    hidden = target.spec.hidden_size
    rotary = Rotary(kv["head_dim"], 1.0, tuple(kv["frequencies"]), kv["scale"])
    copy = TargetKV(kv["num_layers"], hidden, kv["width"], kv["norm_eps"], rotary)
    copy.load_state_dict(parts)
    copy = copy.to(target.device, target.dtype)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.spec.vocab_size, (1, _PROBE), generator=generator)
    cache = target.new_cache(1, _PROBE, layers)
    target.forward(chain_step(tokens.to(target.device), 0), cache)
    slots = torch.arange(_PROBE, device=target.device)[None]
    inputs = cache.state(slots, StateSource("hidden", layers))[0]
    cached = cache.state(slots, StateSource("kv", layers))[0]
    return _is_close(copy.rotated(copy(inputs), slots[0]), cached)


def _is_close(got: Tensor, expected: Tensor) -> bool:
    difference = (got.float() - expected.float()).abs().max()
    return bool(difference <= _CLOSE * expected.float().abs().max())


def _unsupported(what: str, expected: str, got: object) -> TargetNotSupported:
    return TargetNotSupported(
        f"{what} cannot be copied for vLLM",
        expected=expected,
        got="none" if got is None else type(got).__name__,
        remedy="use a target like Llama in half or full precision",
    )


def _dropped(settings: DrafterSettings) -> Iterator[str]:
    """Yield the parts of a drafter that vLLM does not use."""
    yield "draft trees: vLLM drafts chains of the most likely tokens"
    if settings.schedule.parallel_levels:
        yield "parallel levels: each drafted token takes one pass in vLLM"
