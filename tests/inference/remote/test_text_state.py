"""Devices repeat the same bytes until their verdict arrives, and servers decide each step once."""

import pytest
from helpers.remote import mixed, opened_device, opening, sequence_tree, tensors

from inference.draft_tree import ROOT
from inference.remote.messages import ChatMessage, MessageError, OpenSession, Progress, Verdict
from inference.remote.text_state import ClientSession, VerdictLog
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
    assert device.text == "xy"


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


def _refused(verdicts: VerdictLog, step: int, digest: str) -> str:
    """Return the code of a refusal, which must not change the log."""
    before = dict(vars(verdicts))
    with pytest.raises(MessageError) as found:
        verdicts.verdict_of(step, digest)
    assert vars(verdicts) == before
    assert found.value.status == 409
    return found.value.code


def test_a_step_is_decided_once_and_its_verdict_is_kept_until_the_next_one() -> None:
    verdicts = VerdictLog()
    assert verdicts.verdict_of(1, "a") is None
    verdicts.store("a", b"first")
    assert _refused(verdicts, 1, "b") == "step_conflict"
    for step in (-1, 0, 3):
        assert _refused(verdicts, step, "a") == "out_of_order"
    assert verdicts.verdict_of(2, "c") is None
    assert verdicts.verdict_of(1, "a") == b"first"
    verdicts.store("c", b"second")
    assert _refused(verdicts, 1, "a") == "out_of_order"
    assert verdicts.verdict_of(2, "c") == b"second"


def test_a_finished_text_takes_no_more_trees_but_repeats_its_verdict() -> None:
    verdicts = VerdictLog(next_step=5)
    verdicts.store("a", b"last", is_finished=True)
    assert _refused(verdicts, 6, "b") == "session_finished"
    assert verdicts.verdict_of(5, "a") == b"last"
