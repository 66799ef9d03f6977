"""Frames: a message and its tensors as the bytes of a safetensors file."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from inference.remote.messages import MessageError, MessageT, WireMessage, parse_message

MESSAGE_KEY = "jakiro"  # name of the message in the metadata
_PREFIX = 8  # bytes of the header's length, little-endian


class TensorSpec(NamedTuple):
    """The dtype and the number of axes of a tensor."""

    dtype: type[np.generic]
    num_axes: int


def encode_frame(message: WireMessage, tensors: Mapping[str, np.ndarray]) -> bytes:
    """Return the bytes of a message and its tensors."""
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    return save(contiguous, {MESSAGE_KEY: message.model_dump_json()})


def decode_frame(
    body: bytes, kind: type[MessageT], specs: Mapping[str, TensorSpec]
) -> tuple[MessageT, dict[str, np.ndarray]]:
    """Return the message and the tensors of a frame from another machine.

    Args:
        specs: dtype and number of axes of each tensor, all of which must be there.
    """
    try:
        tensors = load(body)
        end = _PREFIX + int.from_bytes(body[:_PREFIX], "little")
        message: Any = json.loads(body[_PREFIX:end])["__metadata__"][MESSAGE_KEY]
    except (SafetensorError, KeyError, ValueError) as error:
        raise _malformed(str(error)) from error
    found = {name: TensorSpec(own.dtype.type, own.ndim) for name, own in tensors.items()}
    if found != specs:
        raise _malformed(f"the tensors {found}")
    return parse_message(message, kind), tensors


def _malformed(got: str) -> MessageError:
    return MessageError("malformed_frame", "the bytes are not a frame", got=got[:200])
