"""Parser for method names such as `autoregressive` or `drafter=PATH,tree=auto,name=mine`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from inference.benchmark.settings import ComparisonSettings
from inference.drafters.names import ADED, LM, UNTRAINED, PairName
from inference.drafters.names import LOOKUP as UNTRAINED_LOOKUP
from inference.trees.limits import MOST_CANDIDATES
from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings, validate_settings

TRANSFORMERS, COMPILED = "transformers", "transformers-compiled"
LOOKUP, ASSISTED = "transformers-lookup", "transformers-assisted"
AUTOREGRESSIVE, DRAFTER = "autoregressive", "drafter"
OF_TRANSFORMERS = (TRANSFORMERS, COMPILED, LOOKUP, ASSISTED)
WITHOUT_OWN_DRAFTS = (*OF_TRANSFORMERS, AUTOREGRESSIVE)
KINDS = (*WITHOUT_OWN_DRAFTS, DRAFTER, *UNTRAINED)
WITH_PATH = (ASSISTED, DRAFTER, LM)
OPTIONAL_PATH = (ADED,)
SINGLE_PROMPT = (LOOKUP, ASSISTED)  # transformers drafts for one prompt at a time

Tree = Literal["auto", "fixed", "deterministic", "sampled"]
Count = Annotated[int, Field(ge=1, le=MOST_CANDIDATES)]

_OF_PAIRS = {"second-settings", "pair-settings"}
_OF_DRAFTERS = {"tree", "candidates", "merged-repeats"}
_OPTIONS = {"name", "settings", "levels"} | _OF_DRAFTERS | _OF_PAIRS
_SIZES = {"candidates", "levels", "settings", "merged-repeats"}  # give the size of the trees
_OPTION = re.compile(rf",({'|'.join(_OPTIONS)})=([^,]*)$")
REPLAYED_CANDIDATES = 60  # of a replayed tree, unless a method says otherwise


class MethodName(Settings):
    """A parsed method name.

    Attributes:
        path: path of the drafting model, or of the initial table of `aded`; None if not given.
        tree: "auto" for trees whose size is expected to be the fastest in each decoding step,
            "fixed" for trees of a single shape, by default of the depth that the drafter was
            trained for, "deterministic" for trees of the best candidates at every temperature,
            "sampled" (the same as "fixed") for trees whose candidates are sampled if tokens are
            sampled.
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
    second_settings: Path | None = None
    pair_settings: Path | None = None
    merged_repeats: Count | None = None


def parse_methods(texts: Sequence[str]) -> list[MethodName]:
    """Return the methods that are named by `KIND[=PATH]` and options such as `,tree=...`.

    A second drafter may precede `drafter=PATH` or `lm=PATH`, as in `lookup+lm=PATH`.
    """
    methods = [_parse(text) for text in texts]
    names = [method.name for method in methods]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            "two methods have the same name",
            expected="a different name for each method",
            got=", ".join(repeated),
            remedy="add ,name=... to one of them",
        )
    return methods


def parse_replayed_methods(texts: Sequence[str]) -> list[MethodName]:
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
        raise ConfigError(
            "the drafters have different numbers of trainings",
            expected="as many methods with each name",
            got=", ".join(f"{name}: {names.count(name)}" for name in dict.fromkeys(names)),
            remedy="pass a method with ,name=NAME for each seed of each drafter",
        )
    return methods


def methods_of(settings: ComparisonSettings) -> list[MethodName]:
    """Return the methods of a comparison, after checking that they suit its other settings."""
    methods = parse_methods(settings.methods)
    for method in methods:
        if settings.batch_size > 1 and method.kind in SINGLE_PROMPT:
            raise ConfigError(
                f"the method {method.kind} decodes one prompt at a time",
                expected="--batch-size 1",
                got=settings.batch_size,
                remedy="leave the method out, or set --batch-size 1",
            )
    names = [method.name for method in methods]
    if settings.baseline is not None and settings.baseline not in names:
        raise ConfigError(
            "--baseline names a method that is not compared",
            expected=f"one of {', '.join(names)}",
            got=settings.baseline,
            remedy="add this method with --method, or choose another baseline",
        )
    if settings.keep_state and settings.repeats > 1:
        raise ConfigError(
            "a method must not decode a prompt twice if --keep-state is set",
            expected="--repeats 1",
            got=settings.repeats,
            remedy="leave out --keep-state or --repeats",
        )
    return methods


def _parse(text: str) -> MethodName:
    rest, options = text, {}
    while found := _OPTION.search(rest):
        options[found[1]] = found[2]
        rest = rest[: found.start()]
    pair = PairName.parse(rest)
    kind, _, path = (rest if pair is None else pair.first).partition("=")
    _refuse_wrong(text, kind, path, options, is_pair=pair is not None)
    values = {
        "kind": kind,
        "path": path or None,
        "name": kind if pair is None else f"{pair.second.partition('=')[0]}+{kind}",
        "second": None if pair is None else pair.second,
        "tree": "fixed" if _SIZES & options.keys() else "auto",
    }
    values |= {key.replace("-", "_"): value for key, value in options.items()}
    return validate_settings(MethodName, values, source=f"--method {text}")


def _refuse_wrong(
    text: str, kind: str, path: str, options: Mapping[str, str], *, is_pair: bool
) -> None:
    allowed, tree = {"name"}, options.get("tree", "auto")
    if kind in (DRAFTER, *UNTRAINED):
        allowed |= _OF_DRAFTERS | (_OF_PAIRS if is_pair else set())
    if kind in UNTRAINED:
        allowed.add("settings")
    if kind == DRAFTER and "candidates" in options:
        allowed.add("levels")
    is_deterministic = kind in (ADED, UNTRAINED_LOOKUP) or tree == "deterministic"
    sized_auto = "tree" in options and tree == "auto" and "candidates" in options
    unknown = re.search(r",[\w-]+=", path) and not Path(path).exists()
    faults = {
        f"one of {', '.join(KINDS)}": kind not in KINDS,
        f"{kind}=PATH": kind in WITH_PATH and not path,
        f"{kind} without a path": kind not in (*WITH_PATH, *OPTIONAL_PATH) and path,
        f"only the options {', '.join(sorted(allowed))}": options.keys() - allowed or unknown,
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
