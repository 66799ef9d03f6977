"""Frames: a message and its tensors as the bytes of a safetensors file.

The header of a received frame is checked before the library reads it: its length, the names of the
tensors, and the dtype, shape and bytes of each tensor.
"""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import numpy as np
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from inference.remote.errors import MessageError
from inference.remote.messages import MessageT, WireMessage, parse_message
from jakiro.utils.strict_json import parse_json

MESSAGE_KEY = "jakiro"  # name of the message in the metadata
MAX_HEADER = 16_384  # bytes
_METADATA = "__metadata__"  # safetensors' name
_PREFIX = 8  # bytes of the header's length, little-endian
_LONGEST_AXIS = 1 << 24  # of a tensor without values, such as rows of which none are sent
_SIZES = {"U8": 1, "I16": 2, "U16": 2, "I32": 4}  # bytes of a number


class TensorSpec(NamedTuple):
    """The dtype and the number of axes of a tensor."""

    dtype: str
    num_axes: int


class _Entry(WireMessage):
    """The description of a tensor in the header."""

    dtype: str
    shape: list[int]
    data_offsets: list[int] = Field(min_length=2, max_length=2)


class _Metadata(WireMessage):
    message: str = Field(alias=MESSAGE_KEY)


def encode_frame(message: WireMessage, tensors: Mapping[str, np.ndarray]) -> bytes:
    """Return the bytes of a message and its tensors.

    Args:
        message: message.
        tensors: tensors by their names.
    """
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    return save(contiguous, {MESSAGE_KEY: message.model_dump_json()})


def decode_frame(
    body: bytes, kind: type[MessageT], specs: Mapping[str, TensorSpec]
) -> tuple[MessageT, dict[str, np.ndarray]]:
    """Return the message and the tensors of a frame from another machine.

    Args:
        body: bytes of the frame.
        kind: class of the message.
        specs: dtype and number of axes of each tensor, all of which must be there.

    Raises:
        MessageError: the bytes are not such a frame.
    """
    try:
        metadata, entries = _read_header(body, specs)
        for name, spec in specs.items():
            _check_entry(name, entries[name], spec, len(body))
        tensors = load(body)  # which checks that the tensors cover the data without gaps
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise _malformed(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except SafetensorError as error:
        raise _malformed(str(error)) from error
    message = parse_message(metadata.message, kind)
    return message, {name: tensors[name] for name in specs}


def _read_header(
    body: bytes, specs: Mapping[str, TensorSpec]
) -> tuple[_Metadata, dict[str, _Entry]]:
    """Return the metadata, and the description of each tensor."""
    length = int.from_bytes(body[:_PREFIX], "little")
    end = _PREFIX + length
    if length > MAX_HEADER or end > len(body):
        raise _malformed(f"a header of {length} bytes in a frame of {len(body)} bytes")
    try:
        header = parse_json(body[_PREFIX:end])
    except ValueError as error:
        raise _malformed(str(error)) from error
    if not isinstance(header, dict) or set(header) != {_METADATA, *specs}:
        raise _malformed(f"tensors with other names than {', '.join(specs)}")
    metadata = _Metadata.model_validate(header[_METADATA])
    return metadata, {name: _Entry.model_validate(header[name]) for name in specs}


def _check_entry(name: str, entry: _Entry, spec: TensorSpec, num_bytes: int) -> None:
    """Check a description; even the axes of a tensor without values are limited."""
    begin, end = entry.data_offsets
    longest = max([0, *entry.shape])
    is_sized = min(begin, *entry.shape, 0) == 0 and longest <= max(num_bytes, _LONGEST_AXIS)
    is_described = entry.dtype == spec.dtype and len(entry.shape) == spec.num_axes
    if not (is_described and is_sized and prod(entry.shape) * _SIZES[spec.dtype] == end - begin):
        raise _malformed(f"{name} is {entry.dtype} {entry.shape} in {end - begin} bytes")


def _malformed(got: str) -> MessageError:
    return MessageError(
        "malformed_frame",
        "the bytes are not a frame",
        expected="safetensors with a message in the metadata, and the tensors that belong to it",
        got=got[:200],
    )
