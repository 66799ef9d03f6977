"""The whole verification of a decoder."""

from collections.abc import Callable, Iterator, Sequence

from inference.decoder import SpeculativeDecoder
from inference.prompts import Prompt, encode_prompt
from inference.verify.greedy import check_greedy
from inference.verify.records import FALSE_ALARM, LAW_TESTS, Check, Verdict, VerifySettings
from inference.verify.sampled import check_sampled
from jakiro.errors import PromptError


def verify_losslessness(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Prompt],
    settings: VerifySettings | None = None,
    on_check: Callable[[Check], None] | None = None,
) -> Verdict:
    """Return whether a decoder generates what its target alone would, greedily and sampled.

    In half precision the order in which a batch is summed moves logits, also the target's own, so
    greedy near-ties and tokens at the cut of top-p are counted apart; the laws are compared exactly
    in any precision. Single precision allows nothing.

    Args:
        decoder: what is verified; its target alone is the reference.
        prompts: texts, lists of chat messages, or token ids.
        settings: how much and how; the defaults if None.
        on_check: told of each check when it is done.

    Raises:
        PromptError: there is no prompt, or one cannot be used or continued as asked.
    """
    settings = settings or VerifySettings()
    if not prompts:
        raise PromptError("there is nothing to verify on", expected="at least one prompt", got=0)
    checks: list[Check] = []
    for check in _checks(decoder, _encoded(decoder, prompts[: settings.num_prompts]), settings):
        checks.append(check)
        if on_check is not None:
            on_check(check)
    model = decoder.target.model
    return Verdict(
        target=model.name_or_path,
        dtype=str(model.dtype).removeprefix("torch."),
        settings=settings,
        checks=tuple(checks),
    )


def _checks(
    decoder: SpeculativeDecoder, prompts: list[list[int]], settings: VerifySettings
) -> Iterator[Check]:
    yield check_greedy(decoder, prompts, settings.max_new_tokens)
    sampled = prompts[: settings.sampled_prompts]
    for number, prompt_ids in enumerate(sampled, start=1):
        threshold = FALSE_ALARM / (LAW_TESTS * len(sampled))
        yield from check_sampled(decoder, prompt_ids, settings, number, threshold)


def _encoded(decoder: SpeculativeDecoder, prompts: Sequence[Prompt]) -> list[list[int]]:
    vocab_size = decoder.target.spec.vocab_size
    return [encode_prompt(prompt, decoder.tokenizer, vocab_size) for prompt in prompts]
