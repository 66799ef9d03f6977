"""Tiny decoders, and checks that a decoder's output is lossless, for any drafter."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from helpers.chi_square import p_value, probs_of_continuations
from helpers.models import tiny_drafter, tiny_llama
from transformers import PreTrainedModel

from inference import SpeculativeDecoder
from inference.conversation import Conversation
from inference.engine.stats import DecodeStats
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter

SAMPLES, LENGTH = 1000, 3
LEAST_P_VALUE = 0.0005
SHAPES = {
    "deterministic": TreeShape(children=3, breadth=2, num_nodes=7),
    "sampled": TreeShape(children=2, breadth=1, sampled=True),
}


def tiny_decoder(
    shape: TreeShape = SHAPES["sampled"],
    kind: type[SpeculativeDecoder] = SpeculativeDecoder,
    **model: Any,
) -> SpeculativeDecoder:
    """Return a decoder with a tiny trained drafter."""
    target = tiny_llama(**{"vocab": 7, **model})
    return kind(target, tiny_drafter(TargetAdapter(target)), tree=shape)


def greedy_by_transformers(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Return the prompt, continued by `count` greedy tokens of the model's own `generate()`."""
    ids = torch.tensor([list(prompt)])
    greedy = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    tokens: list[int] = model.generate(ids, max_new_tokens=count, **greedy)[0].tolist()
    return tokens


def assert_follows_distribution(
    decoder: SpeculativeDecoder,
    model: PreTrainedModel,
    temperature: float,
    samples: int = SAMPLES,
    batch: int = SAMPLES // 2,
    length: int = LENGTH,
    is_seeded: bool = True,
) -> DecodeStats:
    """Check sampled sequences against the target's distribution; return the decoding statistics."""
    prompt, sampling = [1, 2, 1, 2, 1], {"temperature": temperature, "top_p": 0.9}
    outputs = [
        output
        for seed in range(samples // batch)
        for output in decoder.generate_batch(
            [prompt] * batch,
            seed=seed if is_seeded else None,
            max_new_tokens=length,
            **sampling,
        )
    ]
    counts = Counter(tuple(output.new_token_ids) for output in outputs)
    probs = probs_of_continuations(model, prompt, length, **sampling)
    assert set(counts) <= set(probs)
    assert p_value(counts, probs) > LEAST_P_VALUE
    return DecodeStats.pooled(output.stats for output in outputs)


def assert_conversation_goes_on(decoder: SpeculativeDecoder, model: PreTrainedModel) -> None:
    """Check greedy tokens when a conversation is continued and when it is replaced by another."""
    with Conversation() as conversation:
        first = decoder.generate([1, 2, 3], max_new_tokens=9, conversation=conversation)
        longer = [*first.sequences[0].tolist(), 5, 5]
        second = decoder.generate(longer, max_new_tokens=30, conversation=conversation)
        other = decoder.generate([1, 2, 4], max_new_tokens=9, conversation=conversation)
    assert second.sequences[0].tolist() == greedy_by_transformers(model, longer, 30)
    assert other.sequences[0].tolist() == greedy_by_transformers(model, [1, 2, 4], 9)
