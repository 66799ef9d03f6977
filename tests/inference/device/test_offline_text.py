"""Text goes on without a connection, and what stays is the target's own text."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bad_network import LOST, PASSED, Schedule, bad_network
from helpers.chi_square import p_value, probs_of_continuations
from helpers.models import tiny_llama
from helpers.offline import InProcessLink
from helpers.quick import mostly_slow
from helpers.serving import Running, running
from helpers.tokenizers import tiny_tokenizer

from inference import SpeculativeDecoder
from inference.device import RemoteDecoder
from inference.device.offline_text import (
    OfflineOutput,
    OfflineText,
    OfflineWriting,
)
from inference.device.text import RemoteStep
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.protocol import Drafter
from inference.remote.messages import OpenSession
from jakiro.errors import ResourceError
from jakiro.target.ends import DESCRIPTION_FILE

PROMPT = [5, 6, 7, 5, 6, 7, 5]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24}
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_k": 3, "seed": 11, "max_new_tokens": 24}
NOW = OfflineWriting(after_seconds=0.0)
TREES = SmallLMSettings(depth=2, children=2, breadth=2)


@pytest.fixture(scope="module")
def good(decoder: SpeculativeDecoder) -> SmallLMDrafter:
    """A drafter that writes what the target would write."""
    model: Any = decoder.target.model
    return SmallLMDrafter(model, model, TREES)


@pytest.fixture(scope="module")
def bad(decoder: SpeculativeDecoder) -> SmallLMDrafter:
    """A drafter that writes other text."""
    model: Any = decoder.target.model
    vocab = model.config.vocab_size
    other = tiny_llama(vocab=vocab, seed=5, max_position_embeddings=512)
    return SmallLMDrafter(other, model, TREES)


@pytest.fixture(scope="module")
def similar(decoder: SpeculativeDecoder) -> SmallLMDrafter:
    """A drafter that often writes what the target might write."""
    model: Any = decoder.target.model
    other, generator = deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
    return SmallLMDrafter(other, model, TREES)


def _down(first: int, count: int, fault: str = LOST) -> Schedule:
    return lambda number, _: fault if first <= number < first + count else PASSED


def _written(
    server: Running, drafter: Drafter, schedule: Schedule, options: dict[str, Any]
) -> OfflineOutput:
    with (
        bad_network(server.root, schedule) as network,
        RemoteDecoder(network.url, drafter, offline=NOW) as remote,
    ):
        output = remote.generate(PROMPT, **options)
    assert isinstance(output, OfflineOutput)
    counts = output.provisional
    assert output.is_verified
    assert counts.num_written == counts.num_kept + counts.num_retracted
    return output


def test_provisional_steps_are_marked_and_replaced(
    decoder: SpeculativeDecoder, server: Running, bad: SmallLMDrafter
) -> None:
    offline = OfflineWriting(decoder.tokenizer, after_seconds=0.0, max_tokens=5)
    with (
        bad_network(server.root, _down(3, 8)) as network,
        RemoteDecoder(network.url, bad, offline=offline) as remote,
    ):
        steps = list(remote.steps(PROMPT, **GREEDY))
        pieces = list(remote.stream(PROMPT, **GREEDY))
    alone = decoder.generate(PROMPT, **GREEDY)
    verified = [step for step in steps if step.is_verified]
    assert [token for step in verified for token in step.token_ids] == alone.new_token_ids
    assert "".join(step.text for step in verified) == "".join(pieces) == alone.text
    provisional = [step for step in steps if not step.is_verified]
    assert 0 < _longest_run(steps) <= 5
    assert all(not step.finished and step.token_ids for step in provisional)
    assert any(step.text for step in provisional)


def _longest_run(steps: list[RemoteStep]) -> int:
    """Return the largest number of provisional tokens without a verified step between them."""
    longest = count = 0
    for step in steps:
        count = 0 if step.is_verified else count + len(step.token_ids)
        longest = max(longest, count)
    return longest


def test_a_text_whose_server_never_returns_ends_with_what_is_unverified(
    decoder: SpeculativeDecoder, server: Running, good: SmallLMDrafter
) -> None:
    offline = OfflineWriting(decoder.tokenizer, after_seconds=0.0, max_tokens=6)
    with (
        bad_network(server.root, _down(3, 10**6)) as network,
        RemoteDecoder(network.url, good, offline=offline, patience=0.3) as remote,
    ):
        output = remote.generate(PROMPT, **GREEDY)
    assert isinstance(output, OfflineOutput)
    assert not output.is_verified
    assert isinstance(output.error, ResourceError)
    expected = decoder.generate(PROMPT, **GREEDY).new_token_ids
    known = len(output.new_token_ids)
    unverified = output.provisional.unverified
    assert 0 < len(unverified) <= 6
    assert output.new_token_ids == expected[:known]
    assert unverified == expected[known : known + len(unverified)]  # the drafter is the target
    assert output.provisional.num_retracted == 0


def test_a_named_model_has_the_tokenizer_of_provisional_text(
    decoder: SpeculativeDecoder, tmp_path: Path
) -> None:
    assert decoder.tokenizer is not None
    decoder.tokenizer.save_pretrained(tmp_path)
    found = NOW.with_tokenizer_of(f"lm={tmp_path}").tokenizer
    assert found is not None
    assert found.get_vocab() == decoder.tokenizer.get_vocab()
    assert NOW.with_tokenizer_of("lookup") is NOW.with_tokenizer_of("none") is NOW
    (tmp_path / DESCRIPTION_FILE).touch()  # as in a folder of `jakiro export --to device`
    assert NOW.with_tokenizer_of(str(tmp_path)).tokenizer is not None
    own = OfflineWriting(decoder.tokenizer)
    assert own.with_tokenizer_of(f"lm={tmp_path}") is own


@contextmanager
def _ending_with(decoder: SpeculativeDecoder, token_id: int) -> Iterator[None]:
    """Let a token end texts in the block."""
    config: Any = decoder.target.model.generation_config
    before, config.eos_token_id = config.eos_token_id, token_id
    try:
        yield
    finally:
        config.eos_token_id = before


def _is_never_longer(
    server: Running, drafter: Drafter, schedule: Schedule, expected: Any, options: dict[str, Any]
) -> int:
    """Check that verified and provisional text end where the final text does."""
    tokenizer = tiny_tokenizer(None)
    offline = OfflineWriting(tokenizer, after_seconds=0.0)
    ids, text, known, num_provisional = [], "", ("", 0), 0
    with (
        bad_network(server.root, schedule) as network,
        RemoteDecoder(network.url, drafter, offline=offline) as remote,
    ):
        for step in remote.steps(PROMPT, **options):
            if step.is_verified:
                text, ids = text[: len(known[0])], ids[: known[1]]
            text, ids = text + step.text, [*ids, *step.token_ids]
            if step.is_verified:
                known = (text, len(ids))
            num_provisional += 0 if step.is_verified else len(step.token_ids)
            assert ids == expected.new_token_ids[: len(ids)]
            assert expected.text.startswith(text)
    assert (ids, text) == (expected.new_token_ids, expected.text)
    return num_provisional


@pytest.mark.parametrize("length", mostly_slow([4, 9], quick=[4]))
def test_provisional_text_ends_with_a_token_that_ends_texts(
    decoder: SpeculativeDecoder, good: SmallLMDrafter, length: int
) -> None:
    tokens = decoder.generate(PROMPT, **GREEDY).new_token_ids
    assert tokens.index(tokens[length - 1]) == length - 1
    with _ending_with(decoder, tokens[length - 1]), running(decoder, remote_sessions=2) as server:
        expected = decoder.generate(PROMPT, **GREEDY)
        assert len(expected.new_token_ids) == length
        found = [
            _is_never_longer(server, good, _down(first, 6), expected, GREEDY) for first in (2, 3)
        ]
    assert sum(found) > 0


@pytest.mark.parametrize("begin", mostly_slow([6, 11], quick=[6]))
def test_provisional_text_ends_before_a_stop_string(
    decoder: SpeculativeDecoder, server: Running, good: SmallLMDrafter, begin: int
) -> None:
    whole = decoder.generate(PROMPT, **GREEDY)
    stop = whole.text[begin : begin + 3]
    options = {**GREEDY, "stop": [stop]}
    with RemoteDecoder(server.url) as remote:
        expected = remote.generate(PROMPT, **options)
    assert expected.text == whole.text[: whole.text.index(stop)]
    assert len(expected.new_token_ids) < 24
    found = [_is_never_longer(server, good, _down(first, 6), expected, options) for first in (2, 3)]
    assert sum(found) > 0


@pytest.mark.parametrize("most", mostly_slow([3, 4, 5], quick=[4]))
def test_provisional_text_is_not_longer_than_was_requested(
    decoder: SpeculativeDecoder, server: Running, good: SmallLMDrafter, most: int
) -> None:
    options = {**GREEDY, "max_new_tokens": most}
    expected = decoder.generate(PROMPT, **options)
    assert _is_never_longer(server, good, _down(2, 6), expected, options) > 0


SMALL: dict[str, Any] = {"temperature": 1.3, "top_k": 3}


def _text_in_process(
    decoder: SpeculativeDecoder,
    drafter: SmallLMDrafter,
    seed: int,
    num_alone: int,
) -> OfflineOutput:
    """Return a text of four tokens, some of which are written alone in the first step."""
    request = OpenSession(prompt=PROMPT, seed=seed, max_tokens=4, **SMALL)
    own = InProcessLink(decoder)
    text = OfflineText(own, request, drafter, options=NOW)
    for _ in text.steps():  # verified steps are answered at once, and others after some tokens
        if text.counts.num_written >= num_alone:
            own.is_answering.set()
    return text.output()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["good", "similar"])
def test_sampled_text_follows_the_targets_distribution(
    decoder: SpeculativeDecoder, name: str, request: Any
) -> None:
    drafter = request.getfixturevalue(name)
    found: Counter[tuple[int, ...]] = Counter()
    kept = 0
    for seed in range(1200):
        output = _text_in_process(decoder, drafter, seed, num_alone=2)
        found[tuple(output.new_token_ids)] += 1
        kept += output.provisional.num_kept
    probs = probs_of_continuations(decoder.target.model, PROMPT, 4, **SMALL)
    assert p_value(found, probs) > 0.001
    assert kept > 0
