"""The model of a server: its engine, its name, and the identity of what it decodes with."""

import time
from typing import Any

import torch
import transformers

from inference.drafters.identity import identity_of
from inference.engine.request import Request
from inference.generation.prompts import Prompt, needed
from inference.serving.answers.details import DetailWriter
from inference.serving.api_error import ApiError
from inference.serving.scheduling.decoding_options import DecodingOptions, requests_of
from inference.serving.scheduling.engine_thread import EngineThread
from jakiro import __version__
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

    def check_name(self, name: str) -> None:
        """Refuse a request for another model."""
        if name != self.name:
            raise ApiError(
                404,
                f"the model is not served here; expected: {self.name}",
                param="model",
                code="model_not_found",
            )

    def lane_of(self, options: DecodingOptions) -> int:
        """Return the number of the lane of a request that has not been prepared yet."""
        temperature, _ = options.selection(self._samples)
        samples = self._samples if temperature is None else temperature > 0
        return len(self.engine.scheduler.lanes) - 1 if samples else 0

    def request_of(
        self, prompt: Prompt, options: DecodingOptions, *, is_answer: bool = False
    ) -> Request:
        """Return a request that is decoded outside the lanes.

        Its random numbers do not depend on other requests.

        Args:
            is_answer: as for `requests_of`.
        """
        engine = self.engine
        (request,), _ = requests_of(
            engine.decoder, engine.capacity, prompt, options, is_answer=is_answer
        )
        return request


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
