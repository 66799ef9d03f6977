"""Trained drafters write on without a connection, from the memory that has arrived."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bad_network import LOST, PASSED, bad_network
from helpers.chi_square import p_value, probs_of_continuations
from helpers.remote import opening
from helpers.serving import drafter_apart, running, trained_decoder
from transformers import LogitsProcessorList

from inference import SpeculativeDecoder
from inference.device import RemoteDecoder
from inference.device.drafting import DeviceDrafting
from inference.device.offline_text import (
    AloneWriter,
    OfflineOutput,
    OfflineWriting,
)
from inference.drafters.trained.memory import row_format
from inference.engine.context import Context
from inference.remote.memory_rows import RowFormat
from inference.remote.messages import OpenSession, TreeLimits
from inference.sampling.integer_distribution import TOTAL
from inference.sampling.options import Sampling
from jakiro.target.step import chain_step

PROMPT = [5, 6, 7, 5, 6, 7, 5]
NOW = OfflineWriting(after_seconds=0.0)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 3}
KINDS: dict[str, dict[str, Any]] = {
    "moa": {},
    "feedback": {"trunk": {"kind": "feedback", "fusion_layers": (0, 2)}},
}


def _written(
    decoder: SpeculativeDecoder, url: str, prompt: Sequence[int] = PROMPT, **options: Any
) -> OfflineOutput:
    with RemoteDecoder(url, drafter_apart(decoder), offline=NOW) as remote:
        output = remote.generate(prompt, **options)
    assert isinstance(output, OfflineOutput)
    counts = output.provisional
    assert output.is_verified
    assert counts.num_written == counts.num_kept + counts.num_retracted
    return output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moa", "feedback"])
def test_sampled_text_follows_the_targets_distribution(kind: str) -> None:
    decoder = trained_decoder(**KINDS[kind])
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
    drafter = drafter_apart(decoder)
    rows = row_format(drafter.model, "float32", "exact")
    request = OpenSession(prompt=PROMPT, seed=3, max_tokens=400)
    changes = {"samples": samples, "limits": TreeLimits()}
    drafting = DeviceDrafting(drafter, request, opening().model_copy(update=changes), rows)
    drafting.add_rows(_rows(decoder, rows)[:num_rows])
    return drafting


@torch.inference_mode()
def _rows(decoder: SpeculativeDecoder, rows: RowFormat) -> np.ndarray:
    """Return the rows of memory of the prompt."""
    drafter = drafter_apart(decoder)
    context = Context(decoder.target, drafter, Sampling(LogitsProcessorList(), False), 1, 400)
    output = decoder.target.forward(chain_step(torch.tensor([PROMPT]), start=0), context.cache)
    return rows.encode(drafter.encode_memory(output).tensors)


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
    found = _tokens(drafting, 80)  # more than the largest tree has
    assert len(found) == 80
    assert drafting.tree(PROMPT, 1).token_ids == tree
    assert _tokens(drafting, 80) == found
    if samples:
        assert _tokens(drafting, 80, attempt=2) != found
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
