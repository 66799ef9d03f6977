"""The model of a server: its engine, its name, and its requests in the engine's terms."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import LogitsProcessorList

from inference.drafters.identity import identity_of
from inference.engine.request import Request
from inference.generation.prompts import Prompt, continued_tokens, encode_prompt, needed
from inference.serving.answers.details import DetailWriter
from inference.serving.api_error import ApiError
from inference.serving.scheduling.decoding_options import DecodingOptions, TokenPenalties
from inference.serving.scheduling.engine_thread import EngineThread
from inference.serving.scheduling.job import Job
from jakiro import __version__
from jakiro.errors import PromptError
from jakiro.utils.files import fingerprint


class LoadedModel:
    """The model of a server."""

    def __init__(self, engine: EngineThread, name: str | None = None) -> None:
        decoder = engine.decoder
        model: Any = decoder.target.model
        path = str(model.config.name_or_path).rstrip("/")
        self.engine = engine
        self.tokenizer = needed(decoder.tokenizer)
        self.name = name or path.rpartition("/")[2] or "target"
        self.created = int(time.time())
        names = decoder.drafter.proposer_names if decoder.drafter else ()
        self.details = DetailWriter(self.tokenizer, names)
        self.fingerprint = f"fp_{fingerprint(*_identity(engine))[:12]}"
        self._samples = bool(model.generation_config.do_sample)

    def __str__(self) -> str:
        """Return what a user should know when the model is ready."""
        seeds = self.engine.seed_obstacle or "the same seed gives the same text"
        return f"{self.name}: {seeds} ({self.fingerprint})"

    def lane_of(self, options: DecodingOptions) -> int:
        """Return the number of the lane of a request that has not been prepared yet."""
        lanes = self.engine.scheduler.lanes
        temperature, _ = options.selection(self._samples)
        samples = self._samples if temperature is None else temperature > 0
        kinds = [lane.sampling.do_sample for lane in lanes]
        return kinds.index(samples) if len(lanes) > 1 else 0

    def jobs_of(
        self, prompts: Sequence[Prompt], options: DecodingOptions, notify: Callable[[], object]
    ) -> list[Job]:
        """Return the jobs of a request, which have not been started.

        The choice with index i gets the random numbers of row i of a batch.
        """
        jobs: list[Job] = []
        try:
            for number, prompt in enumerate(prompts):
                first_row = number * options.choices
                jobs.append(self._job(prompt, options, first_row, notify))
        except BaseException:
            discard(jobs)
            raise
        return jobs

    def request_of(
        self, prompt: Prompt, options: DecodingOptions, *, is_answer: bool = False
    ) -> Request:
        """Return a request that is decoded outside the lanes.

        Its random numbers do not depend on other requests.

        Args:
            is_answer: whether the tokens of the prompt are those of chat messages.
        """
        token_ids, arguments = self._arguments(prompt, options)
        if is_answer:
            arguments["before"] = ()
        (request,), _ = self.engine.requests_of(token_ids, **arguments)
        return request

    def _job(
        self,
        prompt: Prompt,
        options: DecodingOptions,
        first_row: int,
        notify: Callable[[], object],
    ) -> Job:
        token_ids, arguments = self._arguments(prompt, options)
        return self.engine.prepare(
            token_ids,
            choices=options.choices,
            record=options.record,
            drafts=options.drafting,
            first_row=first_row,
            notify=notify,
            **arguments,
        )

    def _arguments(
        self, prompt: Prompt, options: DecodingOptions
    ) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens of a prompt, and arguments of the engine for it."""
        decoder = self.engine.decoder
        token_ids = encode_prompt(prompt, decoder.tokenizer, decoder.target.spec.vocab_size)
        temperature, others = options.selection(self._samples)
        return token_ids, {
            "temperature": temperature,
            "seed": options.seed % 2**63,
            "stops": options.stops,
            "before": continued_tokens(prompt, token_ids),
            "max_new_tokens": self._num_new(len(token_ids), options.max_new_tokens),
            **others,
            **self._processors(len(token_ids), options),
        }

    def _num_new(self, num_prompt_tokens: int, wanted: int | None) -> int:
        """Return the largest number of new tokens; all that there is room for without a wish."""
        room = self.engine.capacity - num_prompt_tokens
        if room >= (wanted or 1):
            return room if wanted is None else wanted
        raise ApiError(
            400,
            "the prompt and its new tokens are longer than a sequence may be; "
            f"expected: at most {self.engine.capacity} tokens; "
            f"got: {num_prompt_tokens} prompt tokens and {wanted or 1} new ones; "
            "remedy: shorten the prompt or lower max_tokens",
            code="context_length_exceeded",
        )

    def _processors(self, num_prompt_tokens: int, options: DecodingOptions) -> dict[str, Any]:
        """Return the arguments of `generate()` for biases and penalties."""
        arguments: dict[str, Any] = {}
        size = self.engine.decoder.target.spec.vocab_size
        if wrong := [token for token in options.logit_bias if token >= size]:
            raise PromptError(
                "logit_bias contains an id outside the target's vocabulary",
                expected=f"ids from 0 to {size - 1}",
                got=wrong[0],
                remedy="use ids of the target's own tokenizer",
            )
        if options.logit_bias:
            arguments["sequence_bias"] = {(id_,): own for id_, own in options.logit_bias.items()}
        penalties = options.frequency_penalty, options.presence_penalty
        if any(penalties):
            own = TokenPenalties(num_prompt_tokens, *penalties)
            arguments["logits_processor"] = LogitsProcessorList([own])
        return arguments


def discard(jobs: Sequence[Job]) -> None:
    """End jobs that have not been started, so that a drafter does not wait for their text."""
    for job in jobs:
        job.end()


def target_identity(engine: EngineThread) -> list[Any]:
    """Return the facts about the target and the libraries that the text for a seed depends on."""
    target = engine.decoder.target
    model: Any = target.model
    return [
        [__version__, torch.__version__, transformers.__version__],
        [target.spec.fingerprint, str(model.dtype), str(model.device.type)],
    ]


def _identity(engine: EngineThread) -> list[Any]:
    """Return everything that the text for a seed depends on, except the settings of requests."""
    decoder, scheduler = engine.decoder, engine.scheduler
    runs = [engine.policy.new_run(lane.sampling, lane.places) for lane in scheduler.lanes]
    return [
        *target_identity(engine),
        None if decoder.drafter is None else identity_of(decoder.drafter),
        [str(getattr(run, "budget", None)) for run in runs],
    ]
