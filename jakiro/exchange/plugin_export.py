"""Import of drafters that `jakiro export --to vllm` wrote."""

from collections.abc import Mapping

import torch

from jakiro.config import JakiroConfig
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.exchange.checkpoint import DraftCheckpoint
from jakiro.exchange.plan import ImportPlan
from jakiro.exchange.table import TensorTable
from jakiro.utils.files import fingerprint

_COPIED = "computed from the target"
_AGAIN = "export the drafter again with `jakiro export --to vllm`"
_COPIES = ("target_norm.weight", "target_kv.norm", "target_kv.weight")


def read_plugin_export(checkpoint: DraftCheckpoint) -> ImportPlan:
    """Return the plan for importing a drafter that was exported for the plug-in for vLLM.

    The drafter has no parallel levels, because the export has none.
    """
    table = TensorTable(checkpoint)
    exported = checkpoint.config["jakiro"]
    try:
        config = JakiroConfig(drafter=exported["drafter"], target=exported["target"])
        settings, target = config.settings, config.target_record
        with torch.device("meta"):
            drafter = JakiroDrafter(config)
    except (ConfigError, KeyError, TypeError) as error:
        raise table.unusable("the config that `jakiro export` wrote", error) from error
    _take_all(table, drafter)
    if drafter.draft_ids is not None:
        ids = table.read("draft_ids", tuple(drafter.draft_ids.shape))
        facts = exported.get("facts")
        if not isinstance(facts, Mapping) or facts.get("draft_ids") != fingerprint(ids.tolist()):
            raise table.unusable("draft_ids as they were exported", "others", _AGAIN)
    for name in _COPIES:
        if table.has(name):
            table.drop(name, _COPIED)
    table.finish()
    return ImportPlan(
        "export for Jakiro's plug-in for vLLM",
        settings,
        table,
        target.hidden_size,
        target.vocab_size,
        target=target,
    )


def is_plugin_export(config: Mapping[str, object]) -> bool:
    """Return whether a config is that of a drafter that was exported for the plug-in."""
    return isinstance(config.get("jakiro"), Mapping)


def _take_all(table: TensorTable, drafter: JakiroDrafter) -> None:
    """Add every parameter of a drafter, under the name that it has in both layouts."""
    for name, part in drafter.state_dict().items():
        published = "lm_head.weight" if name == "own_head.weight" else name
        if name == "draft_ids":
            table.take_ids(name, name, tuple(part.shape), "unchanged", lambda parts: parts[0])
        else:
            table.take(name, {published: tuple(part.shape)})
    if drafter.own_head is None and table.has("lm_head.weight"):
        table.drop("lm_head.weight", "rows of the target's head")
