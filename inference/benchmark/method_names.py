"""Methods as a caller names them: `plain`, or `drafter=PATH,tree=auto,name=mine`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from inference.drafters.registry import ADED, LM, UNTRAINED, PairName
from inference.drafters.registry import LOOKUP as UNTRAINED_LOOKUP
from jakiro.errors import ConfigError

TRANSFORMERS, LOOKUP, ASSISTED = "transformers", "transformers-lookup", "transformers-assisted"
PLAIN, DRAFTER = "plain", "drafter"
KINDS = (TRANSFORMERS, LOOKUP, ASSISTED, PLAIN, DRAFTER, *UNTRAINED)
WITH_PATH = (ASSISTED, DRAFTER, LM)
PERHAPS_WITH_PATH = (ADED,)
SINGLE_PROMPT = (LOOKUP, ASSISTED)  # transformers drafts for one prompt at a time

Tree = Literal["trained", "auto", "chosen", "drawn"]
Candidates = int | Literal["costs"]

_OPTIONS = (
    "tree",
    "candidates",
    "levels",
    "settings",
    "beside-settings",
    "sharing-settings",
    "merged-repeats",
    "name",
)
_OPTION = re.compile(rf",({'|'.join(_OPTIONS)})=([^,]*)$")


@dataclass(frozen=True)
class MethodName:
    """One method.

    Attributes:
        kind: which method it is.
        path: of the model that drafts, or of the table that `aded` begins with.
        name: what it is called in the results.
        tree: "trained" for the schedule of its training, "auto" for what pays in each round,
            "chosen" for trees of the best candidates at every temperature; "drawn" says that
            candidates are drawn where tokens are, as "trained" has it, too.
        candidates: nodes of a draft tree; "costs" for the trees that pay best by measured costs;
            None for the default.
        levels: passes of the drafter for a tree; None for those of its training.
        settings: file with the settings of a drafter that needs no training.
        beside: `aded`, `aded=TABLE` or `lookup`, which shares trees with the drafter; None: alone.
        beside_settings: file with the settings of that one.
        sharing_settings: file with the settings of how both share trees.
        merged_repeats: candidates of a tree that goes on where it repeats itself; None: none does.
    """

    kind: str
    path: str | None = None
    name: str = ""
    tree: Tree = "trained"
    candidates: Candidates | None = None
    levels: int | None = None
    settings: str | None = None
    beside: str | None = None
    beside_settings: str | None = None
    sharing_settings: str | None = None
    merged_repeats: int | None = None


def parse_methods(texts: Sequence[str]) -> list[MethodName]:
    """Return the methods named by `NAME[=PATH]` and options, each `,tree=...` or another field.

    Before `drafter=PATH` or `lm=PATH` there may be what drafts beside it, as in `lookup+lm=PATH`.

    Raises:
        ConfigError: a name is unknown or malformed, or two methods have one name.
    """
    methods = [_parse(text) for text in texts]
    names = [method.name for method in methods]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            "two methods have one name",
            expected="a different name for each",
            got=", ".join(repeated),
            remedy="add ,name=... to one of them",
        )
    return methods


def check_batch_size(names: Sequence[MethodName], batch_size: int) -> None:
    """Refuse methods that cannot decode so many prompts together.

    Raises:
        ConfigError: there is one.
    """
    for one in names:
        if batch_size > 1 and one.kind in SINGLE_PROMPT:
            raise ConfigError(
                f"the method {one.kind} decodes one prompt at a time",
                expected="a batch size of 1",
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
    beside = None if pair is None else pair.beside
    _check_kind(kind, path, text)
    if "(" in options.get("name", ""):  # settings of one method are told apart like this
        raise _malformed(text, "a name without parentheses", options["name"])
    if options.get("tree") == "auto" and "candidates" in options:
        raise _malformed(text, "tree=auto, which chooses its own size, or candidates=N", text)
    if options.get("tree") == "auto" and pair is not None:
        raise _malformed(text, "tree=auto, or two drafters that share trees", text)
    _check_options(kind, options, text)
    for one in ("beside-settings", "sharing-settings"):
        if beside is None and one in options:
            raise _malformed(text, "two drafters, such as aded+drafter=PATH", f"{one} alone")
    return MethodName(
        kind=kind,
        path=path or None,
        name=options.get("name") or _name(kind, beside),
        tree=_tree(options.get("tree", "trained"), text),
        candidates=_candidates(options.get("candidates"), text),
        levels=_count("levels", options.get("levels"), text),
        settings=options.get("settings"),
        beside=beside,
        beside_settings=options.get("beside-settings"),
        sharing_settings=options.get("sharing-settings"),
        merged_repeats=_count("merged-repeats", options.get("merged-repeats"), text),
    )


def _name(kind: str, beside: str | None) -> str:
    return kind if beside is None else f"{beside.partition('=')[0]}+{kind}"


def _check_options(kind: str, options: Mapping[str, str], text: str) -> None:
    if kind != DRAFTER and ("tree" in options or options.get("candidates") == "costs"):
        raise _malformed(text, f"options of {DRAFTER}=PATH only", "tree or candidates=costs")
    sized = kind == DRAFTER and options.get("candidates", "costs") != "costs"
    if "levels" in options and not sized:
        raise _malformed(text, f"levels beside {DRAFTER}=PATH,candidates=N", text)
    if kind not in (DRAFTER, *UNTRAINED) and "candidates" in options:
        raise _malformed(text, f"options of {DRAFTER}=PATH and {', '.join(UNTRAINED)}", text)
    if kind not in UNTRAINED and "settings" in options:
        raise _malformed(text, f"settings of {', '.join(UNTRAINED)} only", text)
    chooses = kind in (ADED, UNTRAINED_LOOKUP) or options.get("tree") == "chosen"
    if "merged-repeats" in options and not chooses:
        expected = (
            f"a method that chooses: {ADED}, {UNTRAINED_LOOKUP}, or {DRAFTER}=PATH,tree=chosen"
        )
        raise _malformed(text, expected, text)


def _check_kind(kind: str, path: str, text: str) -> None:
    if kind not in KINDS:
        raise _malformed(text, f"one of {', '.join(KINDS)}", kind)
    if kind not in PERHAPS_WITH_PATH and (kind in WITH_PATH) != bool(path):
        raise _malformed(text, f"{kind}=PATH" if kind in WITH_PATH else kind, text)


def _tree(value: str, text: str) -> Tree:
    match value:
        case "trained" | "auto" | "chosen" | "drawn":
            return value
    known = ", ".join(f"tree={one}" for one in get_args(Tree))
    raise _malformed(text, f"one of {known}", f"tree={value}")


def _candidates(value: str | None, text: str) -> Candidates | None:
    return "costs" if value == "costs" else _count("candidates", value, text)


def _count(name: str, value: str | None, text: str) -> int | None:
    if value is None:
        return None
    if not value.isdecimal() or int(value) < 1:
        costs = ", or candidates=costs" if name == "candidates" else ""
        raise _malformed(text, f"{name}=N with N at least 1{costs}", f"{name}={value}")
    return int(value)


def _malformed(text: str, expected: str, got: str) -> ConfigError:
    return ConfigError(
        f"--method {text} cannot be used",
        expected=expected,
        got=got,
        remedy="see `jakiro bench --help`",
    )
