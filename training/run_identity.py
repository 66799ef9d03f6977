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


_OPTIONAL = {"start_fingerprint"}  # of a drafter to start from, which not every run has


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
        recorded: the identity of a run.
        wanted: that of another one.
    """
    then, now = _named(recorded), _named(wanted)
    names = sorted(then.keys() | now.keys())
    found = ((name, then.get(name), now.get(name)) for name in names)
    return next((one for one in found if one[1] != one[2]), None)


def unmatched(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Return the first name that only one of two identities has, as their formats differ; or None.

    A group that is None in one of them, such as `lora`, is a difference in value, not in format.

    Args:
        recorded: the identity of a run.
        wanted: that of another one.
    """
    for name in sorted((recorded.keys() | wanted.keys()) - _OPTIONAL):
        if name not in recorded or name not in wanted:
            return name
        then, now = recorded[name], wanted[name]
        if isinstance(then, Mapping) and isinstance(now, Mapping):
            inner = unmatched(then, now)
            if inner is not None:
                return f"{name}.{inner}".removeprefix("settings.")
    return None


def way_to_repeat(name: str, recorded: Any) -> str:
    """Return how to have again what the record of a run says.

    Args:
        name: of what differs.
        recorded: its value there; None if there is none.
    """
    if name == "rows_filled_with":
        return f"set data.split: {str(recorded).removeprefix('split ')}, as its rows were made"
    return "repeat the settings in its config.yaml"


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("settings."): value for key, value in flattened(values)}
