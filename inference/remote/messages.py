"""The messages between a device that drafts and a server that verifies, and errors about them.

A message with tensors is sent as a frame: the bytes of a safetensors file with the message in its
metadata. Other messages are JSON.
"""

import json
from collections.abc import Mapping
from secrets import token_hex
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from jakiro.errors import JakiroError

PROTOCOL: Literal[1] = 1
MESSAGE_KEY = "jakiro"  # name of the message in the metadata of a frame
_PREFIX = 8  # bytes of the length of a frame's header, little-endian

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
RowDtype = Literal["float32", "bfloat16", "float16"]
RowEncoding = Literal["exact", "bf16", "int8"]
EncoderId = Annotated[str, Field(min_length=1, max_length=128)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class MessageError(JakiroError, ValueError):
    """A message that cannot be used; nothing has been decided because of it.

    Args:
        code: short name of the reason, which the other end can read.
        status: status of a response with this error.
        **details: what was expected, what was got instead, and the remedy.
    """

    def __init__(self, code: str, message: str, *, status: int = 400, **details: Any) -> None:
        super().__init__(message, **details)
        self.code, self.status = code, status


class WireMessage(BaseModel):
    """Base class of messages: unknown fields are errors, and values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


MessageT = TypeVar("MessageT", bound=WireMessage)


class Progress(WireMessage):
    """The state of a text as the device knows it, from which any server can continue."""

    emitted: TokenIds  # tokens after the prompt
    next_step: int = Field(ge=1, lt=2**31)
    is_answer: bool = False  # whether it answers messages, and thus begins a text of its own


SMALLEST = 1e-6  # smallest divisor of logits, with which they stay finite


def _zero_or_large_enough(value: float) -> float:
    if 0 < value < SMALLEST:
        raise ValueError(f"0, or at least {SMALLEST}")
    return value


Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_zero_or_large_enough)]


class ChatMessage(WireMessage):
    role: Literal["system", "user", "assistant"]
    content: str


class MemoryRequest(WireMessage):
    """The memory of each verified token that a device's drafter reads.

    There is one row for each token: those of the newest tokens come with a verdict, and others on
    request.
    """

    encoder: EncoderId  # fingerprint of what encodes memory
    encoding: RowEncoding


class MemoryOffer(WireMessage):
    encoder: EncoderId  # as in `MemoryRequest`
    dtype: RowDtype  # dtype in which memory is computed


class MemoryRows(WireMessage):
    """The header of rows of memory, which follow as a tensor."""

    begin: Count  # position of the first token


class OpenSession(WireMessage):
    """A prompt to continue, and the options by which the server selects tokens.

    The device chooses the seed, so that a session that is opened again repeats its first token. The
    id of the text is chosen at random: a new session of a text ends the earlier one, even if the
    device never received the answer that names it.
    """

    protocol: Literal[1] = PROTOCOL
    text_id: Digest = Field(default_factory=lambda: token_hex(16))
    prompt: (
        str
        | TokenIds
        | Annotated[list[ChatMessage], Field(min_length=1, max_length=1024, fail_fast=True)]
    )
    seed: int = Field(ge=0, lt=2**63)
    max_tokens: int = Field(ge=1, lt=2**31)
    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1, le=1_000_000)
    min_p: float | None = Field(None, ge=0, le=1)
    stop: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field([], max_length=4)
    memory: MemoryRequest | None = None  # None if the drafter reads tokens alone
    resume: Progress | None = None


class TreeLimits(WireMessage):
    """The largest draft tree that a server takes."""

    max_nodes: int = Field(64, ge=1, le=2**15 - 1)
    max_depth: int = Field(16, ge=1)
    max_support: int = Field(256, ge=1)  # number of tokens of a draft distribution
    max_chain: int = Field(256, ge=1, le=2**15 - 1)  # number of nodes of a tree with a single path

    @property
    def largest(self) -> int:
        """The largest number of nodes of any tree, with which a path may have as many levels."""
        return max(self.max_nodes, self.max_depth, self.max_chain)


class VerifierInfo(WireMessage):
    """The target of a server, by which a device checks its drafter."""

    protocol: Literal[1] = PROTOCOL
    model: str  # name of the target
    fingerprint: str  # as in `SessionOpened`
    tokenizer: str  # fingerprint of the target's vocabulary
    has_template: bool  # whether a prompt may be a chat
    vocab_size: int = Field(ge=1)
    memory: MemoryOffer | None = None  # None if the server has no drafter with a memory


class SessionOpened(WireMessage):
    """The answer to `OpenSession`."""

    session: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$")
    fingerprint: str  # identifies the target and everything that the text for a seed depends on
    samples: bool  # whether tokens are sampled; otherwise, decoding is greedy
    prompt_token_ids: TokenIds
    emitted: TokenIds  # all tokens after the prompt; the last one is the root
    text: str  # text of the emitted tokens
    finished: bool
    next_step: int = Field(ge=1, lt=2**31)
    limits: TreeLimits
    end_ids: Annotated[list[TokenId], Field(max_length=1024)] = []  # tokens that end the text


class StepHeader(WireMessage):
    """The header of a submitted draft tree, whose tensors follow."""

    base_length: Count  # number of tokens before the root
    root: TokenId
    digest: Digest  # digest of the other two fields and of the tree


class Verdict(WireMessage):
    """The tokens that the server has emitted for a submitted tree.

    If the session has a memory, the rows of the newest verified tokens follow as a tensor, from the
    root of the tree on; none if the text is complete.
    """

    step: Count
    digest: Digest  # digest of the tree
    emitted: TokenIds
    num_accepted: Count  # number of emitted tokens that were drafted
    text: str  # text that follows the text of earlier steps
    finished: bool


def parse_message(body: bytes | str, kind: type[MessageT]) -> MessageT:
    """Return a message; any other text raises a `MessageError`."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"])) or "the message"
        raise MessageError(
            "malformed_message", f"{field} of {kind.__name__} is wrong", got=first["msg"]
        ) from error


class TensorSpec(NamedTuple):
    dtype: type[np.generic]
    num_axes: int


def encode_frame(message: WireMessage, tensors: Mapping[str, np.ndarray]) -> bytes:
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
    got = {name: TensorSpec(tensor.dtype.type, tensor.ndim) for name, tensor in tensors.items()}
    if got != specs:
        raise _malformed(f"the tensors {got}")
    return parse_message(message, kind), tensors


def _malformed(got: str) -> MessageError:
    return MessageError("malformed_frame", "the bytes are not a frame", got=got[:200])
