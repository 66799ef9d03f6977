"""The JSON document of a comparison: what was asked for, where it ran, and what every method did.

`python -c "from inference.benchmark.document import schema; print(schema())"` prints its JSON
schema. Seconds are wall-clock seconds, tokens are counted as ids, memory is in bytes.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

from inference.trees.shape import TreeShape
from jakiro.errors import DataError
from jakiro.utils.settings import Settings

SCHEMA_VERSION: Literal[1] = 1


def _different(temperatures: tuple[float, ...]) -> tuple[float, ...]:
    if len(set(temperatures)) < len(temperatures):
        raise ValueError("every temperature once")
    return temperatures


Temperatures = Annotated[
    tuple[NonNegativeFloat, ...], Field(min_length=1), AfterValidator(_different)
]


class ComparisonSettings(Settings):
    """What is compared, and how often.

    Attributes:
        methods: as the caller named them, such as `plain` or `drafter=PATH,tree=auto`.
        prompts: the file they come from.
        num_prompts: at most so many of them are used; None for all.
        max_new_tokens: longest continuation of each turn.
        temperatures: 0 is greedy.
        top_p: as for `generate()`; None for the target's own.
        top_k: likewise.
        batch_size: prompts that are decoded together.
        repeats: times that every prompt is decoded, with other random numbers.
        seed: of the order of prompts and methods, and of all random numbers.
        keep_state: methods that learn keep what they learnt from one prompt to the next.
        baseline: the method that speed-ups are over; None for transformers, plain decoding or the
            first one, whichever is there.
    """

    methods: tuple[str, ...] = Field(min_length=1)
    prompts: str
    num_prompts: PositiveInt | None = None
    max_new_tokens: PositiveInt = 128
    temperatures: Temperatures = (0.0,)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: NonNegativeInt | None = None
    batch_size: PositiveInt = 1
    repeats: PositiveInt = 1
    seed: NonNegativeInt = 0
    keep_state: bool = False
    baseline: str | None = None


class TargetFacts(Settings):
    """The model whose text everything is about."""

    name_or_path: str
    fingerprint: str
    parameters: int
    dtype: str
    bytes_per_cached_token: int


class Environment(Settings):
    """Where and with what the figures were taken."""

    time: str  # UTC, ISO 8601
    argv: tuple[str, ...]
    commit: str | None
    is_dirty: bool | None  # whether the checkout had changes beside its commit
    versions: dict[str, str | None]
    platform: str
    processor: str
    device: str
    num_cpus: int | None
    threads: int
    spin_count: str | None  # GOMP_SPINCOUNT
    load_average: float | None  # of the minute before; others' work disturbs
    target: TargetFacts


class Seconds(Settings):
    """Where the seconds went, summed over all samples; what a method does not tell is `other`.

    On an accelerator these are the host's seconds: work that is still queued counts where the host
    waits for it.
    """

    prefill: float
    draft: float
    verify: float
    commit: float
    other: float


class Quantiles(Settings):
    """Median and 95th percentile, in seconds."""

    p50: float
    p95: float


class ExpertFigures(Settings):
    """What one expert (or other source of candidates) contributed."""

    expert: int
    proposed: int  # candidates that it favoured most
    accepted: int

    @property
    def acceptance(self) -> float:
        """Share of its candidates that were accepted."""
        return self.accepted / self.proposed if self.proposed else 0.0


class CategoryFigures(Settings):
    """The main figures over the prompts of one category."""

    prompts: int
    tau: float
    tokens_per_second: float
    speedup: float
    speedup_low: float
    speedup_high: float


class SampleRecord(Settings):
    """One prompt, decoded once; the seconds of prompts decoded together are shared out evenly."""

    prompt: str  # a hash of its content
    category: str
    repeat: int
    group: int  # prompts that are decoded together, in every repeat, have the same number
    tokens: int
    decoded: NonNegativeInt  # tokens after those that came with the reading of a prompt
    target_forwards: int  # after prefill
    turns: PositiveInt = 1  # requests of this sample
    seconds: float
    seconds_to_first_token: float


class MethodFigures(Settings):
    """One method at one temperature.

    Attributes:
        name: what the caller calls the method; unique together with the temperature.
        kind: which method it is, such as `drafter`.
        tau: tokens per target forward, pooled over all samples; plain decoding has 1. The forward
            that reads a prompt does not count, nor do the tokens that it delivers: one, but several
            where it also verifies drafts, as in transformers' assisted decoding.
        tau_macro: mean of the prompts' own tau.
        tokens_per_second: new tokens over all seconds, reading the prompt included.
        decoding_tokens_per_second: tokens after the first delivery over the seconds after it.
        speedup: ratio of tokens per second to those of the baseline at the same temperature, with
            its 95% bootstrap interval over prompts.
        identical_to_target: whether all tokens are those of transformers' `generate()`; None where
            they are drawn.
        identical_share: share of samples that are.
        acceptance_by_depth: of the rounds with a candidate to try at that depth, the share that
            accepted one.
        marginal_acceptance_by_depth: of all rounds, the share that accepted a draft at that depth.
        experts: who proposed what was verified, and what was accepted.
        seconds: where they went.
        time_to_first_token: over samples.
        inter_token: seconds between deliveries, spread evenly over the tokens delivered together.
        peak_memory_bytes: highest memory of the process (on an accelerator: of the device) while
            this method ran, all loaded models included; None where it cannot be read. On a CPU what
            other methods have freed may still count: it bounds a method's memory from above.
        repeated_4gram_share: of the 4-grams of its text; repetitive text is easy to draft.
        tree: the draft trees, if they are fixed.
        parameters: of the drafter.
        notes: what a reader should know.
        categories: the same figures by category of prompts, if there are several.
        samples: what everything above was computed from.
    """

    name: str
    kind: str
    temperature: float
    tau: float
    tau_low: float
    tau_high: float
    tau_macro: float
    tokens: int
    target_forwards: int
    tokens_per_second: float
    decoding_tokens_per_second: float
    speedup: float
    speedup_low: float
    speedup_high: float
    identical_to_target: bool | None
    identical_share: float | None
    acceptance_by_depth: tuple[float, ...] = ()
    marginal_acceptance_by_depth: tuple[float, ...] = ()
    experts: tuple[ExpertFigures, ...] = ()
    seconds: Seconds
    time_to_first_token: Quantiles
    inter_token: Quantiles
    peak_memory_bytes: int | None
    repeated_4gram_share: float
    tree: TreeShape | None = None
    parameters: int | None = None
    notes: tuple[str, ...] = ()
    categories: dict[str, CategoryFigures] = Field(default_factory=dict)
    samples: tuple[SampleRecord, ...]


class TreeNode(Settings):
    """One candidate of a draft tree; `parent` is its parent's place in the list; -1 is the root."""

    token: str
    parent: int
    depth: PositiveInt
    expert: int
    accepted: bool


class ExampleTree(Settings):
    """One verified draft tree."""

    method: str
    temperature: float
    context: str  # the text before it, or its end
    root: str  # the last token before it
    nodes: tuple[TreeNode, ...]
    next_token: str  # that the target supplied after the accepted path


class ComparisonDocument(Settings):
    """All of it.

    Attributes:
        version: of this schema.
        environment: where it ran.
        settings: what was asked for.
        prompts: number of different prompts that were decoded.
        is_complete: whether all of them were, at all temperatures and as often as asked for; if
            not, the measurement was interrupted, and all methods have the same samples.
        baseline: name of the method that speed-ups are over.
        methods: figures of every method at every temperature, in the caller's order.
        trees: one example for every drafting method and temperature.
    """

    version: Literal[1] = SCHEMA_VERSION
    environment: Environment
    settings: ComparisonSettings
    prompts: int
    is_complete: bool = True
    baseline: str
    methods: tuple[MethodFigures, ...]
    trees: tuple[ExampleTree, ...] = ()

    def figures(self, name: str, temperature: float) -> MethodFigures:
        """Return the figures of a method at a temperature.

        Raises:
            KeyError: it was not measured.
        """
        for one in self.methods:
            if (one.name, one.temperature) == (name, temperature):
                return one
        raise KeyError((name, temperature))


def read_document(path: Path) -> ComparisonDocument:
    """Return the document in a file.

    Raises:
        DataError: the file cannot be read, or holds something else.
    """
    try:
        return ComparisonDocument.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        got = error.strerror if isinstance(error, OSError) else f"{error}".partition("\n")[0]
        raise DataError(
            f"{path} is no result of `jakiro bench`",
            expected="a file that `jakiro bench --json` wrote",
            got=got,
            remedy="check the path, or measure again with this version",
        ) from error


def schema() -> str:
    """Return the JSON schema of the document."""
    described: dict[str, Any] = ComparisonDocument.model_json_schema()
    return json.dumps(described, indent=2)
