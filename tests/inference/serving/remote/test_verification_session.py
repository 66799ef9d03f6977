"""Texts whose trees were drafted elsewhere are those of the decoder, whatever gets lost."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from helpers.remote import looked_up, mixed, sequence_tree, tensors
from helpers.serving import tiny_decoder

from inference import SpeculativeDecoder
from inference.draft_tree import ROOT
from inference.generation.preparation import prepare_requests
from inference.remote.client_session import ClientSession
from inference.remote.integer_distribution import TOTAL
from inference.remote.messages import (
    MessageError,
    OpenSession,
    Progress,
    SessionOpened,
    TreeLimits,
    Verdict,
    parse_message,
)
from inference.remote.tree_frame import decode_step, encode_step
from inference.serving.remote.verification_session import VerificationSession

PROMPT = [5, 6, 7, 5, 6, 7, 5]
LIMITS = TreeLimits()
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7, "top_k": 2},  # few tokens, so that drafts are accepted
}


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return tiny_decoder()


@dataclass
class Link:
    """A server in the same process."""

    decoder: SpeculativeDecoder
    server: VerificationSession | None = None

    def open(self, request: OpenSession) -> SessionOpened:
        """Return the answer of the server."""
        own = self.decoder
        assert not isinstance(request.prompt, str)
        (prepared,), _ = prepare_requests(
            own.target.model,
            [request.prompt],
            {
                "max_new_tokens": request.max_tokens,
                **({} if request.top_k is None else {"top_k": request.top_k}),
            },
            temperature=request.temperature,
            seed=request.seed,
            max_position=own.target.spec.max_position,
        )
        assert own.tokenizer is not None
        server = VerificationSession(own.target, prepared, own.tokenizer, LIMITS, request.resume)
        while not server.is_open:
            server.read_chunk()
        self.server = server
        return SessionOpened(
            session="a",
            fingerprint="target",
            samples=True,
            prompt_token_ids=request.prompt,
            emitted=server.emitted,
            text=server.text,
            finished=server.is_finished,
            next_step=server.book.next_step,
            limits=LIMITS,
        )

    def send(self, step: int, body: bytes) -> Verdict:
        """Return the answer of the server."""
        assert self.server is not None
        return parse_message(self.server.submit(step, decode_step(body)).body, Verdict)


def written(link: Link, mode: str, max_tokens: int = 40) -> ClientSession:
    """Let a device write a text, and submit each tree twice, as after a lost reply."""
    request = OpenSession(prompt=PROMPT, seed=11, max_tokens=max_tokens, **OPTIONS[mode])
    device = ClientSession(request)
    device.on_opened(link.open(request))
    while not device.is_finished:
        tree = looked_up(device.token_ids)
        device.submit(tree)
        verdict = link.send(device.next_step, tree.body)
        assert link.send(device.next_step, tree.body) == verdict
        device.on_verdict(verdict)
    return device


def expected(decoder: SpeculativeDecoder, mode: str, max_tokens: int = 40) -> tuple[list[int], str]:
    """Return the tokens and the text of the decoder alone."""
    output = decoder.generate(PROMPT, max_new_tokens=max_tokens, seed=11, **OPTIONS[mode])
    return output.new_token_ids, output.text


@pytest.mark.parametrize("mode", OPTIONS)
def test_the_text_is_that_of_the_decoder_alone(decoder: SpeculativeDecoder, mode: str) -> None:
    device = written(link := Link(decoder), mode)
    assert (device.emitted, device.text) == expected(decoder, mode)
    assert link.server is not None
    assert link.server.num_steps == device.next_step - 1  # each step was verified once
    assert link.server.num_steps < len(device.emitted) - 1  # drafts were accepted


def _opened(decoder: SpeculativeDecoder) -> tuple[VerificationSession, ClientSession]:
    """Return the two ends of a session after its first step."""
    link = Link(decoder)
    device = ClientSession(OpenSession(prompt=PROMPT, seed=1, max_tokens=30, temperature=0.0))
    device.on_opened(link.open(device.request))
    tree = looked_up(device.token_ids)
    device.submit(tree)
    device.on_verdict(link.send(1, tree.body))
    assert link.server is not None
    return link.server, device


Fault = Callable[[list[int]], bytes]


def _elsewhere(token_ids: list[int]) -> bytes:
    return looked_up(token_ids[:-1]).body


def _impossible(token_ids: list[int]) -> bytes:
    tree = tensors([4], [ROOT], {ROOT: {4: TOTAL // 2, 5: TOTAL // 2}})
    wrong = tree._replace(token_ids=tree.token_ids + 2)
    return encode_step(len(token_ids) - 1, token_ids[-1], sequence_tree(wrong)).body


def _outside(token_ids: list[int]) -> bytes:
    tree = tensors([10**6], [ROOT])
    return encode_step(len(token_ids) - 1, token_ids[-1], sequence_tree(tree)).body


def _garbage(_: list[int]) -> bytes:
    return b"garbage"


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (_elsewhere, "other_text"),
        (_impossible, "sibling_outside_distribution"),
        (_outside, "token_outside_vocabulary"),
        (_garbage, "malformed_frame"),
    ],
)
def test_a_faulty_tree_decides_nothing(
    decoder: SpeculativeDecoder, fault: Fault, code: str
) -> None:
    server, device = _opened(decoder)
    before = list(server.emitted)
    with pytest.raises(MessageError) as found:
        server.submit(2, decode_step(fault([*PROMPT, *device.emitted])))
    assert found.value.code == code
    assert (server.emitted, server.book.next_step, server.num_steps) == (before, 2, 1)
    right = looked_up([*PROMPT, *device.emitted])
    verdict = server.submit(2, decode_step(right.body)).verdict
    assert verdict is not None
    assert verdict.digest == right.digest


def test_a_tree_without_candidates_emits_one_token(decoder: SpeculativeDecoder) -> None:
    server, device = _opened(decoder)
    known = [*PROMPT, *device.emitted]
    nothing = encode_step(len(known) - 1, known[-1], sequence_tree(tensors([], [])))
    verdict = server.submit(2, decode_step(nothing.body)).verdict
    assert verdict is not None
    assert len(verdict.emitted) == 1


def test_a_closed_session_refuses_everything(decoder: SpeculativeDecoder) -> None:
    server, device = _opened(decoder)
    server.close()
    with pytest.raises(MessageError) as found:
        server.submit(2, decode_step(looked_up(device.token_ids).body))
    assert (found.value.code, found.value.status) == ("session_gone", 410)


@pytest.mark.parametrize("extra", [[3], [10**6]], ids=["too long", "no token"])
def test_a_text_that_the_request_cannot_have_is_not_resumed(
    decoder: SpeculativeDecoder, extra: list[int]
) -> None:
    whole = written(Link(decoder), "greedy").emitted
    resume = Progress(emitted=[*whole, *extra], next_step=9)
    request = OpenSession(prompt=PROMPT, seed=11, max_tokens=40, temperature=0.0, resume=resume)
    with pytest.raises(MessageError, match="cannot be continued"):
        Link(decoder).open(request)


def test_a_complete_text_is_resumed_as_complete(decoder: SpeculativeDecoder) -> None:
    device = written(Link(decoder), "greedy")
    resume = Progress(emitted=device.emitted, next_step=device.next_step)
    request = OpenSession(prompt=PROMPT, seed=11, max_tokens=40, temperature=0.0, resume=resume)
    opened = Link(decoder).open(request)
    assert (opened.finished, opened.text) == (True, device.text)


def test_a_tree_with_candidates_of_both_kinds_is_verified(decoder: SpeculativeDecoder) -> None:
    link = Link(decoder)
    opened = link.open(OpenSession(prompt=PROMPT, seed=1, max_tokens=9, temperature=1.0))
    tree = encode_step(len(PROMPT), opened.emitted[0], sequence_tree(mixed()))
    verdict = link.send(1, tree.body)
    assert (verdict.step, verdict.digest) == (1, tree.digest)
    assert len(verdict.emitted) == verdict.num_accepted + 1


def test_a_long_chain_that_was_written_alone_is_verified_in_one_step(
    decoder: SpeculativeDecoder,
) -> None:
    expected = decoder.generate(PROMPT, temperature=0, max_new_tokens=120).new_token_ids
    link = Link(decoder)
    device = ClientSession(OpenSession(prompt=PROMPT, seed=11, max_tokens=120, temperature=0.0))
    device.on_opened(link.open(device.request))
    wrong = [*expected[1:90], (expected[90] + 1) % 61]
    chain = sequence_tree(tensors(wrong, [node - 1 for node in range(90)]))
    tree = encode_step(len(PROMPT), expected[0], chain)
    device.submit(tree)
    verdict = link.send(1, tree.body)
    assert device.on_verdict(verdict) == expected[1:91]
    assert verdict.num_accepted == 89
