"""Loading of a decoder's parts (target, drafter and tokenizer), and combination of two drafters."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.combined.knowledge import CombinedSettings
from inference.drafters.lookup import LookupDrafter
from inference.drafters.names import (
    TARGET_REMEDY,
    PairName,
    UntrainedName,
    refuse_misspelt,
    without_target,
)
from inference.drafters.registry import build_second, build_untrained
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.forms import FormChoice
from inference.protocol import Drafter
from inference.trees.shape import TreePlan, Trees, TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.checks import CausalLM
from jakiro.utils.logs import get_logger, quiet_libraries
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer

_logger = get_logger(__name__)

# Arguments that also choose the tokenizer.
_OF_HUB = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "trust_remote_code")


class Parts(NamedTuple):
    """The parts of a decoder."""

    target: PreTrainedModel
    drafter: JakiroDrafter | Drafter
    tokenizer: PreTrainedTokenizerBase
    tree: Trees = "auto"


@quiet_libraries()
def load_parts(
    drafter: str | Path,
    target: str | Path | None,
    tree: Trees = "auto",
    *,
    compiled: bool = False,
    draft_forms: FormChoice = "auto",
    other_weights: bool = False,
    **load: Any,
) -> Parts:
    """Load the parts of a decoder: target, drafter, tokenizer and trees.

    Args:
        drafter: folder or hub id of a trained drafter, also as `drafter=DRAFTER`; or `aded`,
            `aded=TABLE`, `lookup` or `lm=MODEL`; or a pair, such as `aded+drafter=DRAFTER` or
            `lookup+lm=MODEL`.
        tree: trees, as for `SpeculativeDecoder`. If shapes are given for a pair with a
            trained drafter, they are built into that drafter, and the returned `tree` is "fixed".
    """
    name = str(drafter)
    pair = PairName.parse(name)
    first = (name if pair is None else pair.first).removeprefix("drafter=")
    if UntrainedName.parse(first) is None:
        refuse_misspelt(first)
        loaded = JakiroDrafter.from_pretrained(first)
        model, tokenizer = _load_target(
            str(target or loaded.config.target_record.name_or_path), load
        )
        parts = Parts(model, loaded, tokenizer, tree)
    elif target is None:
        raise without_target(first)
    else:
        parts = parts_over(first, *_load_target(str(target), load))._replace(tree=tree)
    if pair is None:
        return parts
    options = _PairOptions(compiled, draft_forms, other_weights)
    return _paired(parts, pair, options)


def parts_over(drafter: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Parts:
    """Return the parts of a decoder for a loaded target; this raises the errors of `load_parts`."""
    if (pair := PairName.parse(drafter)) is not None:
        return _paired(parts_over(pair.first, target, tokenizer), pair, _PairOptions())
    drafter = drafter.removeprefix("drafter=")
    if (untrained := UntrainedName.parse(drafter)) is not None:
        return Parts(target, build_untrained(untrained, target, tokenizer), tokenizer)
    refuse_misspelt(drafter)
    return Parts(target, JakiroDrafter.from_pretrained(drafter), tokenizer)


def combined_drafter(
    first: JakiroDrafter | TrainedDrafter | SmallLMDrafter,
    second: AdedDrafter | LookupDrafter,
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase | None = None,
    settings: CombinedSettings | None = None,
    tree: TreeShape | TreePlan | None = None,
    *,
    compiled: bool = False,
    draft_forms: FormChoice = "auto",
    other_weights: bool = False,
) -> CombinedDrafter:
    """Return a drafter that combines a model with a training-free drafter in shared trees.

    Args:
        tree: tree shapes for a `JakiroDrafter`; None for trees with as many levels as the drafter
            was trained for.
    """
    if isinstance(first, JakiroDrafter):
        adapter = TargetAdapter(target.eval())
        trained = TrainedDrafter.for_target(
            first, adapter, tokenizer, tree, compiled=compiled, other_weights=other_weights
        )
        first = trained.in_forms(draft_forms)
    return CombinedDrafter(first, second, settings)


class _PairOptions(NamedTuple):
    """Options of the trained drafter of a pair, as for `combined_drafter`."""

    compiled: bool = False
    draft_forms: FormChoice = "auto"
    other_weights: bool = False


def _paired(parts: Parts, pair: PairName, options: _PairOptions) -> Parts:
    """Return the parts with a drafter that shares trees with a second, training-free drafter."""
    target, first, tokenizer, tree = parts
    assert isinstance(first, JakiroDrafter | SmallLMDrafter), "checked when the name was parsed"
    second = build_second(pair.second, target, tokenizer)
    shapes = None if isinstance(tree, str) else tree
    drafter = combined_drafter(first, second, target, tokenizer, tree=shapes, **options._asdict())
    has_shapes = shapes is not None and isinstance(first, JakiroDrafter)
    return Parts(target, drafter, tokenizer, "fixed" if has_shapes else tree)


def _load_target(
    name_or_path: str, load: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model = load_causal_lm(name_or_path, remedy=TARGET_REMEDY, **load)
    has_device = load.get("device_map") is not None or load.get("device") is not None
    if not has_device and model.device.type == "cpu" and torch.cuda.is_available():
        _logger.warning(
            "the target is on the CPU, although there is a GPU; remedy: pass "
            'device_map="cuda", or device_map="cpu" to compute on the CPU'
        )
    shared = {name: load[name] for name in _OF_HUB if name in load}
    what = "the tokenizer of the target"
    return model, load_tokenizer(name_or_path, what, remedy=TARGET_REMEDY, **shared)
