"""The fingerprint of a run: the inputs that determine its result, and comparisons of two runs."""

import math
from collections.abc import Mapping
from typing import Any

from jakiro.utils.settings import flattened
from training.config import TrainSettings

# Settings that do not change a run's result: paths, intervals of records and checkpoints,
# evaluation, the device, and the use of memory. The target, the data and the drafter of a warm
# start are compared by their fingerprints instead, and `data.split` by `sequences_filled_with`.
_FREE: Any = {
    "run_folder": True,
    "checkpoint": True,
    "log_every": True,
    "evaluation": True,
    "target": {"name_or_path"},
    "initialize": {"drafter"},
    "data": {"paths", "cache_folder", "split"},
    "target_states": {"folder"},
    "batch": {"micro_batch_size"},
    "objective": {"chunk_size"},
    "engine": {
        *("device", "zero_stage", "activation_checkpointing"),
        *("offload_optimizer", "offload_parameters"),
    },
}

LENGTH = ("steps", "epochs", "minutes")  # settings that may be raised to continue a run


def run_fingerprint(settings: TrainSettings, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings and fingerprints that determine a run's result."""
    return {"settings": settings.model_dump(mode="json", exclude=_FREE), **facts}


def difference(
    recorded: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """Return the name and both values of the first difference; None if there is no difference."""
    then, now = _named(recorded), _named(wanted)
    names = sorted(then.keys() | now.keys())
    triples = ((name, then.get(name), now.get(name)) for name in names)
    return next((triple for triple in triples if triple[1] != triple[2]), None)


def is_longer(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether the wanted run continues the recorded run with more steps."""
    before, now = (
        {name: run["settings"].get(name) for name in LENGTH} for run in (recorded, wanted)
    )
    if before == now or difference(_without_length(recorded), _without_length(wanted)):
        return False
    return all((now[name] or math.inf) >= (before[name] or math.inf) for name in LENGTH)


def _without_length(run: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in run["settings"].items() if name not in LENGTH}
    return {**run, "settings": settings}


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("settings."): value for key, value in flattened(values)}
