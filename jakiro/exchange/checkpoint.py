"""A published drafter on disk."""

import json
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import metadata_load, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from jakiro.errors import CheckpointError
from jakiro.utils.files import checksum
from jakiro.utils.packaged import packaged_drafter
from jakiro.utils.pretrained import hub_options, reason_of
from jakiro.utils.wording import summary_of

_SAFETENSORS = "model.safetensors"
_INDEX = f"{_SAFETENSORS}.index.json"
_BIN = "pytorch_model.bin"
_PREFIX = "model."  # of some files, whose tensors are otherwise named alike
_HUB_FILES = ["config.json", "README.md", "*.safetensors", _INDEX, _BIN]


@dataclass(frozen=True)
class DraftCheckpoint:
    """A published drafter.

    Attributes:
        tensors: the tensors by name, without the prefix `model.`.
        files: the config and the files of the tensors.
    """

    source: str
    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    files: tuple[Path, ...]

    def tensor(self, name: str) -> Tensor:
        """Return a copy of a tensor, all of whose numbers are finite."""
        tensor = self.tensors[name].clone()
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise _unusable(self.folder, f"infinite numbers in {name}")
        return tensor

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each file, in hexadecimal."""
        return {file.name: checksum(file) for file in self.files}

    @property
    def revision(self) -> str | None:
        """The commit of a drafter from the hub; None for other folders."""
        return self.folder.name if self.folder.parent.name == "snapshots" else None

    @property
    def licence(self) -> str | None:
        """The licence that the drafter's model card names; None if there is none."""
        card = self.folder / "README.md"
        with suppress(OSError, ValueError, yaml.YAMLError):
            licence = (metadata_load(card) or {}).get("license") if card.is_file() else None
            return licence if isinstance(licence, str) else None
        return None


def read_checkpoint(name_or_path: str | Path, revision: str | None = None) -> DraftCheckpoint:
    """Return a published drafter.

    The files are `model.safetensors`, possibly in several parts with an index, or else
    `pytorch_model.bin`, which is read without running code.

    Args:
        revision: commit, branch or tag on the hub; None for the newest commit.
    """
    folder = _folder_of(str(name_or_path), revision)
    tensors: dict[str, Tensor] = {}
    try:
        config = json.loads((folder / "config.json").read_bytes())
        files = _weight_files(folder)
        for file in files:
            for name, tensor in _load(file).items():
                tensors[name.removeprefix(_PREFIX)] = tensor
    except (
        *(AttributeError, EOFError, OSError, RuntimeError, TypeError, ValueError, LookupError),
        *(pickle.UnpicklingError, SafetensorError),
    ) as error:
        raise _unusable(folder, summary_of(error)) from error
    if not isinstance(config, dict):
        raise _unusable(folder, f"a config.json with a {type(config).__name__}")
    source = str(name_or_path)
    return DraftCheckpoint(source, folder, config, tensors, (folder / "config.json", *files))


def _folder_of(name: str, revision: str | None) -> Path:
    if (folder := packaged_drafter(name) or Path(name)).is_dir():
        return folder
    offline = bool(hub_options(name))
    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=_HUB_FILES, local_files_only=offline
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise _unusable(folder, reason_of(error, name)) from error


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).exists():
        names = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return [folder / (_SAFETENSORS if (folder / _SAFETENSORS).exists() else _BIN)]


def _load(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file; anything else in a pickle is refused and never run."""
    if file.suffix != ".bin":
        return load_file(file)
    content: dict[str, Tensor] = torch.load(file, "cpu", weights_only=True, mmap=True)
    return content


def _unusable(folder: Path, got: object) -> CheckpointError:
    return CheckpointError(
        f"cannot read a published drafter from {folder}",
        expected=f"a folder or hub id with config.json and {_SAFETENSORS} or {_BIN}",
        got=got,
        remedy="check the path or id, or download the files again",
    )
