"""Names of methods are parsed, and malformed names are refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from inference.benchmark.settings import ComparisonSettings, MethodName, parse_methods
from jakiro.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("autoregressive", {}),
        ("transformers-lookup=5", {"path": "5"}),
        ("drafter=runs/a,candidates=12,tree=fixed", {"path": "runs/a", "candidates": 12}),
        ("drafter=b,name=other", {"path": "b", "name": "other", "tree": "auto"}),
        ("drafter=b,tree=auto,name=auto", {"path": "b", "name": "auto", "tree": "auto"}),
        ("drafter=b,tree=deterministic", {"path": "b", "tree": "deterministic"}),
        ("drafter=b,levels=8,candidates=7", {"path": "b", "levels": 8, "candidates": 7}),
        ("lm=small,candidates=12", {"path": "small", "candidates": 12}),
        ("aded", {"tree": "auto"}),
        ("aded=t,candidates=8,name=warm", {"path": "t", "candidates": 8, "name": "warm"}),
        ("lookup,settings=s.yaml", {"settings": Path("s.yaml")}),
        ("lookup,merged-repeats=24", {"merged_repeats": 24}),
    ],
)
def test_a_method_has_a_kind_a_path_and_options_in_any_order(
    text: str, fields: dict[str, Any]
) -> None:
    (method,) = parse_methods([text])
    kind = re.split("[=,]", text)[0]
    tree = "auto" if not {"candidates", "settings", "merged_repeats"} & fields.keys() else "fixed"
    assert method == MethodName(**{"kind": kind, "name": kind, "tree": tree, **fields})


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("aded+drafter=a,tree=fixed", {"kind": "drafter", "name": "aded+drafter", "tree": "fixed"}),
        ("aded=t+lm=a,name=both", {"kind": "lm", "name": "both", "second": "aded=t"}),
    ],
)
def test_a_second_drafter_stands_before_the_other(text: str, fields: dict[str, Any]) -> None:
    pair = {"kind": "drafter", "path": "a", "name": "aded+drafter", "second": "aded"}
    assert parse_methods([text]) == [MethodName(**pair | fields)]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["plan"], "one of transformers"),
        (["drafter"], "drafter=PATH"),
        (["transformers-lookup=many"], "transformers-lookup=N"),
        (["transformers-lookup=0"], "a positive number"),
        (["autoregressive=path"], "autoregressive without a path"),
        (["drafter=a,tree=large"], "'auto', 'fixed' or 'deterministic'"),
        (["drafter=a,candidates=0"], "greater than or equal to 1"),
        (["drafter=a,levels=8"], "only the options"),
        (["lookup,tree=deterministic"], "tree=auto or tree=fixed with lookup"),
        (["drafter=a,merged-repeats=8"], "merged-repeats only with deterministic trees"),
        (["drafter=a,tree=auto,candidates=3"], "selects the number of candidates"),
        (["drafter=a", "drafter=b"], "two methods are called drafter"),
    ],
)
def test_a_wrong_name_is_refused_with_what_was_expected(texts: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_methods(texts)


def test_a_temperature_is_measured_once() -> None:
    settings = ComparisonSettings(methods=("lookup",), prompts="p", temperatures=(0.0, 1.0, 0.0))
    assert settings.temperatures == (0.0, 1.0)
