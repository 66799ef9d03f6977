"""Trained drafters write on without a connection, from the memory that has arrived."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from helpers.bad_network import LOST, PASSED, bad_network
from helpers.chi_square import p_value, probs_of_continuations
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.remote import opening
from helpers.serving import Running, running
from helpers.tokenizers import tiny_tokenizer
from transformers import LogitsProcessorList

from inference import SpeculativeDecoder
from inference.device import RemoteDecoder
from inference.device.drafting import DeviceDrafting
from inference.device.offline_text import OfflineOutput, OfflineWriting
from inference.device.provisional import AloneWriter, ProvisionalToken
from inference.device.text import RemoteStep
from inference.draft_tree import DraftTree, SequenceTree
from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.memory import row_format
from inference.engine.context import Context
from inference.remote.client_session import ClientSession
from inference.remote.integer_distribution import TOTAL
from inference.remote.memory_rows import RowFormat
from inference.remote.messages import OpenSession, TreeLimits
from inference.sampling.options import Sampling
from jakiro.errors import ResourceError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.step import chain_step

PROMPT = [5, 6, 7, 5, 6, 7, 5]
NOW = OfflineWriting(after_seconds=0.0)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 3}
KINDS: dict[str, dict[str, Any]] = {
    "moa": {},
    "feedback": {"trunk": {"kind": "feedback", "fusion_layers": (0, 2)}},
    "hybrid": {"trunk": {"kind": "hybrid"}},
}


def _decoder(kind: str) -> SpeculativeDecoder:
    """Return the decoder of a server, with trees of a fixed size."""
    tokenizer = tiny_tokenizer(None)
    target = TargetAdapter(tiny_llama(vocab=len(tokenizer), max_position_embeddings=512))
    drafter = tiny_drafter(target, tiny_settings(**KINDS[kind]))
    return SpeculativeDecoder(target.model, drafter, tokenizer, tree="fixed")


def _device_drafter(decoder: SpeculativeDecoder) -> TrainedDrafter:
    assert isinstance(decoder.drafter, TrainedDrafter)
    return TrainedDrafter.for_target(decoder.drafter.model, decoder.target)


@pytest.fixture(scope="module")
def moa() -> SpeculativeDecoder:
    return _decoder("moa")


@pytest.fixture(scope="module")
def moa_server(moa: SpeculativeDecoder) -> Iterator[Running]:
    with running(moa, remote_sessions=8) as found:
        yield found


def _written(
    decoder: SpeculativeDecoder, url: str, prompt: Sequence[int] = PROMPT, **options: Any
) -> OfflineOutput:
    with RemoteDecoder(url, _device_drafter(decoder), offline=NOW) as remote:
        output = remote.generate(prompt, **options)
    assert isinstance(output, OfflineOutput)
    counts = output.provisional
    assert output.is_verified
    assert counts.num_written == counts.num_kept + counts.num_retracted
    return output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moa", "feedback"])
def test_sampled_text_follows_the_targets_distribution(kind: str) -> None:
    decoder = _decoder(kind)
    probs = probs_of_continuations(decoder.target.model, PROMPT, 4, **SAMPLED)
    found: Counter[tuple[int, ...]] = Counter()
    kept = 0
    with running(decoder, remote_sessions=2) as server:
        for seed in range(500):
            with bad_network(
                server.root, lambda number, _: LOST if number in (3, 4) else PASSED
            ) as network:
                output = _written(decoder, network.url, seed=seed, max_new_tokens=4, **SAMPLED)
            found[tuple(output.new_token_ids)] += 1
            kept += output.provisional.num_kept
    assert p_value(found, probs) > 0.001
    assert kept > 0


def _drafting(decoder: SpeculativeDecoder, num_rows: int, samples: bool) -> DeviceDrafting:
    """Return the drafter's side of a text, with the memory of the first tokens."""
    drafter = _device_drafter(decoder)
    rows = row_format(drafter.model, "float32", "exact")
    request = OpenSession(prompt=PROMPT, seed=3, max_tokens=400)
    changes = {"samples": samples, "limits": TreeLimits()}
    drafting = DeviceDrafting(drafter, request, opening().model_copy(update=changes), rows)
    drafting.add_rows(_rows(decoder, rows)[:num_rows])
    return drafting


@torch.inference_mode()
def _rows(decoder: SpeculativeDecoder, rows: RowFormat) -> np.ndarray:
    """Return the rows of memory of the prompt."""
    drafter = _device_drafter(decoder)
    context = Context(decoder.target, drafter, Sampling(LogitsProcessorList(), False), 1, 400)
    output = decoder.target.forward(chain_step(torch.tensor([PROMPT]), start=0), context.cache)
    return rows.encoded(drafter.encode_memory(output).tensors)


def _tokens(drafting: DeviceDrafting, count: int, attempt: int = 1) -> list[Any]:
    writer = AloneWriter(drafting, PROMPT, 2, attempt, count)
    tokens: list[Any] = []
    while len(tokens) < count:
        token = writer.next([own.token_id for own in tokens])
        if token is None:
            break
        tokens.append(token)
    writer.stop()
    return tokens


@pytest.mark.parametrize("samples", [False, True])
def test_nothing_is_left_of_what_was_written(moa: SpeculativeDecoder, samples: bool) -> None:
    drafting = _drafting(moa, len(PROMPT) - 1, samples)
    tree = drafting.tree(PROMPT, 1).token_ids
    found = _tokens(drafting, 200)  # more than the largest tree has
    assert len(found) == 200
    assert drafting.tree(PROMPT, 1).token_ids == tree
    assert _tokens(drafting, 200) == found
    if samples:
        assert _tokens(drafting, 200, attempt=2) != found
        for token in found:
            assert sum(token.weights) == TOTAL
            assert token.weights[token.ids.index(token.token_id)] > 0


def test_verified_tokens_without_memory_are_read_first(moa: SpeculativeDecoder) -> None:
    (found,) = _tokens(_drafting(moa, 4, True), 1)
    # The same tokens are provisional here, so the distribution after them must be the same.
    writer = AloneWriter(_drafting(moa, 4, True), PROMPT[:5], 2, 1, 10)
    assert found == writer.next(PROMPT[5:])
    (whole,) = _tokens(_drafting(moa, 6, True), 1)
    assert whole.weights != found.weights  # it reads more memory


@pytest.mark.parametrize(("prompt", "num_rows"), [(PROMPT, 0), (PROMPT * 40, 3)])
def test_nothing_is_written_without_the_memory_of_the_prompt(
    moa: SpeculativeDecoder, prompt: list[int], num_rows: int
) -> None:
    writer = AloneWriter(_drafting(moa, num_rows, False), prompt, 2, 1, 10)
    assert writer.next([]) is None
    writer.stop()


class _Knowing:
    """A writer that writes what the target would write.

    The first argument of a subclass is the whole text; the others are those of `AloneWriter`.
    """

    def __init__(self, text: list[int], _: Any, token_ids: list[int], *others: Any) -> None:
        self._rest = text[len(token_ids) :]

    def next(self, provisional: list[int]) -> ProvisionalToken | None:
        """Return the token after provisional ones."""
        rest = self._rest[len(provisional) :]
        return ProvisionalToken(rest[0]) if rest else None

    def stop(self) -> None:
        """Do nothing."""


def _nothing(_: DeviceDrafting, token_ids: list[int], step: int) -> SequenceTree:
    return DraftTree.empty(torch.tensor([len(token_ids) - 1]), step).sequence_tree()


@pytest.mark.slow
def test_what_is_left_after_a_verdict_is_continued_and_not_written_again(
    moa: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Memory never comes with a verdict, so it is fetched after each of them.
    monkeypatch.setattr("inference.serving.remote.verification_session.MAX_NEWEST_ROWS", 0)
    expected = moa.generate(PROMPT, **GREEDY).new_token_ids
    writer = partial(_Knowing, [*PROMPT, *expected])
    monkeypatch.setattr("inference.device.offline_text.AloneWriter", writer)
    monkeypatch.setattr(DeviceDrafting, "tree", _nothing)  # so that no guess is wrong
    verified, shown, left = list[int](), list[int](), list[int]()

    def on_step(step: RemoteStep) -> None:
        if step.is_verified:
            verified.extend(step.token_ids)
            left.append(len(shown) - len(step.token_ids))
            shown.clear()
        else:
            shown.extend(step.token_ids)
        text = verified + shown
        assert text == expected[: len(text)]

    asked = Counter[str]()

    def schedule(_: int, path: str) -> str:
        kind = path.partition("?")[0].rpartition("/")[2]  # a number, or memory
        asked[kind] += 1
        first = 2 if kind == "memory" else 1  # the memory of the prompt arrives at once
        return LOST if kind in ("1", "memory") and first <= asked[kind] < first + 9 else PASSED

    offline = OfflineWriting(after_seconds=0.2, max_tokens=5)
    with (
        running(moa, remote_sessions=2) as server,
        bad_network(server.root, schedule) as network,
        RemoteDecoder(network.url, _device_drafter(moa), offline=offline) as remote,
    ):
        output = remote.generate(PROMPT, on_step=on_step, **GREEDY)
    assert output.new_token_ids == expected
    assert left[1] == 4  # of five tokens, the verdict of an empty tree confirms one
    assert isinstance(output, OfflineOutput)
    assert output.provisional.num_retracted == 0


@pytest.mark.slow
@pytest.mark.parametrize("gone_at", [2, 3, 4, 5])
def test_nothing_is_submitted_while_the_drafter_writes(
    moa: SpeculativeDecoder, gone_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = list[AloneWriter]()

    class Counted(AloneWriter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            live.append(self)

        def stop(self) -> None:
            super().stop()
            live.remove(self)

    class Checked(ClientSession):
        def submit(self, tree: Any) -> None:
            assert not live
            super().submit(tree)

    monkeypatch.setattr("inference.device.offline_text.AloneWriter", Counted)
    monkeypatch.setattr("inference.device.text.ClientSession", Checked)
    monkeypatch.setattr("inference.device.text.MAX_ROWS", 4)
    monkeypatch.setattr("inference.serving.remote.verification_session.MAX_ROWS", 4)
    expected = moa.generate(PROMPT * 2, **GREEDY).new_token_ids
    with running(moa, remote_sessions=2) as server:

        def schedule(number: int, path: str) -> str:
            if number == gone_at:
                httpx2.delete(server.root + "/".join(path.split("/")[:5]))
            return PASSED

        with bad_network(server.root, schedule) as network:
            output = _written(moa, network.url, prompt=PROMPT * 2, **GREEDY)
    assert output.new_token_ids == expected
    assert output.traffic.num_resumes == 1
    assert not live


def test_memory_in_another_precision_than_at_first_is_named() -> None:
    drafting = _drafting(_decoder("moa"), 3, samples=False)
    with pytest.raises(ResourceError, match="connect again"):
        drafting.add_rows(np.zeros((1, 2), np.uint8))
