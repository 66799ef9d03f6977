"""Trees on their way to a server: small ones by hand, and exact enumeration of whole steps."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from helpers.branching import Chooser, distribution_of
from helpers.tables import Prefix, Tables, no_processors, one_by_one

from inference.draft_tree import ROOT, CandidateKind, SequenceTree
from inference.drafters.candidates import to_tree
from inference.drafters.delegating import DelegatingDrafter
from inference.drafters.lookup import LookupDrafter
from inference.protocol import DraftSession
from inference.remote.messages import OpenSession, SessionOpened, TreeLimits, Verdict, parse_message
from inference.remote.text_state import ClientSession, VerdictLog
from inference.remote.tree_frame import (
    SubmittedTree,
    TreeTensors,
    decode_step,
    encode_step,
    receive_tree,
    to_draft_tree,
)
from inference.sampling.integer_distribution import TOTAL, quantized
from inference.sampling.options import Sampling

LIMITS = TreeLimits(max_nodes=8, max_depth=4, max_support=8)
VOCAB = 8


def tensors(
    token_ids: list[int],
    parents: list[int],
    distributions: dict[int, dict[int, int]] | None = None,
) -> TreeTensors:
    """Return a tree, in which the children of nodes with a distribution are sampled.

    Args:
        distributions: token -> integer weight for each node with sampled children, of equal sizes.
    """
    given = distributions or {}
    sampled = [
        CandidateKind.SAMPLED if p in given else CandidateKind.DETERMINISTIC for p in parents
    ]
    width = max((len(own) for own in given.values()), default=0)
    shape = (len(given), width)
    ids = [list(own) for own in given.values()]
    weights = [list(own.values()) for own in given.values()]
    return TreeTensors(
        np.array(token_ids, np.int32),
        np.array(parents, np.int16),
        np.array(sampled, np.uint8),
        np.array(list(given), np.int16),
        np.array(ids, np.int32).reshape(shape),
        np.array(weights, np.uint16).reshape(shape),
    )


def mixed() -> TreeTensors:
    """Return a tree with two sampled children, a sampled and a deterministic grandchild."""
    root = {3: TOTAL // 2, 5: TOTAL // 4, 1: TOTAL // 4}
    below = {2: TOTAL - 1, 7: 1, 0: 0}
    found = tensors([3, 5, 2, 4], [ROOT, ROOT, 0, 1], {ROOT: root, 0: below})
    return found._replace(kinds=np.array([1, 1, 1, 0], np.uint8))


def sequence_tree(tree: TreeTensors) -> SequenceTree:
    """Return a tree as acceptance reads it."""
    return to_draft_tree(tree, torch.tensor([2])).sequence_tree()


class QuantizedDrafter(DelegatingDrafter):
    """A drafter that samples from integer weights, as on a device."""

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> DraftSession:
        """Return a session of the wrapped drafter."""
        return self.drafter.new_session(replace(sampling, quantizes_drafts=True), capacity, batch)


def looked_up(token_ids: list[int]) -> SubmittedTree:
    """Return the tree that prompt lookup drafts."""
    own = LookupDrafter()
    candidates = own.draft(np.array(token_ids), own.max_nodes, own.max_depth)
    tree = to_tree([candidates], torch.tensor([len(token_ids) - 1])).sequence_tree()
    return encode_step(len(token_ids) - 1, token_ids[-1], tree)


def opened_device(prefix: Prefix = (0, 1)) -> ClientSession:
    """Return a session on the device that has just been opened after these tokens."""
    device = ClientSession(OpenSession(prompt=list(prefix[:-1]), seed=0, max_tokens=9))
    device.on_opened(opening(prefix))
    return device


def opening(prefix: Prefix = (0, 1), next_step: int = 1) -> SessionOpened:
    """Return the answer of a server whose text is the last token of a prefix."""
    return SessionOpened(
        session="a",
        fingerprint="target",
        samples=True,
        prompt_token_ids=list(prefix[:-1]),
        emitted=[prefix[-1]],
        text="",
        finished=False,
        next_step=next_step,
        limits=LIMITS,
    )


Sample = Callable[[Chooser, np.ndarray, np.ndarray], int]


def from_weights(chooser: Chooser, _probs: np.ndarray, weights: np.ndarray) -> int:
    """Return a column that is sampled from the quantized distribution."""
    return chooser.choose((weights / weights.sum()).tolist())


class RemoteSteps:
    """The exact distribution of steps over a network that loses replies, by their lengths.

    Args:
        loss: function from the number of emitted tokens to the probability of losing the reply,
            which happens at most once in a step.
        redrafts: whether the device drafts another tree after a loss, which is a fault.
        children: number of sampled children of the root; the first of them has one child.
    """

    def __init__(
        self,
        tables: Tables,
        loss: Callable[[int], float] = lambda _: 0.0,
        sample: Sample = from_weights,
        verdicts: type[VerdictLog] = VerdictLog,
        redrafts: bool = False,
        children: int = 1,
        support: int = 2,
    ) -> None:
        self.tables, self.loss, self.sample = tables, loss, sample
        self.verdicts, self.redrafts = verdicts, redrafts
        self.children, self.support = children, support
        self._accepted = cache(self._accept)
        self._decoded = cache(decode_step)

    def __call__(self, prefix: Prefix) -> dict[Prefix, float]:
        """Return the distribution of the tokens that a step emits after a prefix."""
        return distribution_of(lambda chooser: self._step(chooser, prefix))

    def _step(self, chooser: Chooser, prefix: Prefix) -> Prefix:
        device, verdicts = opened_device(prefix), self.verdicts()
        is_lost = False
        while True:
            if device.submitted is None:
                tree = sequence_tree(self._tree(chooser, prefix))
                device.submit(encode_step(len(prefix) - 1, prefix[-1], tree))
            verdict = self._verdict(chooser, verdicts, device, prefix)
            if not is_lost and chooser.accept(self.loss(len(verdict.emitted))):
                is_lost = True
                device.submitted = None if self.redrafts else device.submitted
                continue
            return tuple(device.on_verdict(verdict))

    def _tree(self, chooser: Chooser, prefix: Prefix) -> TreeTensors:
        """Return sampled children of the root, and one of the first child."""
        ids, weights, children = self._sampled(chooser, prefix, self.children)
        below = self._sampled(chooser, (*prefix, children[0]), 1)
        return tensors(
            [*children, *below[2]],
            [*[ROOT] * self.children, 0],
            {
                ROOT: dict(zip(ids, weights, strict=True)),
                0: dict(zip(below[0], below[1], strict=True)),
            },
        )

    def _sampled(
        self, chooser: Chooser, prefix: Prefix, count: int
    ) -> tuple[list[int], list[int], list[int]]:
        """Return ids and weights of a draft distribution, and its sampled tokens."""
        best = self.tables.joint(prefix)[0].softmax(dim=-1).topk(self.support)
        probs, ids = best.values.numpy(), best.indices.tolist()
        weights = quantized(probs)
        left = np.ones(self.support)
        columns: list[int] = []
        for _ in range(count):
            columns.append(self.sample(chooser, probs * left, weights * left))
            left[columns[-1]] = 0
        return ids, weights.tolist(), [ids[column] for column in columns]

    def _verdict(
        self, chooser: Chooser, verdicts: VerdictLog, device: ClientSession, prefix: Prefix
    ) -> Verdict:
        """Return the server's answer to the submitted tree."""
        assert device.submitted is not None
        body = device.submitted.body
        digest = self._decoded(body).header.digest
        stored = verdicts.verdict_of(device.next_step, digest)
        if stored is None:
            accepted = self._accepted(body, prefix)
            emitted = list(accepted)[chooser.choose(list(accepted.values()))]
            verdict = Verdict(
                step=device.next_step,
                digest=digest,
                emitted=list(emitted),
                num_accepted=len(emitted) - 1,
                text="",
                finished=False,
            )
            stored = verdict.model_dump_json().encode()
            verdicts.store(digest, stored)
        return parse_message(stored, Verdict)

    def _accept(self, body: bytes, prefix: Prefix) -> dict[Prefix, float]:
        """Return the distribution of the tokens that the server emits for a submitted tree."""
        received = self._decoded(body)
        receive_tree(received.tree, LIMITS, VOCAB)
        tree = to_draft_tree(received.tree, torch.tensor([received.header.base_length]))
        return one_by_one(self.tables, no_processors(), prefix, tree)
