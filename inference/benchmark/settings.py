"""Settings of a comparison and its methods, such as `drafter=PATH,tree=auto`; needs no torch."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from inference.drafters.names import ADED, LM, UNTRAINED, PairName
from inference.drafters.names import LOOKUP as UNTRAINED_LOOKUP
from inference.trees import MOST_CANDIDATES
from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings, validate_settings

TRANSFORMERS, COMPILED = "transformers", "transformers-compiled"
LOOKUP = "transformers-lookup"
AUTOREGRESSIVE, DRAFTER = "autoregressive", "drafter"
OF_TRANSFORMERS = (TRANSFORMERS, COMPILED, LOOKUP)
WITHOUT_DRAFTERS = (*OF_TRANSFORMERS, AUTOREGRESSIVE)
KINDS = (*WITHOUT_DRAFTERS, DRAFTER, *UNTRAINED)
WITH_PATH = (DRAFTER, LM)
OPTIONAL_PATH = (ADED, LOOKUP)

Tree = Literal["auto", "fixed", "deterministic"]
Count = Annotated[int, Field(ge=1, le=MOST_CANDIDATES)]

_OF_DRAFTERS = {"tree", "candidates", "merged-repeats"}
_OPTIONS = {"name", "settings", "levels"} | _OF_DRAFTERS
_SIZES = {"candidates", "levels", "settings", "merged-repeats"}  # give the size of the trees
_OPTION = re.compile(rf",({'|'.join(_OPTIONS)})=([^,]*)$")
REPLAYED_CANDIDATES = 60  # of a replayed tree, unless a method says otherwise


Temperatures = Annotated[
    tuple[NonNegativeFloat, ...],
    Field(min_length=1),
    AfterValidator(lambda values: tuple(dict.fromkeys(values))),  # each is measured once
]


class ComparisonSettings(Settings):
    """What is compared."""

    methods: tuple[str, ...] = Field(min_length=1)
    """A decoding method, such as transformers, autoregressive, lookup or drafter=PATH.
    --list-methods shows all methods and their options."""
    prompts: str
    """JSONL file with one of the keys prompt, turns and messages on each line, and optionally
    category; or a text file with one prompt per line."""
    num_prompts: PositiveInt | None = None
    """Largest number of prompts; by default all prompts in the file."""
    max_new_tokens: PositiveInt = 128
    """Largest number of new tokens in each chat turn."""
    temperatures: Temperatures = (0.0,)
    """Temperature, 0 for greedy decoding."""
    top_p: float | None = Field(None, gt=0, le=1)
    """As in generate(); by default the value of the target's generation config."""
    top_k: NonNegativeInt | None = None
    """As in generate(); by default the value of the target's generation config."""
    batch_size: PositiveInt = 1
    """Number of prompts to decode together."""
    repeats: PositiveInt = 1
    """Number of times to decode every prompt."""
    seed: NonNegativeInt = 0
    """Seed for the order of prompts and methods, and for sampling."""
    keep_state: bool = False
    """Let adaptive drafters keep what they learn from one prompt for the next ones."""
    threads: PositiveInt | Literal["auto"] | None = "auto"
    """Number of threads of decoding steps on a CPU; auto measures which is fastest."""
    other_weights: bool = False
    """Use trained drafters even if they were trained for other weights of the target."""
    baseline: str | None = None
    """Name of the method that speed-ups are relative to; by default transformers, with the
    fastest number of threads, else autoregressive, else the first method."""
    replay: bool = False
    """Compare only the tau of trained drafters, on texts that the target writes once. Methods
    drafter=PATH with the same name are trainings with different seeds, in the same order for all
    names. Trees have 60 deterministic candidates by default."""


class MethodName(Settings):
    """A parsed method name.

    Attributes:
        path: path of the drafting model, or of the initial table of `aded`, or number of tokens
            that transformers' prompt lookup drafts; None if not given.
        tree: "auto" for trees whose size is expected to be the fastest in each decoding step,
            "fixed" for trees of a single shape, by default of the depth that the drafter was
            trained for, whose candidates are sampled if tokens are sampled, "deterministic" for
            trees of the best candidates at every temperature.
        levels: number of forward passes of the drafter per tree; None for the number that the
            drafter was trained with.
        second: second drafter, which shares trees with the first: `aded`, `aded=TABLE` or
            `lookup`; None if there is no second drafter.
        merged_repeats: largest number of candidates of a tree, including the repetitions that
            `RepeatingDrafter` adds; None to add no repetitions.
    """

    kind: str
    path: str | None = None
    name: str = Field(min_length=1)
    tree: Tree = "auto"
    candidates: Count | None = None
    levels: Count | None = None
    settings: Path | None = None
    second: str | None = None
    merged_repeats: Count | None = None


def parse_methods(texts: Sequence[str]) -> list[MethodName]:
    """Return the methods that are named by `KIND[=PATH]` and options such as `,tree=...`.

    A second drafter may precede `drafter=PATH` or `lm=PATH`, as in `lookup+lm=PATH`.
    """
    methods = [_parse(text) for text in texts]
    names = [method.name for method in methods]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two methods are called {repeated[0]}; add ,name=NAME to one of them")
    return methods


def _parse_replayed(texts: Sequence[str]) -> list[MethodName]:
    """Return trained drafters to replay; those with the same name are trained with other seeds.

    Their trees are deterministic.
    """
    methods = []
    for text in texts:
        method = _parse(text)
        if method.kind != DRAFTER or method.second is not None:
            raise _malformed(text, f"{DRAFTER}=PATH with --replay")
        candidates = method.candidates or REPLAYED_CANDIDATES
        changes = {"tree": "deterministic", "candidates": candidates}
        methods.append(method.model_copy(update=changes))
    names = [method.name for method in methods]
    if len({names.count(name) for name in names}) > 1:
        raise ConfigError("the drafters have different numbers of trainings, that is of methods")
    return methods


def methods_of(settings: ComparisonSettings) -> list[MethodName]:
    """Return the methods of a comparison, after checking that they suit its other settings."""
    parse = _parse_replayed if settings.replay else parse_methods
    methods = parse(settings.methods)
    for method in methods:
        if settings.batch_size > 1 and method.kind == LOOKUP:
            raise ConfigError(f"{method.kind} decodes one prompt at a time (--batch-size 1)")
    names = [method.name for method in methods]
    if settings.baseline is not None and settings.baseline not in names:
        raise ConfigError(
            "--baseline names a method that is not compared", expected=f"one of {', '.join(names)}"
        )
    if settings.keep_state and settings.repeats > 1:
        raise ConfigError("--keep-state needs --repeats 1, as no prompt may be decoded twice")
    return methods


def _parse(text: str) -> MethodName:
    rest, options = text, {}
    while option := _OPTION.search(rest):
        options[option[1]] = option[2]
        rest = rest[: option.start()]
    pair = PairName.parse(rest)
    kind, _, path = (rest if pair is None else pair.first).partition("=")
    _refuse_wrong(text, kind, path, options)
    values = {
        "kind": kind,
        "path": path or None,
        "name": kind if pair is None else f"{pair.second.partition('=')[0]}+{kind}",
        "second": None if pair is None else pair.second,
        "tree": "fixed" if _SIZES & options.keys() else "auto",
    }
    values |= {key.replace("-", "_"): value for key, value in options.items()}
    return validate_settings(MethodName, values, source=f"--method {text}")


def _refuse_wrong(text: str, kind: str, path: str, options: Mapping[str, str]) -> None:
    allowed, tree = {"name"}, options.get("tree", "auto")
    if kind in (DRAFTER, *UNTRAINED):
        allowed |= _OF_DRAFTERS
    if kind in UNTRAINED:
        allowed.add("settings")
    if kind == DRAFTER and "candidates" in options:
        allowed.add("levels")
    is_deterministic = kind in (ADED, UNTRAINED_LOOKUP) or tree == "deterministic"
    sized_auto = "tree" in options and tree == "auto" and "candidates" in options
    faults = {
        f"one of {', '.join(KINDS)}, or a pair such as lookup+drafter=PATH or aded+lm=PATH": kind
        not in KINDS,
        f"{kind}=PATH": kind in WITH_PATH and not path,
        f"{LOOKUP}=N with a positive number of tokens": kind == LOOKUP
        and path
        and not re.fullmatch("0*[1-9][0-9]*", path),
        f"{kind} without a path": kind not in (*WITH_PATH, *OPTIONAL_PATH) and path,
        f"only the options {', '.join(sorted(allowed))}": options.keys() - allowed,
        "either tree=auto, which selects the number of candidates, or candidates=N": kind == DRAFTER
        and sized_auto,
        f"tree=auto or tree=fixed with {kind}": kind in UNTRAINED and tree not in ("auto", "fixed"),
        "merged-repeats only with deterministic trees": "merged-repeats" in options
        and not is_deterministic,
    }
    for expected, is_present in faults.items():
        if is_present:
            raise _malformed(text, expected)


def _malformed(text: str, expected: str) -> ConfigError:
    return ConfigError(
        "a method cannot be used",
        expected=expected,
        got=f"--method {text}",
        remedy="see `jakiro bench --help`",
    )
