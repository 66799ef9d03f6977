"""Description of the machine on which figures were measured, and output of JSON documents."""

import json
import os
import sys
from typing import Any

import torch

from inference.benchmark.document import Environment, MachineFacts, TargetFacts
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.dtype_names import dtype_name
from jakiro.utils.processor import processor
from jakiro.utils.provenance import provenance
from jakiro.utils.settings import Settings


def environment(target: TargetAdapter, settings: Settings) -> dict[str, Any]:
    """Return the machine, versions, target and settings of a measurement as a JSON object."""
    return {
        **provenance(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "spin_count": os.environ.get("GOMP_SPINCOUNT"),
        "device": device_name(target.device),
        "dtype": dtype_name(target.dtype),
        "parameters": target.model.num_parameters(),
        "bytes_per_cached_token": target.new_cache(1, 1).bytes_per_token,
        "load_average": os.getloadavg()[0],  # over the last minute
        "settings": settings.model_dump(mode="json"),
    }


def emit(document: dict[str, Any]) -> None:
    """Write a JSON object as a single line to standard output."""
    sys.stdout.write(json.dumps(document, default=str, allow_nan=False) + "\n")
    sys.stdout.flush()


def device_name(device: torch.device) -> str:
    """Return the name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def machine_facts() -> MachineFacts:
    """Return the machine and versions of a measurement."""
    origin = provenance()
    git = origin["git"] or {"sha": None, "is_dirty": None}
    return MachineFacts(
        time=origin["time"],
        argv=tuple(origin["argv"]),
        commit=git["sha"],
        is_dirty=git["is_dirty"],
        versions=origin["versions"],
        platform=origin["platform"],
        processor=processor(),
        num_cpus=origin["num_cpus"],
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def environment_of(target: TargetAdapter, name_or_path: str) -> Environment:
    """Return the machine, versions and target of a comparison."""
    return Environment(
        **dict(machine_facts()),
        device=device_name(target.device),
        threads=torch.get_num_threads(),
        spin_count=os.environ.get("GOMP_SPINCOUNT"),
        target=TargetFacts(
            name_or_path=name_or_path,
            fingerprint=target.spec.fingerprint,
            parameters=target.model.num_parameters(),
            dtype=dtype_name(target.dtype),
            bytes_per_cached_token=target.new_cache(1, 1).bytes_per_token,
            gguf_sha256=target.spec.gguf_sha256,
        ),
    )
