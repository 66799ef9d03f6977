"""Verification of a decoder against its target: greedy tokens, then sampled distributions."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

from inference.autotune.tau_watch import TauWatch
from inference.decoder import SpeculativeDecoder
from inference.engine.policy import AlwaysDraft
from inference.generation.prompts import Prompt, encode_prompt
from inference.losslessness.records import (
    DISTRIBUTION_TESTS,
    FALSE_ALARM,
    Check,
    GreedyCheck,
    GreedyDifference,
    VerifyReport,
    VerifySettings,
)
from inference.losslessness.reference import Reference, Tokens, rounding
from inference.losslessness.sampled import check_sampled
from jakiro.errors import PromptError
from jakiro.utils.dtype_names import dtype_name
from jakiro.utils.progress import Track, untracked
from jakiro.utils.sequences import common_length


def check_greedy(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    track: Track = untracked,
) -> GreedyCheck:
    """Compare the decoder's greedy continuations with the target's own, token by token.

    After their first difference, two continuations cannot be compared any further. For the first
    difference, the target's logits of the two tokens show whether rounding alone can explain it.
    """
    differences: list[GreedyDifference] = []
    tokens = drafted = same_without_drafts = 0
    undrafted = _without_drafts(decoder)
    advance = track("greedy texts", len(prompts))
    for number, prompt_ids in enumerate(prompts, start=1):
        greedy: dict[str, Any] = {
            "temperature": 0.0,
            "max_new_tokens": max_new_tokens,
            "stop_strings": None,
        }
        output = decoder.generate(prompt_ids, **greedy)
        own = undrafted.generate(prompt_ids, **greedy)
        same_without_drafts += output.new_token_ids == own.new_token_ids
        reference = Reference(decoder.target.model, prompt_ids)
        expected, got = reference.greedy(max_new_tokens), tuple(output.new_token_ids)
        equal = common_length(expected, got)
        tokens += equal
        drafted += sum(depth > 0 for depth in output.depths)
        if expected != got:
            differences.append(_difference(reference, expected, got, number))
        advance()
    return GreedyCheck(
        prompts=len(prompts),
        tokens=tokens,
        drafted=drafted,
        same_without_drafts=same_without_drafts,
        batch_invariant=decoder.target.modules.is_batch_invariant,
        differences=tuple(differences),
    )


def _without_drafts(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """Return a decoder with the same target that drafts nothing."""
    undrafted = copy(decoder)
    undrafted.drafter, undrafted.policy = None, AlwaysDraft(None)
    undrafted._watch = TauWatch(None)
    return undrafted


def _difference(
    reference: Reference, expected: Tokens, got: Tokens, number: int
) -> GreedyDifference:
    index = common_length(expected, got)
    gap, rounded = None, 0.0
    if index < min(len(expected), len(got)):
        scores = reference.greedy_scores(expected[:index])
        pair = [float(scores[expected[index]]), float(scores[got[index]])]
        gap, rounded = abs(pair[0] - pair[1]), rounding(reference.model.dtype, pair)
    return GreedyDifference(
        prompt=number,
        position=index + 1,
        target_token=expected[index] if index < len(expected) else None,
        decoder_token=got[index] if index < len(got) else None,
        gap=gap,
        rounding=rounded,
    )


def verify_losslessness(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Prompt],
    settings: VerifySettings | None = None,
    on_check: Callable[[Check], None] | None = None,
    track: Track = untracked,
) -> VerifyReport:
    """Return a report on whether a decoder's greedy and sampled output agrees with its target's.

    In half precision, logits depend on the order of summation, which differs between batch shapes,
    even without a drafter. Two groups of tokens are therefore counted separately: greedy tokens
    that differ only because two logits are nearly equal (near-ties), and sampled tokens at the
    threshold of top-p. Sampled output is tested against the target's exact distribution, with the
    same thresholds in any precision. In single precision, no greedy difference is tolerated.
    """
    settings = settings or VerifySettings()
    if not prompts:
        raise PromptError(
            "there are no prompts to verify with", expected="at least one prompt", got=0
        )
    checks: list[Check] = []
    encoded = _encoded(decoder, prompts[: settings.num_prompts])
    for check in _checks(decoder, encoded, settings, track):
        checks.append(check)
        if on_check is not None:
            on_check(check)
    model = decoder.target.model
    return VerifyReport(
        target=model.name_or_path,
        dtype=dtype_name(model.dtype),
        gguf_sha256=decoder.target.spec.gguf_sha256,
        settings=settings,
        checks=tuple(checks),
    )


def _checks(
    decoder: SpeculativeDecoder, prompts: list[list[int]], settings: VerifySettings, track: Track
) -> Iterator[Check]:
    yield check_greedy(decoder, prompts, settings.max_new_tokens, track)
    sampled = prompts[: settings.sampled_prompts]
    for number, prompt_ids in enumerate(sampled, start=1):
        threshold = FALSE_ALARM / (DISTRIBUTION_TESTS * len(sampled))
        advance = track(f"samples of prompt {number}", settings.samples)
        yield from check_sampled(decoder, prompt_ids, settings, number, threshold, advance)


def _encoded(decoder: SpeculativeDecoder, prompts: Sequence[Prompt]) -> list[list[int]]:
    vocab_size = decoder.target.spec.vocab_size
    return [encode_prompt(prompt, decoder.tokenizer, vocab_size) for prompt in prompts]
