"""Verification of a decoder against its target: greedy tokens, then sampled distributions."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import torch

from inference.decoder import SpeculativeDecoder
from inference.engine.policy import AlwaysDraft
from inference.generation.prompts import Prompt, encode_prompt
from inference.losslessness.records import (
    Check,
    Difference,
    VerifySettings,
    count_differences,
)
from inference.losslessness.reference import Reference, Tokens
from inference.losslessness.sampled import compare_samples
from jakiro.utils.progress import Track, untracked
from jakiro.utils.token_text import common_length
from jakiro.utils.wording import counted


def verify_losslessness(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Prompt],
    settings: VerifySettings | None = None,
    track: Track = untracked,
) -> Iterator[Check]:
    """Yield checks that a decoder's greedy and sampled output agrees with its target's.

    In half precision, logits depend on the order of summation, which differs between batch shapes,
    even without a drafter. Two groups of tokens are therefore counted separately: greedy tokens
    that differ only because two logits are nearly equal (near-ties), and sampled tokens at the
    threshold of top-p. Sampled output is tested against the target's exact distribution, with the
    same thresholds in any precision. In single precision, no greedy difference is tolerated.
    """
    settings = settings or VerifySettings()
    encoded = [
        encode_prompt(prompt, decoder.tokenizer, decoder.target.spec.vocab_size)
        for prompt in prompts[: settings.num_prompts]
    ]
    yield check_greedy(decoder, encoded, settings.max_new_tokens, track)
    for number, prompt_ids in enumerate(encoded[: settings.sampled_prompts], start=1):
        advance = track(f"samples of prompt {number}", settings.samples)
        yield from check_sampled(decoder, prompt_ids, settings, number, advance)


def check_greedy(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    track: Track = untracked,
) -> Check:
    """Compare the decoder's greedy continuations with the target's own, token by token.

    After their first difference, two continuations cannot be compared any further. For the first
    difference, the target's logits of the two tokens show whether rounding alone can explain it.
    A batch-invariant target must give the same texts with and without drafts, even at near-ties.
    """
    differences: list[Difference] = []
    tokens = drafted = same_without_drafts = 0
    undrafted = _without_drafts(decoder)
    greedy: dict[str, Any] = {"temperature": 0.0, "stop_strings": None}
    greedy["max_new_tokens"] = max_new_tokens
    advance = track("greedy texts", len(prompts))
    for number, prompt_ids in enumerate(prompts, start=1):
        output = decoder.generate(prompt_ids, **greedy)
        plain = undrafted.generate(prompt_ids, **greedy)
        same_without_drafts += output.new_token_ids == plain.new_token_ids
        reference = Reference(decoder.target.model, prompt_ids)
        expected, got = reference.greedy(max_new_tokens), tuple(output.new_token_ids)
        tokens += common_length(expected, got)
        drafted += sum(depth > 0 for depth in output.depths)
        if expected != got:
            differences.append(_difference(reference, expected, got, number))
        advance()
    invariant = decoder.target.modules.is_batch_invariant
    same_as_target = len(prompts) - len(differences)
    return Check(
        name="greedy equality",
        passed=all(one.is_near_tie for one in differences)
        and not (invariant and same_without_drafts < len(prompts)),
        drafted=drafted,
        differences=tuple(differences),
        line=f"{counted(len(prompts), 'prompt')}, {tokens} tokens equal, "
        f"{counted(drafted, 'accepted draft')}; "
        f"{count_differences(differences)}; texts equal to those of generate(): "
        f"{same_as_target}, to those without drafts: {same_without_drafts}"
        + ("" if invariant or decoder.target.dtype.itemsize > 2 else " (rounding may differ)"),
        prompts=len(prompts),
        tokens=tokens,
        same_without_drafts=same_without_drafts,
        same_as_target=same_as_target,
        batch_invariant=invariant,
    )


def _without_drafts(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """Return a decoder with the same target that drafts nothing."""
    undrafted = copy(decoder)
    undrafted.drafter, undrafted.policy = None, AlwaysDraft(None)
    return undrafted


def _difference(reference: Reference, expected: Tokens, got: Tokens, number: int) -> Difference:
    index = common_length(expected, got)
    target, other = (tokens[index] if index < len(tokens) else None for tokens in (expected, got))
    gap, rounding = reference.gap(expected[:index], target, other)
    return Difference(
        prompt=number,
        position=index + 1,
        target_token=target,
        decoder_token=other,
        gap=gap,
        rounding=rounding,
    )


def check_sampled(
    decoder: SpeculativeDecoder,
    prompt_ids: list[int],
    settings: VerifySettings,
    number: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> tuple[Check, Check, Check]:
    """Compare sampled continuations of a prompt with the target's distribution."""
    samples = sample_continuations(decoder, prompt_ids, settings, advance)
    return compare_samples(
        Reference(decoder.target.model, prompt_ids, settings.sampling),
        [tokens for tokens, _ in samples],
        sample_length(decoder, settings),
        sum(drafted for _, drafted in samples),
        number,
        settings,
    )


def sample_continuations(
    decoder: SpeculativeDecoder,
    prompt_ids: list[int],
    settings: VerifySettings,
    advance: Callable[[], None] = lambda: None,
) -> list[tuple[Tokens, int]]:
    """Sample independent continuations, each with a different seed.

    Returns:
        For each continuation, its tokens and the number of accepted drafts among them.
    """
    length = sample_length(decoder, settings)
    samples = []
    for index in range(settings.samples):
        # With an explicit seed, `tree="auto"` would draft trees of a single size.
        with torch.random.fork_rng(devices=[]):
            # Not `torch.manual_seed`, which would also change the generators of all GPUs.
            torch.default_generator.manual_seed(settings.seed * settings.samples + index)
            output = decoder.generate(
                prompt_ids, max_new_tokens=length, stop_strings=None, **settings.sampling
            )
        drafted = sum(depth > 0 for depth in output.depths)
        samples.append((tuple(output.new_token_ids), drafted))
        advance()
    return samples


def sample_length(decoder: SpeculativeDecoder, settings: VerifySettings) -> int:
    """Return the number of tokens of a sample.

    By default, a sample has room for a root, the longest path of a draft tree, and a bonus token.
    """
    if settings.sample_length is not None:
        return settings.sample_length
    return 2 + (decoder.drafter.max_depth if decoder.drafter is not None else 1)
