"""Names of methods are parsed, and malformed names are refused."""

from pathlib import Path

import pytest

from inference.benchmark.method_names import MethodName, parse_methods
from jakiro.errors import ConfigError


def test_a_method_has_a_kind_a_path_and_options_in_any_order() -> None:
    texts = [
        "autoregressive",
        "drafter=runs/a,candidates=12,tree=fixed",
        "drafter=b,name=other",
    ]
    texts += ["drafter=b,tree=auto,name=auto"]
    texts += ["drafter=b,tree=deterministic,name=best"]
    texts += ["drafter=b,tree=sampled,candidates=7,name=pays"]
    texts += [
        "lm=small,candidates=12",
        "aded",
        "aded=t,candidates=8,name=warm",
        "lookup,settings=s.yaml",
    ]
    assert parse_methods(texts) == [
        MethodName("autoregressive", None, "autoregressive"),
        MethodName("drafter", "runs/a", "drafter", "fixed", 12),
        MethodName("drafter", "b", "other"),
        MethodName("drafter", "b", "auto", "auto"),
        MethodName("drafter", "b", "best", "deterministic"),
        MethodName("drafter", "b", "pays", "sampled", 7),
        MethodName("lm", "small", "lm", "fixed", 12),
        MethodName("aded", None, "aded"),
        MethodName("aded", "t", "warm", "fixed", 8),
        MethodName("lookup", None, "lookup", "fixed", settings="s.yaml"),
    ]


def test_a_second_drafter_stands_before_the_other() -> None:
    texts = ["aded+drafter=a,candidates=12,tree=deterministic", "lookup+lm=b"]
    texts += ["aded=t+lm=c,name=both"]
    assert parse_methods(texts) == [
        MethodName("drafter", "a", "aded+drafter", "deterministic", 12, second="aded"),
        MethodName("lm", "b", "lookup+lm", second="lookup"),
        MethodName("lm", "c", "both", second="aded=t"),
    ]


def test_repeats_and_settings_of_the_second_drafter_have_names() -> None:
    texts = ["lookup,merged-repeats=24", "aded+drafter=a,second-settings=s.yaml"]
    texts += ["lookup+lm=a,pair-settings=t.yaml,candidates=8"]
    assert parse_methods(texts) == [
        MethodName("lookup", None, "lookup", "fixed", merged_repeats=24),
        MethodName("drafter", "a", "aded+drafter", second="aded", second_settings="s.yaml"),
        MethodName("lm", "a", "lookup+lm", "fixed", 8, second="lookup", pair_settings="t.yaml"),
    ]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["plan"], "one of transformers"),
        (["drafter"], "drafter=PATH"),
        (["autoregressive=path"], "expected: autoregressive"),
        (["drafter=a,tree=large"], "tree=auto, tree=fixed, tree=deterministic, tree=sampled"),
        (["drafter=a,candidates=0"], "N from 1 to 4096"),
        (["drafter=a,levels=8"], "got: levels"),
        (["aded,candidates=8,levels=8"], "got: levels"),
        (["autoregressive,candidates=3"], "got: candidates"),
        (["lookup,tree=sampled"], "tree=auto or tree=fixed with lookup"),
        (["drafter=a,settings=b"], "got: settings"),
        (["drafter=a,pair-settings=b"], "two drafters"),
        (["drafter=a,merged-repeats=8"], "merged-repeats only with deterministic trees"),
        (["drafter=a,tree=auto,candidates=3"], "selects the number of candidates"),
        (["autoregressive,name=lookup (3)"], "without parentheses"),
        (["aded+drafter=a,foo=1,name=x"], "got: foo"),
        (["drafter=a", "drafter=b"], "a different name for each"),
    ],
)
def test_a_wrong_name_is_refused_with_what_was_expected(texts: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_methods(texts)


def test_a_path_that_exists_may_look_like_an_option(tmp_path: Path) -> None:
    path = tmp_path / "a,b=c"
    path.mkdir()
    (method,) = parse_methods([f"drafter={path},name=mine"])
    assert (method.path, method.name) == (str(path), "mine")
