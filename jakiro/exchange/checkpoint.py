"""A published drafter on disk: its config, the shapes of its tensors, and the tensors."""

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import metadata_load, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jakiro.errors import CheckpointError
from jakiro.utils.files import checksum
from jakiro.utils.hub import hub_options, is_written_as_path
from jakiro.utils.packaged import packaged_drafter
from jakiro.utils.pretrained import reason_of, refuse_files_elsewhere
from jakiro.utils.wording import summary_of

_SAFETENSORS = "model.safetensors"
_INDEX = f"{_SAFETENSORS}.index.json"
_BIN = "pytorch_model.bin"
_PREFIX = "model."  # of some files, whose tensors are otherwise named alike
_HUB_FILES = ["config.json", "README.md", "*.safetensors", _INDEX, _BIN]
_REMEDY = "check the path or id, or download the files again"
# Types of numbers under the names of safetensors.
FLOATS = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
INTEGERS = {
    "BOOL": torch.bool,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in (FLOATS | INTEGERS).items()}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: the file, the tensor's name in it, the shape and the type of its numbers.

    Attributes:
        name: name in this file, with any prefix.
        dtype: type of the numbers, a key of `FLOATS` or `INTEGERS`, or any other name.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class DraftCheckpoint:
    """A published drafter; only its config and the headers of its files have been read so far.

    Attributes:
        tensors: the stored tensors by name, without the prefix `model.`.
    """

    source: str
    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]

    @property
    def files(self) -> list[Path]:
        """The files that the drafter consists of."""
        weights = {stored.file for stored in self.tensors.values()}
        return [self.folder / "config.json", *sorted(weights)]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor."""
        stored = self.tensors[name]
        if stored.file.suffix == ".bin":
            tensor = _unpickled(stored.file)[stored.name].clone()
        else:
            with _opened(stored.file) as opened:
                tensor = opened.get_tensor(stored.name)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise _unusable(
                stored.file, "weights that are finite numbers", f"other numbers in {name}"
            )
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
    """Return a published drafter, after reading its config and the headers of its files.

    The files are `model.safetensors`, possibly in several parts with an index, or else
    `pytorch_model.bin`, which is read without running code.

    Args:
        revision: commit, branch or tag on the hub; None for the newest commit.
    """
    folder = _folder_of(str(name_or_path), revision)
    config = _config_in(folder)
    refuse_files_elsewhere(folder, "the drafter")
    found = [stored for file in _weight_files(folder) for stored in _stored_in(file)]
    if not found:
        raise _unusable(folder, "tensors", "none")
    tensors: dict[str, Stored] = {}
    for stored in found:
        name = stored.name.removeprefix(_PREFIX)
        if name in tensors:
            raise _unusable(folder, "each tensor once", f"{name} twice")
        tensors[name] = stored
    return DraftCheckpoint(str(name_or_path), folder, config, tensors)


def _folder_of(name: str, revision: str | None) -> Path:
    if (folder := packaged_drafter(name) or Path(name)).is_dir():
        return folder
    if is_written_as_path(name) or Path(name).exists():
        raise _unusable(Path(name), "a folder or a hub id such as owner/name", "no such folder")
    try:
        offline = bool(hub_options(name))
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=_HUB_FILES, local_files_only=offline
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise _unusable(
            Path(name), "a folder, or a drafter on the hub", reason_of(error, name)
        ) from error


def _config_in(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _unusable(path, "the JSON file of the weights", summary_of(error)) from error
    if not isinstance(config, dict):
        raise _unusable(path, "a JSON object", type(config).__name__)
    return config


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).exists():
        try:
            names = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unusable(folder / _INDEX, "an index of weights", summary_of(error)) from error
        files = [folder / name for name in sorted(names)]
    else:
        files = [folder / name for name in (_SAFETENSORS, _BIN) if (folder / name).exists()][:1]
    if not files:
        raise _unusable(folder, f"{_SAFETENSORS} or {_BIN}", "neither")
    return files


def _stored_in(file: Path) -> list[Stored]:
    if file.suffix == ".bin":
        parts = _unpickled(file)
        return [
            Stored(file, name, tuple(part.shape), _NAMES.get(part.dtype, str(part.dtype)))
            for name, part in parts.items()
        ]
    with _opened(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return [
            Stored(file, name, tuple(part.get_shape()), str(part.get_dtype()))
            for name, part in slices.items()
        ]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file, and explain why it cannot be read."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise _unusable(file, "a complete safetensors file", summary_of(error)) from error


def _unpickled(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle; anything else in it is refused and never run."""
    expected = "a dictionary of tensors, and no code"
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise _unusable(file, expected, summary_of(error)) from error
    is_usable = isinstance(content, dict) and all(
        isinstance(name, str) and isinstance(part, Tensor) for name, part in content.items()
    )
    if not is_usable:
        raise _unusable(file, expected, type(content).__name__)
    return dict(content)


def _unusable(path: Path, expected: str, got: object) -> CheckpointError:
    return CheckpointError(
        f"cannot read a published drafter from {path}", expected=expected, got=got, remedy=_REMEDY
    )
