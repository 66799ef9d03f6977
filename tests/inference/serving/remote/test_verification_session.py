"""Texts whose trees were drafted elsewhere are those of the decoder, whatever gets lost."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers.remote import looked_up, mixed, sequence_tree, tensors
from helpers.serving import tiny_decoder

from inference import SpeculativeDecoder
from inference.draft_tree import ROOT
from inference.generation.preparation import prepare_requests
from inference.remote.client_session import ClientSession, Done, Draft, Open, Send
from inference.remote.errors import MessageError, SessionGone, StepConflict
from inference.remote.integer_distribution import TOTAL
from inference.remote.messages import (
    OpenSession,
    Progress,
    SessionOpened,
    TreeLimits,
    Verdict,
    parse_message,
)
from inference.remote.step_frame import decode_step, encode_step
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
    """A server in the same process, and a link whose faults happen at chosen sendings."""

    decoder: SpeculativeDecoder
    lost: set[int] = field(default_factory=set)
    crashes: set[int] = field(default_factory=set)
    num_sent: int = 0
    num_opened: int = 0
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
        self.num_opened += 1
        assert own.tokenizer is not None
        server = VerificationSession(own.target, prepared, own.tokenizer, LIMITS, request.resume)
        while not server.is_open:
            server.read_chunk()
        self.server = server
        return SessionOpened(
            session=f"session-{self.num_opened}",
            fingerprint="target",
            samples=True,
            prompt_token_ids=request.prompt,
            emitted=server.emitted,
            text=server.text,
            finished=server.is_finished,
            next_step=server.book.next_step,
            limits=LIMITS,
        )

    def send(self, sent: Send) -> Verdict | None:
        """Return the answer of the server; None if it was lost."""
        assert self.server is not None
        self.num_sent += 1
        if self.num_sent in self.crashes:
            self.server.close()
        verdict = self.server.submit(sent.step, decode_step(sent.body))
        return None if self.num_sent in self.lost else parse_message(verdict, Verdict)


def written(link: Link, mode: str, max_tokens: int = 40) -> ClientSession:
    """Let a device write a text over a link."""
    device = ClientSession(
        OpenSession(prompt=PROMPT, seed=11, max_tokens=max_tokens, **OPTIONS[mode])
    )
    while not isinstance(action := device.action, Done):
        if isinstance(action, Open):
            device.on_opened(link.open(action.request))
        elif isinstance(action, Draft):
            device.submit(looked_up(action.token_ids))
        else:
            try:
                verdict = link.send(action)
            except SessionGone:
                device.on_gone()
                continue
            if verdict is not None:
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
    assert link.num_sent == device.next_step - 1 < len(device.emitted) - 1  # drafts were accepted


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("lost", [{1}, {2, 3, 4}, set(range(1, 60, 2))], ids=str)
def test_lost_replies_do_not_change_the_text(
    decoder: SpeculativeDecoder, mode: str, lost: set[int]
) -> None:
    link = Link(decoder, lost=lost)
    device = written(link, mode)
    assert (device.emitted, device.text) == expected(decoder, mode)
    assert link.server is not None
    assert link.server.num_steps == device.next_step - 1  # each step was verified once
    assert link.server.book.num_replays == link.num_sent - link.server.num_steps > 0


@pytest.mark.parametrize("mode", OPTIONS)
def test_a_new_server_goes_on_at_any_step_with_the_text_of_the_device(
    decoder: SpeculativeDecoder, mode: str
) -> None:
    alone = expected(decoder, mode, max_tokens=14)
    num_steps = written(Link(decoder), mode, max_tokens=14).next_step - 1
    for number in range(1, num_steps + 1):
        link = Link(decoder, crashes={number}, lost={max(number - 1, 1)})
        device = written(link, mode, max_tokens=14)
        assert (device.emitted, device.text) == alone
        assert device.num_resumes >= 1


def _opened(decoder: SpeculativeDecoder) -> tuple[VerificationSession, ClientSession]:
    """Return the two ends of a session after its first step."""
    link = Link(decoder)
    device = ClientSession(OpenSession(prompt=PROMPT, seed=1, max_tokens=30, temperature=0.0))
    device.on_opened(link.open(device.request))
    device.submit(looked_up([*PROMPT, *device.emitted]))
    assert isinstance(device.action, Send)
    verdict = link.send(device.action)
    assert verdict is not None
    device.on_verdict(verdict)
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
    assert parse_message(server.submit(2, decode_step(right.body)), Verdict).digest == right.digest


def test_another_tree_for_a_decided_step_is_refused(decoder: SpeculativeDecoder) -> None:
    server, _ = _opened(decoder)
    other = encode_step(len(PROMPT), server.emitted[0], sequence_tree(tensors([1], [ROOT])))
    with pytest.raises(StepConflict) as found:
        server.submit(1, decode_step(other.body))
    assert (found.value.code, found.value.next_step) == ("step_conflict", 2)


def test_a_tree_without_candidates_emits_one_token(decoder: SpeculativeDecoder) -> None:
    server, device = _opened(decoder)
    known = [*PROMPT, *device.emitted]
    nothing = encode_step(len(known) - 1, known[-1], sequence_tree(tensors([], [])))
    assert len(parse_message(server.submit(2, decode_step(nothing.body)), Verdict).emitted) == 1


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
    verdict = link.send(Send(opened.session, 1, tree.body))
    assert verdict is not None
    assert (verdict.step, verdict.digest) == (1, tree.digest)
    assert len(verdict.emitted) == verdict.num_accepted + 1


def test_a_long_chain_that_was_written_alone_is_verified_in_one_step(
    decoder: SpeculativeDecoder,
) -> None:
    expected = decoder.generate(PROMPT, temperature=0, max_new_tokens=120).new_token_ids
    link = Link(decoder)
    device = ClientSession(OpenSession(prompt=PROMPT, seed=11, max_tokens=120, temperature=0.0))
    opening = device.action
    assert isinstance(opening, Open)
    device.on_opened(link.open(opening.request))
    wrong = [*expected[1:90], (expected[90] + 1) % 61]
    chain = sequence_tree(tensors(wrong, [node - 1 for node in range(90)]))
    device.submit(encode_step(len(PROMPT), expected[0], chain))
    sent = device.action
    assert isinstance(sent, Send)
    verdict = link.send(sent)
    assert verdict is not None
    assert device.on_verdict(verdict) == expected[1:91]
    assert verdict.num_accepted == 89
