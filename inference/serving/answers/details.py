"""The details that a stream has on request: the origin of each token, and the tree of each step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from inference.engine.decode_step import TARGET, DecodeStep
from inference.engine.verified_tree import VerifiedTree
from inference.serving.answers.token_text import text_of_token

_TARGET_NAME = "target"


class TokenOrigin(NamedTuple):
    """A token with its part of the text, and where it came from."""

    token_id: int
    text: str  # the parts of all tokens of a choice, joined, are the text of the choice
    step: int  # number of its decoding step; 0 for the token that the prefill selected
    depth: int  # depth in the draft tree; 0 if the target itself selected the token
    proposer_id: int  # expert or drafter that proposed the token, or TARGET


class StepSummary(NamedTuple):
    """A decoding step of one choice."""

    number: int
    seconds: float  # from the arrival of the request until the tokens of the step were emitted
    num_emitted: int
    tree: VerifiedTree


@dataclass
class ChoiceDetails:
    """The details that belong to new text of one choice."""

    tokens: list[TokenOrigin] = field(default_factory=list)
    steps: list[StepSummary] = field(default_factory=list)


class DetailLog:
    """Collects the details of one choice while its text grows."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._num_steps = 0
        self._text = ""  # final text that is not divided among tokens yet
        self._start = 0  # number of characters before this text
        self._tokens: list[TokenOrigin] = []  # those of this text, without their parts of it
        self._offsets: list[int] = []  # number of characters before each of these tokens
        self._steps: list[StepSummary] = []

    def add(self, step: DecodeStep, offsets: Sequence[int]) -> None:
        """Add a decoding step.

        Args:
            offsets: number of characters before each token of the step.
        """
        assert step.details is not None
        assert step.details.tree is not None
        self._tokens += [
            TokenOrigin(token, "", self._num_steps, depth, proposer)
            for token, depth, proposer in zip(
                step.token_ids, step.depths, step.proposer_ids, strict=True
            )
        ]
        self._offsets += offsets
        seconds = step.emitted_at - self._started
        self._steps.append(
            StepSummary(self._num_steps, seconds, len(step.token_ids), step.details.tree)
        )
        self._num_steps += 1

    def take(self, text: str, is_final: bool) -> ChoiceDetails | None:
        """Return what is known by now, and forget it; None if there is nothing.

        Args:
            is_final: whether no character of the tokens so far is held back.
        """
        self._text += text
        found = ChoiceDetails(self._divided() if is_final else [], self._steps)
        self._steps = []
        return found if found.tokens or found.steps else None

    def _divided(self) -> list[TokenOrigin]:
        """Return the tokens, each with its part of the text."""
        length = len(self._text)
        inner = (min(max(offset - self._start, 0), length) for offset in self._offsets[1:])
        bounds = [*accumulate([0, *inner], max), length] if self._tokens else []
        found = [
            token._replace(text=self._text[start:end])
            for token, (start, end) in zip(self._tokens, pairwise(bounds), strict=True)
        ]
        self._start += length
        self._text, self._tokens, self._offsets = "", [], []
        return found


class DetailWriter:
    """Writes details as JSON data.

    Attributes:
        hides_rejected: whether rejected drafts are left out, because the drafter has learned from
            texts of other users, which they may repeat.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, names: Sequence[str]) -> None:
        self.hides_rejected = False
        self._tokenizer = tokenizer
        self._names = tuple(names)

    def data(self, index: int, details: ChoiceDetails) -> dict[str, Any]:
        """Return the value of the field `jakiro` of a chunk."""
        return {
            "index": index,
            "tokens": [self._token(token) for token in details.tokens],
            "steps": [self._step(step) for step in details.steps],
        }

    def _token(self, token: TokenOrigin) -> dict[str, Any]:
        return {
            "id": token.token_id,
            "text": token.text,
            "step": token.step,
            "depth": token.depth,
            "source": self._source(token.proposer_id),
        }

    def _step(self, step: StepSummary) -> dict[str, Any]:
        tree = step.tree
        return {
            "step": step.number,
            "seconds": round(step.seconds, 6),
            "emitted": step.num_emitted,
            "drafted": len(tree.token_ids),
            "accepted": len(tree.path),
            "tree": self._tree(tree),
        }

    def _tree(self, tree: VerifiedTree) -> dict[str, Any]:
        accepted = set(tree.path)
        shown = tree.path if self.hides_rejected else range(len(tree.token_ids))
        index = {node: number for number, node in enumerate(shown)}
        nodes = [
            {
                "text": self._text(tree.token_ids[node]),
                "parent": index.get(tree.parents[node], tree.parents[node]),
                "accepted": node in accepted,
                "probability": _rounded(tree.target_probs[node]),
                "source": self._source(tree.proposer_ids[node]),
            }
            for node in shown
        ]
        next_text = None if tree.next_token is None else self._text(tree.next_token)
        return {"root": self._text(tree.root), "nodes": nodes, "next": next_text}

    def _source(self, proposer_id: int) -> str:
        if proposer_id == TARGET:
            return _TARGET_NAME
        known = proposer_id < len(self._names)
        return self._names[proposer_id] if known else f"source {proposer_id}"

    def _text(self, token_id: int) -> str:
        return text_of_token(self._tokenizer, token_id)


def _rounded(probability: float) -> float | None:
    """Return a probability with four decimals; None if it is not a number."""
    return round(probability, 4) if math.isfinite(probability) else None
