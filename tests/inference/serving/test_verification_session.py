"""Texts whose trees were drafted elsewhere are those of the decoder, whatever gets lost."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.offline import open_here
from helpers.remote import looked_up, mixed, sequence_tree, tensors
from helpers.serving import tiny_decoder

from inference import SpeculativeDecoder
from inference.draft_tree import ROOT
from inference.remote.messages import (
    MessageError,
    OpenSession,
    Progress,
    Verdict,
    parse_message,
)
from inference.remote.text_state import ClientSession
from inference.remote.tree_frame import decode_step, encode_step
from inference.sampling.integer_distribution import TOTAL
from inference.serving.verification_session import VerificationSession

PROMPT = [5, 6, 7, 5, 6, 7, 5]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7, "top_k": 2},  # few tokens, so that drafts are accepted
}


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return tiny_decoder()


def send(server: VerificationSession, step: int, body: bytes) -> Verdict:
    """Return the answer of the server."""
    return parse_message(server.submit(step, decode_step(body)).body, Verdict)


def opened(
    decoder: SpeculativeDecoder, mode: str, max_tokens: int = 40
) -> tuple[VerificationSession, ClientSession]:
    """Return both ends of a session that has just been opened."""
    request = OpenSession(prompt=PROMPT, seed=11, max_tokens=max_tokens, **OPTIONS[mode])
    device = ClientSession(request)
    server, answer = open_here(decoder, request)
    device.on_opened(answer)
    return server, device


def decide(server: VerificationSession, device: ClientSession) -> None:
    """Decide a step, whose tree is submitted twice, as after a lost reply."""
    tree = looked_up(device.token_ids)
    device.submit(tree)
    verdict = send(server, device.next_step, tree.body)
    assert send(server, device.next_step, tree.body) == verdict
    device.on_verdict(verdict)


def written(decoder: SpeculativeDecoder, mode: str) -> tuple[VerificationSession, ClientSession]:
    """Return both ends of a text that is complete."""
    server, device = opened(decoder, mode)
    while not device.is_finished:
        decide(server, device)
    return server, device


def expected(decoder: SpeculativeDecoder, mode: str, max_tokens: int = 40) -> tuple[list[int], str]:
    """Return the tokens and the text of the decoder alone."""
    output = decoder.generate(PROMPT, max_new_tokens=max_tokens, seed=11, **OPTIONS[mode])
    return output.new_token_ids, output.text


@pytest.mark.parametrize("mode", OPTIONS)
def test_the_text_is_that_of_the_decoder_alone(decoder: SpeculativeDecoder, mode: str) -> None:
    server, device = written(decoder, mode)
    assert (device.emitted, device.text) == expected(decoder, mode)
    assert server.num_steps == device.next_step - 1  # each step was verified once
    assert server.num_steps < len(device.emitted) - 1  # drafts were accepted


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


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (_elsewhere, "other_text"),
        (_impossible, "sibling_outside_distribution"),
        (_outside, "token_outside_vocabulary"),
        (lambda _: b"garbage", "malformed_frame"),
    ],
)
def test_a_faulty_tree_decides_nothing(
    decoder: SpeculativeDecoder, fault: Fault, code: str
) -> None:
    server, device = opened(decoder, "greedy")
    decide(server, device)
    before = list(server.emitted)
    with pytest.raises(MessageError) as found:
        server.submit(2, decode_step(fault([*PROMPT, *device.emitted])))
    assert found.value.code == code
    assert (server.emitted, server.verdicts.next_step, server.num_steps) == (before, 2, 1)
    right = looked_up([*PROMPT, *device.emitted])
    verdict = server.submit(2, decode_step(right.body)).verdict
    assert verdict is not None
    assert verdict.digest == right.digest


@pytest.mark.parametrize("extra", [[3], [10**6]], ids=["too long", "no token"])
def test_a_text_that_the_request_cannot_have_is_not_resumed(
    decoder: SpeculativeDecoder, extra: list[int]
) -> None:
    _, device = written(decoder, "greedy")
    resume = Progress(emitted=[*device.emitted, *extra], next_step=9)
    with pytest.raises(MessageError, match="cannot be continued"):
        open_here(decoder, device.request.model_copy(update={"resume": resume}))


def test_a_complete_text_is_resumed_as_complete(decoder: SpeculativeDecoder) -> None:
    _, device = written(decoder, "greedy")
    resume = Progress(emitted=device.emitted, next_step=device.next_step)
    _, again = open_here(decoder, device.request.model_copy(update={"resume": resume}))
    assert (again.finished, again.text) == (True, device.text)


def test_a_tree_with_candidates_of_both_kinds_is_verified(decoder: SpeculativeDecoder) -> None:
    server, device = opened(decoder, "sampled", max_tokens=9)
    tree = encode_step(len(PROMPT), device.emitted[0], sequence_tree(mixed()))
    verdict = send(server, 1, tree.body)
    assert (verdict.step, verdict.digest) == (1, tree.digest)
    assert len(verdict.emitted) == verdict.num_accepted + 1


def test_a_long_chain_that_was_written_alone_is_verified_in_one_step(
    decoder: SpeculativeDecoder,
) -> None:
    expected = decoder.generate(PROMPT, temperature=0, max_new_tokens=120).new_token_ids
    server, device = opened(decoder, "greedy", max_tokens=120)
    wrong = [*expected[1:90], (expected[90] + 1) % 61]
    chain = sequence_tree(tensors(wrong, [node - 1 for node in range(90)]))
    tree = encode_step(len(PROMPT), expected[0], chain)
    device.submit(tree)
    verdict = send(server, 1, tree.body)
    assert device.on_verdict(verdict) == expected[1:91]
    assert verdict.num_accepted == 89
