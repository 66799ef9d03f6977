"""Which settings and facts make a run the same one: what a run folder is known by."""

from collections.abc import Mapping
from typing import Any

from jakiro.settings import flattened
from training.config import TrainSettings

# What does not change a run's result: where things lie, how often progress is kept, how it is
# measured on the way, and what is in which memory at a time. Data, target and the drafter that
# another one starts from are compared by fingerprint instead.
_FREE: Any = {
    "run_folder": True,
    "checkpoint": True,
    "log_every": True,
    "evaluation": True,
    "target": {"name_or_path"},
    "initialize": {"drafter"},
    "data": {"paths", "cache_folder", "split"},  # what is split is a fact where it matters
    "features": {"folder"},
    "batch": {"micro_batch"},
    "objective": {"chunk_rows"},
    "engine": {
        *("device", "zero_stage", "activation_checkpointing"),
        *("offload_optimizer", "offload_parameters"),
    },
}


_REQUIRED: Any = {"target": {"name_or_path": "any"}, "data": {"paths": ["any"]}}
_DEFAULTS = {"settings": TrainSettings.model_validate(_REQUIRED).model_dump(mode="json")}


def identity(settings: TrainSettings, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return what decides a run's result.

    Args:
        settings: of the run.
        facts: fingerprints of the target and the data.
    """
    return {"settings": settings.model_dump(mode="json", exclude=_FREE), **facts}


def difference(
    recorded: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """Return the name of the first thing that makes another run, and both values; or None.

    Args:
        recorded: the identity of a run, perhaps by an earlier version.
        wanted: that of another one.
    """
    # A setting that the run's version did not have yet had the effect of today's default.
    then, now = _named(recorded), _named(wanted)
    before = _named(_DEFAULTS) | then
    names = sorted((then.keys() | now.keys()) - _free_names())
    found = ((name, before.get(name), now.get(name)) for name in names)
    return next((one for one in found if one[1] != one[2]), None)


def way_to_repeat(name: str, recorded: Any) -> str:
    """Return how to have again what the record of a run says.

    Args:
        name: of what differs.
        recorded: its value there; None if there is none.
    """
    if name == "rows_filled_with":  # an earlier version had no such setting, and split nothing
        split = "never" if recorded is None else str(recorded).removeprefix("split ")
        return f"set data.split: {split}, as its rows were made"
    return "repeat the settings in its config.yaml"


def _free_names() -> set[str]:
    """Return the settings that no longer count, which the record of an earlier version may have."""
    defaults = TrainSettings.model_validate(_REQUIRED)
    return _named(_DEFAULTS).keys() - _named(identity(defaults, {})).keys()


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("settings."): value for key, value in flattened(values)}
