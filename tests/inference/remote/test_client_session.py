"""The device repeats the same bytes until their verdict arrives, and goes on after a crash."""

import pytest
from helpers.remote import mixed, opened_device, opening, sequence_tree, tensors

from inference.draft_tree import ROOT
from inference.remote.client_session import ClientSession
from inference.remote.messages import ChatMessage, MessageError, OpenSession, Progress, Verdict
from inference.remote.tree_frame import SubmittedTree, encode_step

REQUEST = OpenSession(prompt="a prompt", seed=3, max_tokens=9)
TREE = encode_step(1, 1, sequence_tree(mixed()))
OTHER = encode_step(1, 1, sequence_tree(tensors([4], [ROOT])))


def _verdict(tree: SubmittedTree, step: int = 1) -> Verdict:
    return Verdict(
        step=step, digest=tree.digest, emitted=[3, 4], num_accepted=1, text="xy", finished=False
    )


@pytest.mark.parametrize("verdict", [_verdict(OTHER), _verdict(TREE, step=2)])
def test_the_verdict_of_another_tree_is_refused(verdict: Verdict) -> None:
    device = opened_device()
    for submitted in (None, TREE):
        device.submitted = submitted
        with pytest.raises(MessageError, match="another tree"):
            device.on_verdict(verdict)
        assert device.submitted == submitted


def test_a_lost_session_is_opened_again_and_the_tree_stays_binding() -> None:
    device = opened_device()
    assert device.opening == device.request.model_copy(
        update={"resume": Progress(emitted=[1], next_step=1)}
    )
    device.submit(TREE)
    assert device.on_verdict(_verdict(TREE)) == [3, 4]
    device.submit(OTHER)
    device.on_gone()
    request = device.opening
    assert (request.prompt, request.seed) == ([0], device.request.seed)
    assert request.resume == Progress(emitted=[1, 3, 4], next_step=2)
    again = opening((0, 1), next_step=2).model_copy(
        update={"session": "b", "emitted": [1, 3, 4], "text": "xy"}
    )
    device.on_opened(again)
    assert (device.session_id, device.next_step, device.submitted) == ("b", 2, OTHER)
    assert (device.text, device.num_resumes) == ("xy", 1)


def test_an_answer_to_messages_is_continued_as_one() -> None:
    messages = [ChatMessage(role="user", content="a question")]
    device = ClientSession(REQUEST.model_copy(update={"prompt": messages}))
    device.on_opened(opening((0, 1)))
    assert device.opening.resume == Progress(emitted=[1], next_step=1, is_answer=True)


@pytest.mark.parametrize(
    "change",
    [{"fingerprint": "other"}, {"next_step": 2}, {"emitted": [2]}, {"prompt_token_ids": [5]}],
)
def test_a_server_that_continues_another_text_is_refused(change: dict[str, object]) -> None:
    device = opened_device()
    device.on_gone()
    with pytest.raises(MessageError, match="cannot continue this text"):
        device.on_opened(opening().model_copy(update=change))
