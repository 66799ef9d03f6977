"""Drafters on this machine for a target on a server: by their names, and their trees of a text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inference.draft_tree import DraftTree, SequenceTree
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.base import TokenSession
from inference.drafters.delegating import DelegatingSession
from inference.drafters.lookup import LookupDrafter
from inference.drafters.names import ADED, LM, LOOKUP
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter, default_tree
from inference.drafters.trained.memory import encoder_fingerprint, memory_drafter
from inference.protocol import (
    AdaptiveSession,
    Budget,
    Committed,
    Drafter,
    DraftSession,
    EncodedMemory,
)
from inference.remote.memory_rows import RowFormat
from inference.remote.messages import (
    MemoryRequest,
    OpenSession,
    RowEncoding,
    SessionOpened,
    VerifierInfo,
)
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError, TargetMismatch
from jakiro.target.ends import DESCRIPTION_FILE, read_device_target
from jakiro.target.record import tokenizer_fingerprint
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer, torch_dtype

NONE = "none"

_CHUNK = 512  # number of tokens that a drafter reads at once


def device_drafter(name: str, info: VerifierInfo, **load: Any) -> Drafter | None:
    """Return a drafter that needs no target on this machine; None for the name `none`.

    Args:
        name: `lookup`, `aded`, `lm=MODEL` (a small model with the target's tokenizer), `none`, or a
            folder that `jakiro export --to device` has written.
        **load: arguments of `load_causal_lm` for the small model; `dtype` and `device` also apply
            to an exported drafter.
    """
    name = name.removeprefix("drafter=")
    if name == NONE:
        return None
    if name == LOOKUP:
        return LookupDrafter()
    if name == ADED:
        return AdedDrafter()
    if name.startswith(f"{LM}="):
        return _load_small_lm(name.removeprefix(f"{LM}="), info, load)
    if (exported := exported_folder(name)) is not None:
        return _load_exported(exported, **load)
    raise ConfigError(
        f"the drafter {name} cannot draft on this machine for a target on a server",
        expected=f"{LOOKUP}, {ADED}, {LM}=MODEL, {NONE}, or a folder of jakiro export --to device",
    )


def exported_folder(name: str) -> Path | None:
    """Return the folder of a name if `jakiro export --to device` has written it, or None."""
    folder = Path(name.removeprefix("drafter="))
    return folder if (folder / DESCRIPTION_FILE).is_file() else None


def memory_request(
    drafter: Drafter | None, info: VerifierInfo, encoding: RowEncoding
) -> MemoryRequest | None:
    """Return the memory to ask the server for; None if the drafter reads tokens alone."""
    if not isinstance(drafter, TrainedDrafter):
        if drafter is not None and (drafter.needs or drafter.hidden_states):
            raise ConfigError(
                f"{drafter!r} needs the target's hidden states, which stay on the server"
            )
        if encoding != "exact":
            raise ConfigError(
                f"memory is encoded as {encoding} only for a trained drafter",
                remedy="use a folder of jakiro export --to device, or leave out the encoding",
            )
        return None
    if memory_drafter(drafter) is None:
        raise ConfigError(
            "this drafter computes with the target's last layers, which stay on the server",
            remedy="let the server draft with jakiro serve --drafter",
        )
    if info.memory is None:
        raise ConfigError(
            f"the server of {info.model} encodes no memory for a trained drafter",
            remedy="start it with jakiro serve --drafter DRAFTER --remote-sessions 8",
        )
    return MemoryRequest(encoder=encoder_fingerprint(drafter.model), encoding=encoding)


def _load_exported(
    folder: Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    **_: Any,
) -> TrainedDrafter:
    """Return the drafter of an exported folder, on its device and in the dtype of its target."""
    model = JakiroDrafter.from_pretrained(folder)
    given = None if dtype is None else torch_dtype(dtype)
    chosen = given if isinstance(given, torch.dtype) else None  # None for `auto`
    target = read_device_target(folder, model.draft_ids, device or "cpu", chosen)
    model = model.eval().to(device=target.device, dtype=target.dtype)
    return TrainedDrafter(model, target, default_tree(model))


def _load_small_lm(path: str, info: VerifierInfo, load: dict[str, Any]) -> SmallLMDrafter:
    tokenizer = load_tokenizer(path)
    if tokenizer_fingerprint(tokenizer) != info.tokenizer:
        raise TargetMismatch(
            f"the small language model {path} does not have the tokenizer of the server's target",
            remedy="use a smaller model of the target's family",
        )
    model = load_causal_lm(path, "the small language model", **load)
    drafter = SmallLMDrafter(model, model)
    drafter.vocab_size = min(drafter.vocab_size, info.vocab_size)
    return drafter


class DeviceDrafting:
    """The drafter's side of one text.

    Args:
        rows: form of the rows of memory that the drafter reads; None if it reads tokens alone.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        request: OpenSession,
        opened: SessionOpened,
        rows: RowFormat | None = None,
    ) -> None:
        self.sampling = sampling_of(request, opened.samples)
        self.limits = limits = opened.limits
        self.device = torch.device("cpu")
        self._format = rows
        # rows of the tokens that the drafter does not know yet
        self._rows = np.empty((0, 0 if rows is None else rows.num_bytes), np.uint8)
        self._known = 0  # number of tokens before the root that the drafter knows
        self.session: DraftSession | None = None  # None if nothing is drafted
        if drafter is None:
            return
        if isinstance(drafter, SmallLMDrafter | TrainedDrafter):
            self.device, self._dtype = drafter.model.device, drafter.model.dtype
        nodes, depth = drafter.max_nodes, drafter.max_depth
        self._version = drafter.version
        self._budget = Budget(min(nodes, limits.max_nodes), min(depth, limits.max_depth))
        capacity = len(opened.prompt_token_ids) + request.max_tokens + 1 + nodes
        self.session = drafter.new_session(self.sampling, capacity)
        _check_learns_from_tokens(self.session, drafter)

    def add_rows(self, rows: UInt8[np.ndarray, "tokens bytes"]) -> None:
        """Add the memory of verified tokens, in their order."""
        self._rows = np.concatenate([self._rows, rows])

    @property
    def num_readable(self) -> int:
        """The number of tokens whose memory is here; only meaningful if the drafter reads rows."""
        return self._known + len(self._rows)

    @torch.inference_mode()
    def tree(self, token_ids: Sequence[int], step: int) -> SequenceTree:
        """Return the tree of a decoding step.

        Args:
            token_ids: prompt and text, which begin with those of earlier calls; the last token is
                the root.
            step: number of the step, which determines the random numbers.
        """
        base_length = torch.tensor([len(token_ids) - 1], device=self.device)
        if self.session is None:
            return DraftTree.empty(base_length).sequence_tree()
        self.advance(token_ids)
        random = StepRandom([self.sampling.stream_key(step)], self.device)
        return self.session.propose(self._budget, random).sequence_tree()

    @torch.inference_mode()
    def advance(self, token_ids: Sequence[int]) -> None:
        if self.session is None:
            return
        base_length = len(token_ids) - 1
        assert self._format is None or self.num_readable == base_length, "memory ends at the root"
        for end in [*range(self._known + _CHUNK, base_length, _CHUNK), base_length]:
            self.session.advance(self._committed(token_ids, end))
            self._known = end

    def rollback(self, length: int) -> None:
        if self.session is not None and self._known > length:
            self.session.rollback(length)
            self._known = length

    def close(self, token_ids: Sequence[int]) -> None:
        """Free the memory; a drafter that learns reads the rest of the text."""
        if self.session is None:
            return
        if isinstance(self.session, AdaptiveSession) and len(token_ids) > self._known:
            self.session.on_finished(0, token_ids)
        self.session.close()
        self.session = None

    def _committed(self, token_ids: Sequence[int], end: int) -> Committed:
        """Return the tokens from the last known one to the root at position `end`."""
        tokens = torch.tensor([token_ids[self._known : end + 1]], device=self.device)
        count = end - self._known
        return Committed(
            base_length=(end,),
            num_verified=(count,),
            token_ids=tokens[:, :-1],
            root=tokens[:, -1:],
            memory=self._take_memory(count),
            start=torch.tensor([self._known], device=self.device),
            end=torch.tensor([end], device=self.device),
            is_padded=False,
        )

    def _take_memory(self, count: int) -> EncodedMemory | None:
        """Return the memory of the next tokens, and forget their rows; None if there is none."""
        if self._format is None or count == 0:
            return None
        rows, self._rows = self._rows[:count], self._rows[count:]
        memory = [part.to(self.device, self._dtype) for part in self._format.decode(rows)]
        return EncodedMemory(tuple(memory), self._version)


def sampling_of(request: OpenSession, samples: bool) -> Sampling:
    """Return the options by which drafts are processed, which the server need not share."""
    processors = LogitsProcessorList()
    if samples:
        if request.temperature is not None:
            processors.append(TemperatureLogitsWarper(float(request.temperature)))
        if request.top_k is not None:
            processors.append(TopKLogitsWarper(request.top_k))
        if request.top_p is not None and request.top_p < 1:
            processors.append(TopPLogitsWarper(float(request.top_p)))
        if request.min_p is not None:
            processors.append(MinPLogitsWarper(float(request.min_p)))
    return Sampling(processors, samples, request.seed, quantizes_drafts=True)


def _check_learns_from_tokens(session: object, drafter: Drafter) -> None:
    while isinstance(session, DelegatingSession):
        session = session.session
    if isinstance(session, AdaptiveSession) and not isinstance(session, TokenSession):
        raise ConfigError(
            f"{drafter!r} learns from the target's distributions, which stay on the server"
        )
