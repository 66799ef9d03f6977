"""The JSON document of a comparison: settings, environment, and the figures of every method.

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
        raise ValueError("a temperature is given twice")
    return temperatures


Temperatures = Annotated[
    tuple[NonNegativeFloat, ...], Field(min_length=1), AfterValidator(_different)
]


class ComparisonSettings(Settings):
    """Settings of a comparison: its methods, its prompts, and how often they are decoded.

    Attributes:
        methods: names as the caller gave them, such as `autoregressive` or
            `drafter=PATH,tree=auto`.
        prompts: path of the file with the prompts.
        num_prompts: largest number of prompts to use; None for all.
        max_new_tokens: largest number of new tokens in each chat turn.
        temperatures: sampling temperatures; 0 is greedy decoding.
        top_p: as in `generate()`; None for the target's own value.
        top_k: as in `generate()`; None for the target's own value.
        batch_size: number of prompts that are decoded together.
        repeats: number of times that every prompt is decoded, each with other random numbers.
        seed: seed of the order of prompts and methods, and of all random numbers.
        keep_state: whether adaptive methods keep what they learnt from prompt to prompt.
        baseline: name of the method that speed-ups refer to; None for transformers,
            autoregressive decoding or the first method, whichever comes first in this list.
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
    """Facts about the target."""

    name_or_path: str
    fingerprint: str
    parameters: int
    dtype: str
    bytes_per_cached_token: int


class Environment(Settings):
    """Machine, versions and target of a measurement."""

    time: str  # UTC, ISO 8601
    argv: tuple[str, ...]
    commit: str | None
    is_dirty: bool | None  # whether the checkout had uncommitted changes
    versions: dict[str, str | None]
    platform: str
    processor: str
    device: str
    num_cpus: int | None
    threads: int
    spin_count: str | None  # GOMP_SPINCOUNT
    load_average: float | None  # over the minute before; work of others disturbs
    target: TargetFacts


class Seconds(Settings):
    """Seconds by phase, summed over all samples; `other` holds what a method does not report.

    On an accelerator these are the host's seconds: queued work counts where the host waits for it.
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
    """Candidates of one expert (or other source), and how many of them were accepted."""

    expert: int
    proposed: int  # candidates that this expert scored highest
    accepted: int

    @property
    def acceptance(self) -> float:
        """The share of the expert's candidates that were accepted."""
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
    """One prompt, decoded once; prompts decoded together share their seconds evenly."""

    prompt: str  # a hash of its content
    category: str
    repeat: int
    group: int  # number of the group of prompts that are decoded together, in every repeat
    tokens: int
    decoded: NonNegativeInt  # tokens after those that prefill delivered
    target_forwards: int  # after prefill
    turns: PositiveInt = 1  # chat turns, each a request
    seconds: float
    seconds_to_first_token: float


class MethodFigures(Settings):
    """Figures of a method at a temperature.

    Attributes:
        name: the caller's name of the method; unique together with the temperature.
        kind: kind of method, such as `drafter`.
        tau: mean acceptance length: tokens per target forward, pooled over all samples;
            autoregressive decoding has 1. Prefill does not count, nor do the tokens that it
            delivers: usually one, several where it also verifies drafts, as in transformers'
            assisted decoding.
        tau_macro: mean over prompts of each prompt's tau.
        tokens_per_second: new tokens divided by all seconds, prefill included.
        decoding_tokens_per_second: tokens after the first delivery over the seconds after it.
        speedup: ratio of tokens per second to those of the baseline at the same temperature, with
            its 95% bootstrap interval over prompts.
        identical_to_target: whether all tokens are those of transformers' `generate()`; None where
            tokens are sampled.
        identical_share: share of samples whose tokens are; None where tokens are sampled.
        acceptance_by_depth: conditional acceptance rate: of the decoding steps with a candidate to
            check at that depth, the share that accepted a candidate.
        marginal_acceptance_by_depth: acceptance rate per position: of all decoding steps, the share
            that accepted a draft at that depth.
        experts: verified and accepted candidates of every expert.
        seconds: seconds by phase.
        time_to_first_token: seconds to the first token, over samples.
        inter_token: seconds between deliveries, spread evenly over tokens delivered together.
        peak_memory_bytes: highest memory of the process (on an accelerator: of the device) while
            this method ran, all loaded models included; None where it cannot be read. On a CPU
            memory that other methods have freed may still count, so this is an upper bound.
        repeated_4gram_share: share of the text's 4-grams that occurred before in it; repetitive
            text is easy to draft.
        tree: shape of the draft trees; None if it is not fixed.
        parameters: number of the drafter's parameters; None without a model that drafts.
        notes: remarks for the reader.
        categories: the main figures by category of prompts, if there are several.
        samples: the measurements that all other figures were computed from.
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
    """One candidate of a draft tree; `parent` is an index into the list of nodes, -1 the root."""

    token: str
    parent: int
    depth: PositiveInt
    expert: int
    accepted: bool


class ExampleTree(Settings):
    """One verified draft tree."""

    method: str
    temperature: float
    context: str  # the end of the text before the tree
    root: str  # the last token before the tree
    nodes: tuple[TreeNode, ...]
    next_token: str  # the target's token after the accepted path


class ComparisonDocument(Settings):
    """Everything that `jakiro bench` stores of a comparison.

    Attributes:
        version: version of this schema.
        environment: machine, versions and target.
        settings: settings of the comparison.
        prompts: number of different prompts that were decoded.
        is_complete: whether all prompts were decoded at all temperatures and as often as asked for;
            if not, the measurement was interrupted, and all methods have the same samples.
        baseline: name of the method that speed-ups refer to.
        methods: figures of every method at every temperature, in the caller's order.
        trees: one example tree for every drafting method and temperature.
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

        Args:
            name: name of the method.
            temperature: sampling temperature; 0 is greedy.

        Raises:
            KeyError: the method was not measured at this temperature.
        """
        for method in self.methods:
            if (method.name, method.temperature) == (name, temperature):
                return method
        raise KeyError((name, temperature))


def read_document(path: Path) -> ComparisonDocument:
    """Return the document in a file.

    Raises:
        DataError: the file cannot be read, or holds no result of this version.
    """
    try:
        return ComparisonDocument.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        got = error.strerror if isinstance(error, OSError) else f"{error}".partition("\n")[0]
        raise DataError(
            f"{path} does not hold a result of `jakiro bench`",
            expected="a file that `jakiro bench --json` wrote",
            got=got,
            remedy="check the path, or measure again with this version",
        ) from error


def schema() -> str:
    """Return the JSON schema of the document."""
    described: dict[str, Any] = ComparisonDocument.model_json_schema()
    return json.dumps(described, indent=2)
