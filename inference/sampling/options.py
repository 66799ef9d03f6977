"""Sampling options: how a request's tokens are selected from distributions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from inference.sampling.grammar import GrammarProcessor
from inference.sampling.random_numbers import StreamKey
from jakiro.errors import RequestError
from jakiro.utils.devices import constants_on

# These processors never read the preceding tokens or wait for the device, so they may process many
# distributions at once, including draft distributions. Subclasses are excluded, because they may.
PREFIX_FREE = frozenset(
    {
        EpsilonLogitsWarper,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    }
)

# transformers applies these processors after the temperature.
AFTER_TEMPERATURE = PREFIX_FREE - {InfNanRemoveLogitsProcessor, TemperatureLogitsWarper}

MOST_SORTED = 256  # number of scores that are sorted; nuclei are rarely larger
NUCLEUS_ROUNDING = (
    1e-4  # far above the errors of sums of probabilities, which are about 1e-5 in float32
)


@dataclass(frozen=True)
class Sampling:
    """A request's sampling options: logits processors, sampling or greedy decoding, and seed."""

    processors: LogitsProcessorList
    do_sample: bool
    seed: int = 0
    batch_index: int = 0  # determines the random numbers, like the seed
    request_index: int = 0  # number of the request if requests are learned from, otherwise 0
    # Whether candidates are sampled from distributions of integer weights, which another machine
    # can read without any rounding, to verify the candidates.
    quantizes_drafts: bool = False

    @property
    def is_unprocessed_greedy(self) -> bool:
        """Whether the next token is simply the token with the largest raw logit."""
        return not self.do_sample and not self.processors

    @property
    def is_prefix_free(self) -> bool:
        """Whether all processors are known to ignore the preceding tokens."""
        return all(type(processor) in PREFIX_FREE for processor in self.processors)

    @property
    def grammar(self) -> GrammarProcessor | None:
        """The processor of the grammar that the text must follow; None without a grammar."""
        return next((one for one in self.processors if isinstance(one, GrammarProcessor)), None)

    @cached_property
    def description(self) -> tuple[bool, tuple[str, ...]]:
        """Whether tokens are sampled, and all processors, with settings if they ignore the prefix.

        If two requests have the same description and their processors ignore the prefix, then the
        processors of one request can process the distributions of the other.
        """
        return self.do_sample, tuple(map(_described, self.processors))

    @cached_property
    def form(self) -> tuple[bool, tuple[str, ...]]:
        """The `description` without temperatures.

        Distributions of requests with the same form are processed together.
        """
        names = (
            type(processor).__name__
            if type(processor) is TemperatureLogitsWarper
            else _described(processor)
            for processor in self._with_temperature
        )
        return self.do_sample, tuple(names)

    @property
    def temperatures(self) -> list[float]:
        """The temperature; none in greedy decoding, and several if a caller added some."""
        warpers = (
            processor
            for processor in self._with_temperature
            if type(processor) is TemperatureLogitsWarper
        )
        return [float(processor.temperature) for processor in warpers]

    @cached_property
    def _with_temperature(self) -> list[LogitsProcessor]:
        """All processors, with a temperature of 1, which changes nothing, if there was none."""
        processors = list(self.processors)
        if not self.do_sample or any(
            type(processor) is TemperatureLogitsWarper for processor in processors
        ):
            return processors
        later = (
            index
            for index, processor in enumerate(processors)
            if type(processor) in AFTER_TEMPERATURE
        )
        index = next(later, len(processors))
        return [*processors[:index], TemperatureLogitsWarper(1.0), *processors[index:]]

    def __str__(self) -> str:
        """Return the way in which tokens are selected, in words."""
        _, processors = self.description
        return ", ".join(("sampling" if self.do_sample else "greedy decoding", *processors))

    def processed_probs(self, logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        """Return probabilities after the processors, in float32 or higher precision.

        All processors must be prefix-free. In greedy decoding, each distribution is a point mass.
        """
        no_prefix = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
        return self.probs(self.processed(no_prefix, widened(logits)))

    def processed(
        self, prefix: Int[Tensor, "n tokens"], scores: Float[Tensor, "n vocab"]
    ) -> Float[Tensor, "n vocab"]:
        """Return the scores after all processors.

        Args:
            scores: logits, which may be overwritten.
        """
        with _blaming_processors():
            if not self.is_prefix_free:  # unknown processors may take further arguments
                processed: Tensor = self.processors(prefix, scores)  # type: ignore[arg-type]
                return processed
            for processor in self.processors:
                scores = _applied(processor, prefix, scores)
        return scores

    def probs(self, scores: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        """Return the probabilities that tokens are sampled from, given processed logits."""
        if self.do_sample:
            return scores.softmax(dim=-1)
        return torch.zeros_like(scores).scatter_(1, scores.argmax(dim=-1, keepdim=True), 1.0)

    @property
    def processes_drafts(self) -> bool:
        """Whether `processed_draft_of` changes draft distributions."""
        return self.do_sample and any(
            type(processor) in PREFIX_FREE for processor in self.processors
        )

    @property
    def warpers(self) -> list[LogitsProcessor]:
        """The processors that ignore the preceding tokens, with a temperature in sampling."""
        return [processor for processor in self._with_temperature if type(processor) in PREFIX_FREE]

    def stream_key(self, step_id: int) -> StreamKey:
        """Return the key of the request's random numbers in a decoding step."""
        return (self.seed, self.batch_index, self.request_index, step_id)


def processed_probs_of(
    samplings: Sequence[Sampling],
    logits: Float[Tensor, "n vocab"],
    temperatures: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "n vocab"]:
    """Return probabilities after the processors, as `Sampling.processed_probs` does."""
    first = samplings[0]
    if temperatures is None and all(
        sampling.description == first.description for sampling in samplings
    ):
        return first.processed_probs(logits)
    with _blaming_processors():
        return first.probs(_warped(samplings, widened(logits), temperatures))


def processed_draft_of(
    samplings: Sequence[Sampling],
    log_probs: Float[Tensor, "n vocab"],
    temperatures: Float[Tensor, " sequences"] | None = None,
) -> Float[Tensor, "n vocab"]:
    """Return draft distributions after the prefix-free processors, renormalized.

    `log_probs` are returned unchanged if there are no such processors, and in greedy decoding,
    where they only rank candidates. Otherwise, distributions that are not finite are not processed,
    because some processors would fail; all their tokens get probability 0.
    """
    if temperatures is None and not any(sampling.processes_drafts for sampling in samplings):
        return log_probs
    is_finite = log_probs.amax(dim=-1, keepdim=True).isfinite()
    processed = _warped(samplings, log_probs.where(is_finite, 0.0), temperatures)
    processed = processed.log_softmax(dim=-1).where(is_finite, -torch.inf)
    _, *others = samplings[0].warpers
    if temperatures is None and not others:
        temperatures = _differing([sampling.warpers[0] for sampling in samplings], log_probs)
    if temperatures is None or others:
        return processed
    # A temperature of 1 alone changes nothing: the request gets the same drafts as by itself.
    is_processed = (temperatures != 1)[:, None, None]
    by_sequence = (len(samplings), -1)
    kept = log_probs.unflatten(0, by_sequence)
    return torch.where(is_processed, processed.unflatten(0, by_sequence), kept).flatten(0, 1)


def _warped(samplings: Sequence[Sampling], scores: Tensor, temperatures: Tensor | None) -> Tensor:
    """Return scores, several for each sequence, after the prefix-free processors."""
    no_prefix = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)
    for alike in zip(*(sampling.warpers for sampling in samplings), strict=True):
        by_row = None
        if type(alike[0]) is TemperatureLogitsWarper:
            by_row = temperatures if temperatures is not None else _differing(alike, scores)
        if by_row is None:
            scores = _applied(alike[0], no_prefix, scores)
        else:
            by_row = by_row.to(scores.dtype)[:, None, None]
            scores = (scores.unflatten(0, (len(samplings), -1)) / by_row).flatten(0, 1)
    return scores


def _differing(
    warpers: Sequence[LogitsProcessor], scores: Tensor
) -> Float[Tensor, " sequences"] | None:
    """Return the temperatures of several sequences; None if all are the same."""
    temperatures = tuple(float(getattr(warper, "temperature", 1.0)) for warper in warpers)
    return (
        None
        if len(set(temperatures)) == 1
        else constants_on(scores.device, temperatures, scores.dtype)
    )


@contextmanager
def _blaming_processors() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise RequestError.caused_by("a logits processor", error) from error


def _described(processor: LogitsProcessor) -> str:
    """Return the type of a processor, with the exact settings of one that ignores the prefix."""
    name = type(processor).__name__
    if type(processor) not in PREFIX_FREE:
        return name
    settings = {
        key: value.tolist() if isinstance(value, Tensor) else value
        for key, value in vars(processor).items()
    }
    return f"{name}{sorted(settings.items())}"


def _applied(processor: LogitsProcessor, prefix: Tensor, scores: Tensor) -> Tensor:
    if type(processor) is TopPLogitsWarper and scores.device.type == "cpu":
        return filter_nucleus(processor, scores)
    processed: Tensor = processor(prefix, scores)
    return processed


def widened(logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """Return a copy of logits in float32 or higher precision, which processors may overwrite."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)


def filter_nucleus(
    warper: TopPLogitsWarper, scores: Float[Tensor, "n vocab"]
) -> Float[Tensor, "n vocab"]:
    """Return what `warper` returns for these scores, in a fraction of its time on a CPU.

    The warper sorts the whole vocabulary, whereas this function sorts only the largest scores. If
    these do not determine a row's nucleus with certainty, the warper itself filters the row: if the
    nucleus is larger, if the first excluded score equals the last included score, or if rounding
    could include or exclude a token.
    """
    if scores.shape[-1] <= MOST_SORTED or warper.min_tokens_to_keep >= MOST_SORTED:
        return warper(torch.empty(len(scores), 0, dtype=torch.long), scores)
    largest, tokens = scores.topk(MOST_SORTED, dim=-1)
    total = (scores - largest[:, :1]).exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    probs = (largest - largest[:, :1]).double().exp() / total
    before = probs.cumsum(dim=-1) - probs  # probability of all tokens with larger scores
    kept = before < warper.top_p
    kept[:, : warper.min_tokens_to_keep] = True
    filtered = torch.full_like(scores, warper.filter_value)
    filtered.scatter_(1, tokens, largest.where(kept, warper.filter_value))
    doubtful = ~_is_certain(largest, before, kept, warper.top_p)
    if bool(doubtful.any()):
        rows = scores[doubtful]
        filtered[doubtful] = warper(torch.empty(len(rows), 0, dtype=torch.long), rows)
    return filtered


def _is_certain(largest: Tensor, before: Tensor, kept: Tensor, top_p: float) -> Tensor:
    """Return whether each row's nucleus certainly ends among the largest scores."""
    is_last = kept[:, :-1] & ~kept[:, 1:]
    is_tied = largest[:, :-1] == largest[:, 1:]
    is_near = (before - top_p).abs() < NUCLEUS_ROUNDING
    is_sound = before.isfinite().all(dim=-1)
    is_unique = is_last.any(dim=-1) & ~(is_last & is_tied).any(dim=-1)
    return is_sound & is_unique & ~is_near.any(dim=-1)
