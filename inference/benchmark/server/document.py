"""The JSON document of a load test: settings, environment, server, figures and requests.

Times are in wall-clock seconds as the client measures them.
"""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from inference.benchmark.document import MachineFacts, Quantiles
from inference.benchmark.settings import Temperatures
from jakiro.utils.settings import Settings

LOAD_VERSION: Literal[1] = 1

Outcome = Literal["complete", "cut", "refused", "failed"]


class LoadSettings(Settings):
    """Settings of a load test.

    Attributes:
        url: address of the server's interface.
        model: name of the model; None for the only one that the server has.
        prompts: path of the file with the prompts. Of a dialogue, only the first chat turn is used.
        num_prompts: largest number of prompts to use; None for all.
        chat: whether a text is sent as the message of a user.
        max_new_tokens: largest number of new tokens of an answer.
        temperatures: temperatures that take part in equal numbers of requests; 0 is greedy
            decoding.
        top_p: as in OpenAI's interface; None for the server's default.
        concurrency: number of clients, each of which sends one request after the other.
        requests: number of requests; None to send every prompt once at every temperature, or as
            many requests as `seconds` allows.
        seconds: seconds after which no new request is sent; None for no limit.
        seed: seed of the order of requests, and of all other random choices.
        unstreamed_share: share of requests whose answer arrives as a whole.
        cut_share: share of requests whose stream the client closes before its end.
        bad_share: share of requests that a server must refuse.
        device_drafter: name of a drafter with which each client drafts by itself, in sessions for
            remote verification; None to ask for complete texts.
        lost_share: share of the replies to such clients that are lost on the way.
        check: whether each answer is compared with the answer to the same request alone, which is
            asked for as a complete text.
        timeout: seconds after which a request is given up.
    """

    url: str
    model: str | None = None
    prompts: str
    num_prompts: PositiveInt | None = None
    chat: bool = False
    max_new_tokens: PositiveInt = 128
    temperatures: Temperatures = (0.0,)
    top_p: float | None = Field(None, gt=0, le=1)
    concurrency: PositiveInt = 8
    requests: PositiveInt | None = None
    seconds: PositiveFloat | None = None
    seed: NonNegativeInt = 0
    unstreamed_share: float = Field(0.0, ge=0, le=1)
    cut_share: float = Field(0.0, ge=0, le=1)
    bad_share: float = Field(0.0, ge=0, le=1)
    device_drafter: str | None = None
    lost_share: float = Field(0.0, ge=0, lt=1)
    check: bool = False
    timeout: PositiveFloat = 600.0

    @model_validator(mode="after")
    def _one_limit(self) -> "LoadSettings":
        if self.requests is not None and self.seconds is not None:
            raise ValueError("--requests and --seconds cannot be combined")
        return self

    @model_validator(mode="after")
    def _clients_of_one_kind(self) -> "LoadSettings":
        if self.lost_share and self.device_drafter is None:
            raise ValueError("--lost-share requires --device-drafter")
        if self.device_drafter is not None and (self.cut_share or self.unstreamed_share):
            raise ValueError(
                "--device-drafter cannot be combined with --cut-share and --unstreamed-share"
            )
        return self


class ServerFacts(Settings):
    """The known properties of the server."""

    url: str
    model: str
    is_jakiro: bool
    system_fingerprints: tuple[str, ...]  # the different ones in its answers


class DeviceSteps(Settings):
    """Decoding steps of texts that were drafted by clients, and what they cost."""

    steps: NonNegativeInt  # number of verdicts, each counted once
    repeats: NonNegativeInt  # number of requests that were sent again
    resumes: NonNegativeInt  # number of sessions after the first one of each text


class DecidedSteps(Settings):
    """Decoding steps of such texts as the server counts them."""

    decided: NonNegativeInt  # number of forward passes of the target
    replayed: NonNegativeInt  # number of verdicts that were sent again


class RequestRecord(Settings):
    """One request; seconds are counted from its last sending, unless the name says otherwise."""

    prompt: str | None  # hash of the prompt's content; None for a bad request
    temperature: float | None
    is_streamed: bool
    outcome: Outcome
    status: int | None  # None if no response arrived
    started: float  # seconds since the beginning of the load
    to_first: float | None  # seconds to the first part of the text
    seconds: float
    gaps: tuple[float, ...]  # seconds between the parts of the text
    tokens: NonNegativeInt
    prompt_tokens: NonNegativeInt | None
    accepted: NonNegativeInt | None  # drafted tokens in the text; None if not reported
    rejected: NonNegativeInt | None
    refusals: NonNegativeInt  # number of answers with status 429 before this one
    waited: float  # seconds between the first and the last sending
    error: str | None = None
    device: DeviceSteps | None = None  # None unless the client drafts


class Difference(Settings):
    """An answer that is not the one to the same request alone."""

    prompt: str
    temperature: float
    position: NonNegativeInt  # number of equal characters before the difference
    alone: str  # the beginning of the rest of the text
    loaded: str


class Comparisons(Settings):
    """Comparison of the answers under load with those to the same requests alone."""

    greedy: NonNegativeInt
    greedy_equal: NonNegativeInt
    sampled: NonNegativeInt
    sampled_equal: NonNegativeInt
    differences: tuple[Difference, ...] = ()  # the first ones

    @property
    def num_different(self) -> int:
        """The number of answers that differ."""
        return self.greedy + self.sampled - self.greedy_equal - self.sampled_equal


class LoadFigures(Settings):
    """Figures over all requests of a load test.

    Attributes:
        seconds: seconds from the first request to the end of the last.
        requests: number of requests.
        outcomes: number of requests by outcome.
        statuses: number of responses by HTTP status, including status 429 before a request was sent
            again; `none` counts requests without a response.
        errors: number of failed requests by error message.
        tokens: number of tokens of complete answers.
        tokens_per_second: these tokens divided by all seconds.
        counted_by_parts: number of complete answers without usage, whose parts were counted
            instead of tokens.
        time_to_first_token: quantiles of the seconds to the first part of a streamed text; None
            without streams.
        between_tokens: quantiles over streamed answers of the mean seconds per token after the
            first; None without streams.
        between_parts: quantiles of the seconds between two parts of a streamed text, which may
            contain several tokens.
        request_seconds: quantiles of the seconds of complete answers.
        accepted: number of drafted tokens in the texts; None if the server does not report it.
        rejected: number of rejected drafted tokens.
        refusals: number of responses with status 429.
        longest_wait: largest number of seconds for which a request had to wait because of them.
        device: decoding steps of clients that draft; None without any.
    """

    seconds: float
    requests: int
    outcomes: dict[Outcome, int]
    statuses: dict[str, int]
    errors: dict[str, int]
    tokens: int
    tokens_per_second: float
    counted_by_parts: int
    time_to_first_token: Quantiles | None
    between_tokens: Quantiles | None
    between_parts: Quantiles | None
    request_seconds: Quantiles | None
    accepted: int | None
    rejected: int | None
    refusals: int
    longest_wait: float
    device: DeviceSteps | None = None


class LoadDocument(Settings):
    """Everything that `jakiro bench --url` stores.

    Attributes:
        version: version of this schema.
        environment: machine and versions of the clients.
        server: server, and the model that it serves.
        settings: settings of the load test.
        is_complete: whether all requests were sent; if not, the measurement was interrupted.
        figures: figures of the load test.
        alone: figures of the same requests, sent one after the other; None without `check`.
        comparisons: comparison of the answers; None without `check`.
        requests: measurements from which the figures were computed.
        decided: what the server has decided meanwhile for clients that draft; None if there are
            none, if it does not say so, or if texts were continued in other sessions.
    """

    version: Literal[1] = LOAD_VERSION
    environment: MachineFacts
    server: ServerFacts
    settings: LoadSettings
    is_complete: bool
    figures: LoadFigures
    alone: LoadFigures | None
    comparisons: Comparisons | None
    requests: tuple[RequestRecord, ...]
    decided: DecidedSteps | None = None

    @property
    def speedup(self) -> float | None:
        """Tokens per second under load divided by those of the same requests alone."""
        if self.alone is None or not self.alone.tokens_per_second:
            return None
        return self.figures.tokens_per_second / self.alone.tokens_per_second

    @property
    def num_decided_twice(self) -> int:
        """The number of steps that the server has decided without need; 0 if it is unknown."""
        device = self.figures.device
        if device is None or device.resumes or self.decided is None:
            return 0
        return self.decided.decided - device.steps

    @property
    def passed(self) -> bool:
        """Whether no request failed, no answer differs, and no step was decided twice."""
        if self.figures.outcomes.get("failed") or self.num_decided_twice:
            return False
        return self.comparisons is None or self.comparisons.num_different == 0
