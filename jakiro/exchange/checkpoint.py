"""A published drafter on disk, and the account of its tensors in an import."""

import json
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Shape = tuple[int, ...]
Convert = Callable[[list[Tensor]], Tensor]
Part = Literal["embeddings", "head"]


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


class Conversion(NamedTuple):
    """One of our parameters.

    Attributes:
        theirs: names of the tensors that it is made from; empty for zeros.
    """

    ours: str
    theirs: tuple[str, ...]
    how: str
    convert: Convert


class TensorTable:
    """Accounts for every tensor of a drafter: it is used, compared, dropped or refused."""

    def __init__(self, checkpoint: DraftCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.rows: list[Conversion] = []
        self.dropped: dict[str, str] = {}  # name -> reason
        self.copies: dict[str, Part] = {}  # copies of the target's tensors, to be compared
        self._left = set(checkpoint.tensors)
        for name in list(self._left):
            if name.endswith("rotary_emb.inv_freq"):
                self.drop(name, "computed from the config")

    def has(self, name: str) -> bool:
        """Return whether the drafter has a tensor of this name."""
        return name in self.checkpoint.tensors

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        if not self.has(name):
            raise self.unusable(f"a tensor {name}", "none")
        return tuple(self.checkpoint.tensors[name].shape)

    def matrix(self, name: str) -> tuple[int, int]:
        """Return the numbers of rows and columns of a matrix."""
        shape = self.shape(name)
        if len(shape) != 2 or 0 in shape:
            raise self.unusable(f"{name} with two dimensions", f"shape {list(shape)}")
        return shape[0], shape[1]

    def take(
        self,
        ours: str,
        theirs: Mapping[str, Shape],
        how: str = "unchanged",
        convert: Convert = lambda parts: parts[0],
    ) -> None:
        """Add a parameter that is made from tensors; from integers if it is `draft_ids`."""
        for name, expected in theirs.items():
            self._check(name, expected, is_integer=ours == "draft_ids")
            self._left.discard(name)
        self.rows.append(Conversion(ours, tuple(theirs), how, convert))

    def read(self, name: str, shape: Shape) -> Tensor:
        """Return a small tensor of integers, which determines the conversion of others."""
        self._check(name, shape, is_integer=True)
        return self.checkpoint.tensor(name).long()

    def _check(self, name: str, shape: Shape, is_integer: bool) -> None:
        """Raise an error unless the drafter has a tensor of this shape and type."""
        if (got := self.shape(name)) != shape:
            raise self.unusable(f"{name} of shape {list(shape)}", f"shape {list(got)}")
        dtype = self.checkpoint.tensors[name].dtype
        if dtype not in (_INTEGERS if is_integer else _FLOATS):
            numbers = "integers" if is_integer else "numbers of 16, 32 or 64 bits"
            raise self.unusable(f"{numbers} in {name}", dtype)

    def zeros(self, ours: str, shape: Shape) -> None:
        """Add a parameter of zeros that the published drafter does not have."""
        self.rows.append(Conversion(ours, (), "zeros", lambda _parts: torch.zeros(shape)))

    def drop(self, name: str, reason: str) -> None:
        """Leave out a tensor."""
        self._left.discard(name)
        self.dropped[name] = reason

    def compare(self, name: str, part: Part) -> None:
        """Leave out a tensor if there is one of this name, because the target has the same."""
        if self.has(name):
            self.drop(name, f"compared with the target's {part}")
            self.copies[name] = part

    def finish(self) -> None:
        """Raise an error if a tensor is neither used nor dropped."""
        if self._left:
            names = sorted(self._left)
            raise self.unusable(
                "only tensors of this architecture", f"{len(names)} others: {', '.join(names[:4])}"
            )

    def converted(self) -> dict[str, Tensor]:
        """Return our parameters, in the dtype of the tensors."""
        tensor, rows = self.checkpoint.tensor, self.rows
        made = {row.ours: row.convert([tensor(name) for name in row.theirs]) for row in rows}
        dtypes = [
            made[row.ours].dtype
            for row in rows
            if row.theirs and made[row.ours].is_floating_point()
        ]
        dtype = reduce(torch.promote_types, dtypes)
        return {
            name: part.to(dtype) if part.is_floating_point() else part
            for name, part in made.items()
        }

    def unusable(self, expected: str, got: object, remedy: str | None = None) -> CheckpointError:
        """Return the error for a drafter that cannot be imported."""
        return cannot_import(self.checkpoint.source, expected, got, remedy)


def cannot_import(
    source: str, expected: str, got: object, remedy: str | None = None
) -> CheckpointError:
    """Return the error for a drafter that cannot be imported."""
    return CheckpointError(
        f"{source} cannot be imported",
        expected=expected,
        got=got,
        remedy=remedy or "see docs/guides/exchange.md for the drafters that can be imported",
    )
