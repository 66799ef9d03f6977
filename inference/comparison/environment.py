"""Where a comparison runs."""

import os

import torch

from inference.bench.document import device_name, processor
from inference.comparison.document import Environment, TargetFacts
from jakiro.provenance import provenance
from jakiro.target import TargetAdapter


def environment_of(target: TargetAdapter, name_or_path: str) -> Environment:
    """Return the machine, the versions and the target."""
    origin = provenance()
    git = origin["git"] or {"sha": None, "is_dirty": None}
    return Environment(
        time=origin["time"],
        argv=tuple(origin["argv"]),
        commit=git["sha"],
        is_dirty=git["is_dirty"],
        versions=origin["versions"],
        platform=origin["platform"],
        processor=processor(),
        device=device_name(target.device),
        num_cpus=origin["num_cpus"],
        threads=torch.get_num_threads(),
        spin_count=os.environ.get("GOMP_SPINCOUNT"),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        target=TargetFacts(
            name_or_path=name_or_path,
            fingerprint=target.spec.fingerprint,
            parameters=target.model.num_parameters(),
            dtype=str(target.dtype).removeprefix("torch."),
            bytes_per_cached_token=target.new_cache(1, 1).bytes_per_token,
        ),
    )
