"""Parser for method names such as `autoregressive` or `drafter=PATH,tree=auto,name=mine`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from inference.benchmark.settings import ComparisonSettings
from inference.drafters.names import ADED, LM, UNTRAINED, PairName
from inference.drafters.names import LOOKUP as UNTRAINED_LOOKUP
from inference.trees.limits import MOST_CANDIDATES
from jakiro.errors import ConfigError

TRANSFORMERS, COMPILED = "transformers", "transformers-compiled"
LOOKUP, ASSISTED = "transformers-lookup", "transformers-assisted"
AUTOREGRESSIVE, DRAFTER = "autoregressive", "drafter"
WITHOUT_OWN_DRAFTS = (TRANSFORMERS, COMPILED, LOOKUP, ASSISTED, AUTOREGRESSIVE)
KINDS = (*WITHOUT_OWN_DRAFTS, DRAFTER, *UNTRAINED)
WITH_PATH = (ASSISTED, DRAFTER, LM)
OPTIONAL_PATH = (ADED,)
SINGLE_PROMPT = (LOOKUP, ASSISTED)  # transformers drafts for one prompt at a time

Tree = Literal["auto", "fixed", "deterministic", "sampled"]

_OPTIONS = (
    "tree",
    "candidates",
    "levels",
    "settings",
    "second-settings",
    "pair-settings",
    "merged-repeats",
    "name",
)
_SIZES = frozenset(
    {"candidates", "levels", "settings", "merged-repeats"}
)  # options that give the size of the trees
_OPTION = re.compile(rf",({'|'.join(_OPTIONS)})=([^,]*)$")
_UNKNOWN_OPTION = re.compile(r",([\w-]+)=")


@dataclass(frozen=True)
class MethodName:
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
    name: str = ""
    tree: Tree = "auto"
    candidates: int | None = None
    levels: int | None = None
    settings: str | None = None
    second: str | None = None
    second_settings: str | None = None
    pair_settings: str | None = None
    merged_repeats: int | None = None


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
    """Return trained drafters to replay; those with the same name are trained with other seeds."""
    methods = [_parse(text) for text in texts]
    for method, text in zip(methods, texts, strict=True):
        if method.kind != DRAFTER or method.second is not None:
            raise _malformed(text, f"{DRAFTER}=PATH with --replay", text)
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
    check_batch_size(methods, settings.batch_size)
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


def check_batch_size(names: Sequence[MethodName], batch_size: int) -> None:
    """Raise an error if a method cannot decode `batch_size` prompts together."""
    for name in names:
        if batch_size > 1 and name.kind in SINGLE_PROMPT:
            raise ConfigError(
                f"the method {name.kind} decodes one prompt at a time",
                expected="--batch-size 1",
                got=batch_size,
                remedy="leave the method out, or set --batch-size 1",
            )


def _parse(text: str) -> MethodName:
    rest, options = text, {}
    while found := _OPTION.search(rest):
        options[found[1]] = found[2]
        rest = rest[: found.start()]
    pair = PairName.parse(rest)
    kind, _, path = (rest if pair is None else pair.first).partition("=")
    second = None if pair is None else pair.second
    _check_kind(kind, path, text)
    unknown = _UNKNOWN_OPTION.search(path)
    if unknown and not Path(path).exists():  # a path may contain such text
        raise _malformed(text, f"one of the options {', '.join(_OPTIONS)}", unknown[1])
    # The results add the setting in parentheses if a method is measured with several settings.
    if "(" in options.get("name", ""):
        raise _malformed(text, "a name without parentheses", options["name"])
    if options.get("tree") == "auto" and kind == DRAFTER and "candidates" in options:
        raise _malformed(
            text, "either tree=auto, which selects the number of candidates, or candidates=N", text
        )
    _check_options(kind, options, text)
    for option in ("second-settings", "pair-settings"):
        if second is None and option in options:
            expected = "two drafters, such as aded+drafter=PATH"
            raise _malformed(text, expected, f"{option} with a single drafter")
    return MethodName(
        kind=kind,
        path=path or None,
        name=options.get("name") or _name(kind, second),
        tree=_tree(options, text),
        candidates=_count("candidates", options.get("candidates"), text),
        levels=_count("levels", options.get("levels"), text),
        settings=options.get("settings"),
        second=second,
        second_settings=options.get("second-settings"),
        pair_settings=options.get("pair-settings"),
        merged_repeats=_count("merged-repeats", options.get("merged-repeats"), text),
    )


def _name(kind: str, second: str | None) -> str:
    return kind if second is None else f"{second.partition('=')[0]}+{kind}"


def _check_options(kind: str, options: Mapping[str, str], text: str) -> None:
    allowed = {"name"}
    if kind in (DRAFTER, *UNTRAINED):
        allowed |= {"tree", "candidates", "second-settings", "pair-settings", "merged-repeats"}
    if kind in UNTRAINED:
        allowed.add("settings")
    if kind == DRAFTER and "candidates" in options:
        allowed.add("levels")
    if others := sorted(options.keys() - allowed):
        raise _malformed(text, f"only the options {', '.join(sorted(allowed))}", others[0])
    if kind in UNTRAINED and options.get("tree", "auto") not in ("auto", "fixed"):
        raise _malformed(text, f"tree=auto or tree=fixed with {kind}", text)
    is_deterministic = kind in (ADED, UNTRAINED_LOOKUP) or options.get("tree") == "deterministic"
    if "merged-repeats" in options and not is_deterministic:
        raise _malformed(text, "merged-repeats only with deterministic trees", text)


def _check_kind(kind: str, path: str, text: str) -> None:
    if kind not in KINDS:
        raise _malformed(text, f"one of {', '.join(KINDS)}", kind)
    if kind not in OPTIONAL_PATH and (kind in WITH_PATH) != bool(path):
        raise _malformed(text, f"{kind}=PATH" if kind in WITH_PATH else kind, text)


def _tree(options: Mapping[str, str], text: str) -> Tree:
    """Return the kind of trees, which are fixed by default if an option gives their size."""
    match options.get("tree", "fixed" if _SIZES.intersection(options) else "auto"):
        case "auto" | "fixed" | "deterministic" | "sampled" as value:
            return value
        case unknown:
            known = ", ".join(f"tree={tree}" for tree in get_args(Tree))
            raise _malformed(text, f"one of {known}", f"tree={unknown}")


def _count(name: str, value: str | None, text: str) -> int | None:
    if value is None:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= MOST_CANDIDATES:
        expected = f"{name}=N with N from 1 to {MOST_CANDIDATES}"
        raise _malformed(text, expected, f"{name}={value}")
    return int(value)


def _malformed(text: str, expected: str, got: str) -> ConfigError:
    return ConfigError(
        f"--method {text} cannot be used",
        expected=expected,
        got=got,
        remedy="see `jakiro bench --help`",
    )
