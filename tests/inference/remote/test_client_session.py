"""The device repeats the same bytes until their verdict arrives, and goes on after a crash."""

import pytest
from helpers.remote import mixed, opened_device, opening, sequence_tree, tensors

from inference.draft_tree import ROOT
from inference.remote.client_session import ClientSession, Done, Draft, Fetch, Open, Send
from inference.remote.errors import MessageError
from inference.remote.messages import (
    ChatMessage,
    MemoryRequest,
    OpenSession,
    Progress,
    Verdict,
)
from inference.remote.step_frame import SubmittedTree, encode_step

REQUEST = OpenSession(prompt="a prompt", seed=3, max_tokens=9)
TREE = encode_step(1, 1, sequence_tree(mixed()))
OTHER = encode_step(1, 1, sequence_tree(tensors([4], [ROOT])))


def _verdict(tree: SubmittedTree, step: int = 1, finished: bool = False) -> Verdict:
    return Verdict(
        step=step,
        digest=tree.digest,
        emitted=[3, 4],
        num_accepted=1,
        text="xy",
        finished=finished,
    )


def _submitted() -> ClientSession:
    device = opened_device()
    device.submit(TREE)
    return device


def test_a_session_begins_with_the_request() -> None:
    assert ClientSession(REQUEST).action == Open(REQUEST)


def test_an_opened_session_drafts_below_the_last_token() -> None:
    assert opened_device().action == Draft(1, [0, 1])


def test_the_same_bytes_are_sent_until_their_verdict_arrives() -> None:
    device = _submitted()
    assert device.action == device.action == Send("a", 1, TREE.body)
    assert device.on_verdict(_verdict(TREE)) == [3, 4]
    assert device.action == Draft(2, [0, 1, 3, 4])
    assert device.text == "xy"


def test_a_verdict_that_arrives_twice_counts_once() -> None:
    device = _submitted()
    device.on_verdict(_verdict(TREE))
    assert device.on_verdict(_verdict(TREE)) == []
    assert device.emitted == [1, 3, 4]


@pytest.mark.parametrize("verdict", [_verdict(OTHER), _verdict(TREE, step=2)])
def test_the_verdict_of_another_tree_is_refused(verdict: Verdict) -> None:
    device = _submitted()
    with pytest.raises(MessageError, match="another tree"):
        device.on_verdict(verdict)
    assert device.action == Send("a", 1, TREE.body)


def test_a_verdict_without_a_submitted_tree_is_refused() -> None:
    with pytest.raises(MessageError, match="another tree"):
        opened_device().on_verdict(_verdict(TREE))


def test_a_lost_session_is_opened_again_and_the_tree_stays_binding() -> None:
    device = _submitted()
    device.on_verdict(_verdict(TREE))
    device.submit(OTHER)
    device.on_gone()
    action = device.action
    assert isinstance(action, Open)
    assert action.request.prompt == [0]
    assert action.request.seed == device.request.seed
    assert action.request.resume == Progress(emitted=[1, 3, 4], next_step=2)
    again = opening((0, 1), next_step=2).model_copy(
        update={"session": "b", "emitted": [1, 3, 4], "text": "xy"}
    )
    device.on_opened(again)
    assert device.action == Send("b", 2, OTHER.body)
    assert device.num_resumes == 1


def test_an_answer_to_messages_is_continued_as_one() -> None:
    messages = [ChatMessage(role="user", content="a question")]
    device = ClientSession(REQUEST.model_copy(update={"prompt": messages}))
    device.on_opened(opening((0, 1)))
    device.on_gone()
    action = device.action
    assert isinstance(action, Open)
    assert action.request.resume == Progress(emitted=[1], next_step=1, is_answer=True)


@pytest.mark.parametrize(
    "change",
    [{"fingerprint": "other"}, {"next_step": 2}, {"emitted": [2]}, {"prompt_token_ids": [5]}],
)
def test_a_server_that_continues_another_text_is_refused(change: dict[str, object]) -> None:
    device = _submitted()
    device.on_gone()
    with pytest.raises(MessageError, match="cannot continue this text"):
        device.on_opened(opening().model_copy(update=change))


def test_a_complete_text_ends_the_session() -> None:
    device = _submitted()
    device.on_verdict(_verdict(TREE, finished=True))
    assert device.action == Done("a")


def _with_memory(prefix: tuple[int, ...] = (0, 5, 6, 7, 1), max_rows: int = 3) -> ClientSession:
    """Return a session whose drafter reads a memory, after it was opened."""
    memory = MemoryRequest(encoder="a", encoding="exact")
    request = OpenSession(prompt=list(prefix[:-1]), seed=0, max_tokens=9, memory=memory)
    device = ClientSession(request, max_rows)
    device.on_opened(opening(prefix))
    return device


def test_memory_is_fetched_in_parts_before_a_tree_is_drafted() -> None:
    device = _with_memory()
    assert device.action == device.action == Fetch("a", 0, 3)
    assert device.on_rows(0, 3)
    assert device.action == Fetch("a", 3, 4)
    assert device.on_rows(3, 1)
    assert device.action == Draft(1, [0, 5, 6, 7, 1])


def test_rows_count_once_and_in_their_order() -> None:
    device = _with_memory()
    assert not device.on_rows(1, 2)
    assert device.on_rows(0, 3)
    assert not device.on_rows(0, 3)
    assert device.num_rows == 3
    with pytest.raises(MessageError, match="memory of more tokens than it has verified"):
        device.on_rows(3, 2)


def test_missing_rows_of_a_verdict_are_fetched() -> None:
    device = _with_memory(max_rows=9)
    device.on_rows(0, 4)
    tree = encode_step(4, 1, sequence_tree(mixed()))
    device.submit(tree)
    device.on_verdict(_verdict(tree))
    assert device.action == Fetch("a", 4, 6)
    assert device.on_rows(4, 1)  # of the root alone
    assert device.action == Fetch("a", 5, 6)
    device.on_rows(5, 1)
    assert device.action == Draft(2, [0, 5, 6, 7, 1, 3, 4])


def test_memory_stays_known_if_the_session_is_lost() -> None:
    device = _with_memory()
    device.on_rows(0, 3)
    device.on_gone()
    assert isinstance(device.action, Open)
    device.on_opened(opening((0, 5, 6, 7, 1)))
    assert device.action == Fetch("a", 3, 4)
