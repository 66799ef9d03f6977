"""Exact enumeration of a text that is continued without a connection, and then reconciled."""

from threading import Event
from typing import Any

import numpy as np
from helpers.branching import Chooser, distribution_of
from helpers.remote import LIMITS, RemoteSteps, opened_device, sequence_tree, tensors
from helpers.tables import Prefix, Tables

from inference import SpeculativeDecoder
from inference.device.link import AnsweredStep, LinkTraffic, ServerLink
from inference.device.offline_text import ProvisionalText, ProvisionalToken
from inference.draft_tree import ROOT, SequenceTree
from inference.generation.preparation import prepare_requests
from inference.remote.messages import OpenSession, SessionOpened, TreeLimits, Verdict, parse_message
from inference.remote.text_state import ClientSession, VerdictLog
from inference.remote.tree_frame import decode_step, encode_step
from inference.sampling.integer_distribution import TOTAL, quantized
from inference.serving.verification_session import VerificationSession


class Noise:
    """A uniform random number, known only as far as the choices made with it reveal it."""

    def __init__(self) -> None:
        self.low, self.high = 0.0, 1.0

    def column(self, chooser: Chooser, weights: np.ndarray) -> int:
        """Return the column of a distribution that the number selects.

        Args:
            weights: integer weights that sum to `TOTAL`.
        """
        ends = np.cumsum(weights) / TOTAL
        begins = ends - weights / TOTAL
        shares = np.minimum(ends, self.high) - np.maximum(begins, self.low)
        shares = np.maximum(shares, 0) / (self.high - self.low)
        found = chooser.choose(shares.tolist())
        self.low, self.high = max(self.low, begins[found]), min(self.high, ends[found])
        return found


class OfflineSteps(RemoteSteps):
    """The exact distribution of two steps, of which the first one's verdict arrives late.

    The device writes alone meanwhile. What continues the verdict is the tree of the second step; if
    nothing does, a tree is drafted. The methods are overridden by planted faults.
    """

    def __init__(self, tables: Tables, length: int, support: int = 2) -> None:
        super().__init__(tables, support=support)
        self.length = length

    def __call__(self, prefix: Prefix) -> dict[Prefix, float]:
        """Return the distribution of the tokens of both steps; of one step after the first two."""
        if len(prefix) > len((0, 1)):
            return RemoteSteps(self.tables)(prefix)
        return distribution_of(lambda chooser: self._two_steps(chooser, prefix))

    def _two_steps(self, chooser: Chooser, prefix: Prefix) -> Prefix:
        device, verdicts = opened_device(prefix), VerdictLog()
        tree = self.chain_of(self.token(chooser, prefix, Noise()))
        _submit(device, tree)
        provisional, noise = self.written_alone(
            chooser, prefix, [tree.token_ids[node] for node in tree.best_path()]
        )
        first = tuple(device.on_verdict(self._verdict(chooser, verdicts, device, prefix)))
        rest = self.rest_of(provisional, list(first))
        if rest.written:
            chain = rest.chain(LIMITS.max_chain)
        else:
            chain = self.next_tree(chooser, prefix + first, noise)
        _submit(device, chain)
        second = device.on_verdict(self._verdict(chooser, verdicts, device, prefix + first))
        return first + tuple(second)

    def distribution(self, prefix: Prefix) -> tuple[list[int], np.ndarray]:
        """Return the ids and integer weights of the drafter's distribution after a prefix."""
        best = self.tables.joint(prefix)[0].softmax(dim=-1).topk(self.support)
        return best.indices.tolist(), quantized(best.values.numpy())

    def written_alone(
        self, chooser: Chooser, prefix: Prefix, guess: list[int]
    ) -> tuple[ProvisionalText, Noise]:
        """Return the provisional text, and the noise of its first token after the guess."""
        text, first = ProvisionalText(guess), Noise()
        for number in range(self.length):
            noise = Noise() if number else first
            text.written.append(self.token(chooser, (*prefix, *text.token_ids), noise))
        return text, first

    def token(self, chooser: Chooser, prefix: Prefix, noise: Noise) -> ProvisionalToken:
        """Return a provisional token."""
        ids, weights = self.distribution(prefix)
        column = noise.column(chooser, weights)
        return ProvisionalToken(ids[column], tuple(ids), tuple(weights.tolist()))

    def rest_of(self, text: ProvisionalText, emitted: list[int]) -> ProvisionalText:
        """Return what is submitted next."""
        return text.after(emitted)

    def next_tree(self, chooser: Chooser, prefix: Prefix, _: Noise) -> SequenceTree:
        """Return a tree that is drafted for the second step."""
        return self.chain_of(self.token(chooser, prefix, Noise()))

    def chain_of(self, token: ProvisionalToken) -> SequenceTree:
        """Return the tree of a single sampled token."""
        weights = dict(zip(token.ids, token.weights, strict=True))
        return sequence_tree(tensors([token.token_id], [ROOT], {ROOT: weights}))


def _submit(device: ClientSession, tree: SequenceTree) -> None:
    token_ids = device.token_ids
    device.submit(encode_step(len(token_ids) - 1, token_ids[-1], tree))


def open_here(
    decoder: SpeculativeDecoder, request: OpenSession
) -> tuple[VerificationSession, SessionOpened]:
    """Return both ends of a new session: its server's side, and the answer to the device."""
    target, limits = decoder.target, TreeLimits()
    assert not isinstance(request.prompt, str)
    assert decoder.tokenizer is not None
    (prepared,), _config = prepare_requests(
        target.model,
        [request.prompt],
        {
            "max_new_tokens": request.max_tokens,
            **({} if request.top_k is None else {"top_k": request.top_k}),
        },
        temperature=request.temperature,
        seed=request.seed,
        max_position=target.spec.max_position,
    )
    server = VerificationSession(target, prepared, decoder.tokenizer, limits, request.resume)
    while not server.is_open:
        server.read_chunk()
    return server, SessionOpened(
        session="a",
        fingerprint="target",
        samples=True,
        prompt_token_ids=request.prompt,
        emitted=server.emitted,
        text=server.text,
        finished=server.is_finished,
        next_step=server.verdicts.next_step,
        limits=limits,
        end_ids=sorted(prepared.stop.eos_ids),
    )


class InProcessLink(ServerLink):
    """A server in the same process, whose answers to steps come once `is_answering` is set."""

    def __init__(self, decoder: SpeculativeDecoder) -> None:
        super().__init__("http://127.0.0.1:1")
        self.is_answering = Event()
        self._decoder = decoder
        self._server: VerificationSession | None = None

    def open(self, request: OpenSession, _: LinkTraffic) -> SessionOpened:
        """Return the answer of the server."""
        self._server, opened = open_here(self._decoder, request)
        return opened

    def submit(self, _: str, step: int, body: bytes, *__: Any) -> AnsweredStep:
        """Return the answer of the server."""
        assert self._server is not None
        decided = self._server.submit(step, decode_step(body))
        self.is_answering.wait(10)
        return AnsweredStep(parse_message(decided.body, Verdict))

    def end(self, _: str) -> None:
        """Free the session."""
        assert self._server is not None
        self._server.close()
