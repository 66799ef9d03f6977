"""Greedy equality: the decoder's tokens beside those of the target's own `generate()`."""

from collections.abc import Sequence

from inference.decoder import SpeculativeDecoder
from inference.verify.records import Difference, GreedyCheck
from inference.verify.reference import Reference, Tokens, rounding


def check_greedy(
    decoder: SpeculativeDecoder, prompts: Sequence[list[int]], max_new_tokens: int
) -> GreedyCheck:
    """Compare greedy continuations token by token.

    After a first difference two continuations have nothing in common, so only it is judged: by the
    target's own logits of the two tokens there.

    Raises:
        PromptError: a prompt cannot be continued by so many tokens.
    """
    differences: list[Difference] = []
    tokens = drafted = 0
    for number, prompt_ids in enumerate(prompts, start=1):
        output = decoder.generate(prompt_ids, temperature=0.0, max_new_tokens=max_new_tokens)
        reference = Reference(decoder.target.model, prompt_ids)
        expected, got = reference.greedy(max_new_tokens), tuple(output.new_token_ids)
        equal = _common_length(expected, got)
        tokens += equal
        drafted += sum(depth > 0 for depth in output.depths)
        if expected != got:
            differences.append(_judge(reference, expected, got, number))
    return GreedyCheck(
        prompts=len(prompts), tokens=tokens, drafted=drafted, differences=tuple(differences)
    )


def _common_length(expected: Tokens, got: Tokens) -> int:
    pairs = enumerate(zip(expected, got, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(expected), len(got)))


def _judge(reference: Reference, expected: Tokens, got: Tokens, number: int) -> Difference:
    place = _common_length(expected, got)
    gap, rounded = None, 0.0
    if place < min(len(expected), len(got)):
        scores = reference.greedy_scores(expected[:place])
        pair = [float(scores[expected[place]]), float(scores[got[place]])]
        gap, rounded = abs(pair[0] - pair[1]), rounding(reference.model.dtype, pair)
    return Difference(
        prompt=number,
        position=place + 1,
        target_token=expected[place] if place < len(expected) else None,
        decoder_token=got[place] if place < len(got) else None,
        gap=gap,
        rounding=rounded,
    )
