"""The plan of an import: family, settings and tensor table; the resulting drafter, its folder."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from jakiro import __version__
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import TargetMismatch, TargetNotSupported
from jakiro.exchange.mapping import TensorTable
from jakiro.target.adapter import TargetAdapter
from jakiro.target.attention_shape import HeadShape
from jakiro.target.ends import SCALES
from jakiro.target.record import TargetRecord
from jakiro.utils.files import write_atomically, written_folder
from jakiro.utils.settings import flattened, merge, validate_settings

# Settings of a target by which it changes its embeddings or logits. Whether published drafters
# apply them has not been measured.
_SCALES = (*SCALES, "embedding_multiplier")
_RELATIVE_ERROR = 2.0**-7  # of a number in bfloat16, the coarsest dtype of published weights
# The norm of the output has a name of its own for each of its uses.
OUTPUT_NORMS = {"head": "head_norm.weight", "feedback": "experts.output_norm.weight"}

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


@dataclass(frozen=True)
class ImportPlan:
    """Everything that is known about an import before the target is loaded.

    Attributes:
        fusion_layers: possible indices of the hidden states that are read; empty if the drafter
            reads the last one only, or those of `reads_default`.
        reads_default: whether the drafter reads the default hidden states of EAGLE-3, which depend
            on the target's number of layers.
        open_settings: for each question that the config leaves open, the possible changes of
            `settings`.
        head_shape: geometry that keys and values of each of the target's layers must have; None if
            the drafter does not depend on it.
    """

    family: str
    settings: DrafterSettings
    table: TensorTable
    hidden_size: int
    vocab_size: int
    fusion_layers: tuple[tuple[int, ...], ...] = ()
    reads_default: bool = False
    open_settings: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    head_shape: HeadShape | None = None

    def candidates(self, num_layers: int) -> list[DrafterSettings]:
        """Return the possible settings, from which the measured agreement selects."""
        is_block = self.settings.trunk.is_block
        layers: list[Mapping[str, Any]] = [
            {"memory": {"layers": ids}} if is_block else {"trunk": {"fusion_layers": ids}}
            for ids in self._layers_in(num_layers)
        ]
        values, source = self.settings.model_dump(), self.table.checkpoint.source
        candidates = [
            validate_settings(DrafterSettings, reduce(merge, changes, values), source=source)
            for changes in product(layers or [{}], *self.open_settings)
        ]
        return [settings for settings in candidates if settings.tail_layers < max(num_layers, 1)]

    def weights(self, target: TargetAdapter) -> dict[str, Tensor]:
        """Return our parameters, and the row of the target that the masks of a block read."""
        weights, mask = self.table.converted(), self.settings.trunk.block.mask_token
        if mask is not None:
            row = target.embed(torch.tensor([mask], device=target.device)).detach()
            weights["level_masks.tokens"] = row.to("cpu", weights["head_norm.weight"].dtype)
        return weights

    def _layers_in(self, num_layers: int) -> list[tuple[int, ...]]:
        """Return the possible indices of hidden states that a target has."""
        possible = self.fusion_layers
        if self.reads_default:
            possible = ((2, num_layers // 2, num_layers - 3),)
        # Engines mean the state before the final norm by the last index; ours is after the norm.
        usable = [ids for ids in possible if ids[0] >= 0 and ids[-1] < num_layers]
        if any(len(set(ids)) < len(ids) for ids in usable) or (possible and not usable):
            raise self.table.unusable(
                f"hidden states below the last one of the target's {num_layers} layers",
                " or ".join(str(list(ids)) for ids in possible),
                "pass the target that the drafter was published for as --target",
            )
        return usable

    def lines(self) -> Iterator[str]:
        """Yield the lines of a report: family, settings, and one line per tensor."""
        yield f"family: {self.family}"
        yield f"target: hidden size {self.hidden_size}, {self.vocab_size} tokens"
        yield "settings:"
        shown = yaml.safe_dump(describe(self.settings), sort_keys=False)
        yield from (f"  {line}" for line in shown.splitlines())
        yield "tensors:"
        for row in self.table.rows:
            yield f"  {row.ours} <- {' + '.join(row.theirs) or 'nothing'} ({row.transform.how})"
        for name, reason in self.table.dropped.items():
            yield f"  dropped: {name} ({reason})"
        if self.reads_default:
            yield "hidden states: 2, half of the target's layers, and its layers minus 3"
        elif len(self.fusion_layers) > 1:
            shown = " or ".join(str(list(ids)) for ids in self.fusion_layers)
            yield f"hidden states: {shown}; the better agreement with the target decides"
        for changes in self.open_settings:
            shown = " or ".join(distinctions(changes))
            yield f"open: {shown}; the better agreement with the target decides"


def distinctions(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a description of each of several nested settings, by those in which they differ."""
    flat = [dict(flattened(settings)) for settings in values]
    names = sorted({name for settings in flat for name in settings})
    differing = [name for name in names if len({repr(part.get(name)) for part in flat}) > 1]

    def show(value: object) -> object:
        return list(value) if isinstance(value, tuple) else value

    return [
        ", ".join(f"{name} {show(part[name])}" for name in differing if name in part)
        for part in flat
    ]


def describe(settings: DrafterSettings) -> dict[str, object]:
    """Return the settings that matter for an imported drafter, by name."""
    values = settings.model_dump(mode="json")
    if not settings.trunk.attends_memory:
        del values["memory"]
    return values


def check_fits(plan: ImportPlan, target: TargetAdapter) -> None:
    """Raise an error unless a published drafter fits a target."""
    spec = target.spec
    shape = plan.head_shape
    for name, expected, got in (
        ("hidden size", plan.hidden_size, spec.hidden_size),
        ("vocabulary size", plan.vocab_size, spec.vocab_size),
        ("keys and values of a layer", shape and {shape}, shape and set(spec.head_shapes)),
    ):
        if expected != got:
            raise TargetMismatch(
                f"{plan.table.checkpoint.source} was made for another target ({name} differs)",
                expected=expected,
                got=got,
                remedy="pass the target that the drafter was published for as --target",
            )
    check_scales(target, remedy="train a drafter for this target with `jakiro train`")
    for name, part in plan.table.copies.items():
        _check_copy(plan.table, name, _matrix_of(target, part))


def build_drafter(
    settings: DrafterSettings, record: TargetRecord, weights: dict[str, Tensor]
) -> JakiroDrafter:
    """Return a drafter with imported weights, in the dtype of these weights.

    Args:
        weights: all parameters of the drafter, and `draft_ids` if it has a draft vocabulary.
    """
    with torch.device("meta"):  # the random weights would be thrown away
        drafter = JakiroDrafter(config_for(settings, record))
    drafter.load_state_dict(_rename(weights, settings), assign=True)
    drafter.config.dtype = drafter.dtype
    return drafter.eval()


def _rename(weights: dict[str, Tensor], settings: DrafterSettings) -> dict[str, Tensor]:
    """Return weights in which the norm of the output has the name of its use in the settings."""
    wanted = OUTPUT_NORMS.get(settings.experts.output_norm)
    return {
        wanted if wanted and name in OUTPUT_NORMS.values() else name: part
        for name, part in weights.items()
    }


def _matrix_of(target: TargetAdapter, part: str) -> Tensor:
    module: Any = target.head if part == "head" else target.model.get_input_embeddings()
    matrix: Tensor = module.weight
    return matrix


def check_scales(target: TargetAdapter, remedy: str) -> None:
    """Raise an error if a target has scales, which other projects may ignore."""
    ids = torch.arange(3, device=target.device)
    is_scaled = not torch.equal(target.embed(ids), _matrix_of(target, "embeddings")[ids])
    name = type(target.model).__name__
    check_config_scales(target.config, name, remedy, ["embeddings"] if is_scaled else [])


def check_config_scales(config: Any, name: str, remedy: str, others: Sequence[str] = ()) -> None:
    """Raise an error if a target's config says that it scales its embeddings or logits."""
    scales = [name for name in _SCALES if getattr(config, name, None) not in (None, 1, 1.0)]
    if str(getattr(config, "model_type", "")).startswith("gemma"):
        scales.append("embeddings, as all models of the Gemma family do")
    if scales := [*scales, *others]:
        raise TargetNotSupported(
            f"the target scales its embeddings or logits ({scales[0]})",
            expected="a target without such scales",
            got=name,
            remedy=remedy,
        )


def _check_copy(table: TensorTable, name: str, original: Tensor) -> None:
    """Raise an error unless a tensor equals the target's, up to the rounding of half precision."""
    copied = table.checkpoint.tensor(name).to(original.device, torch.float32)
    if copied.shape != original.shape:
        raise table.unusable(f"{name} of shape {list(original.shape)}", list(copied.shape))
    original = original.detach().float()
    difference = (copied - original).abs()
    if bool((difference > _RELATIVE_ERROR * original.abs() + 1e-7).any()):
        raise TargetMismatch(
            f"{name} in {table.checkpoint.source} differs from the target's",
            expected="the same numbers, because drafters use the target's own",
            got=f"differences of up to {float(difference.max()):.3g}",
            remedy="pass the target that the drafter was trained for as --target; drafters with "
            "embeddings or heads of their own of this kind cannot be imported",
        )


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
        if drafter.path_tables is None:  # which are not trained
            write_atomically(partial / SETTINGS_FILE, _settings_file(drafter, folder))


def _settings_file(drafter: JakiroDrafter, folder: Path) -> str:
    """Return settings for training that start with the drafter's weights."""
    values: dict[str, object] = {
        "extends": "base",
        "target": {"name_or_path": drafter.config.target_record.name_or_path},
        "drafter": describe(drafter.config.settings),
        "initialize": {
            "drafter": str(folder.absolute()),
            "attention_layer": None,
            "fit_tokens": 0,
        },
    }
    is_block = drafter.config.settings.trunk.is_block
    if drafter.own_head is not None or is_block:  # as published, they learn tokens only
        values["objective"] = _TOKENS_ONLY
    if drafter.own_head is not None and not is_block:  # EAGLE-3, on its own features too
        values["drafter"] = merge(describe(drafter.config.settings), {"trunk": {"ttt_steps": 4}})
    return _HEADER + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
