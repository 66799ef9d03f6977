"""The layout of the packages: few modules at the top, none of them long, tests beside each part."""

import ast
from collections import Counter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("inference", "jakiro", "moa", "training")
MOST_AT_THE_TOP = 8
MOST_LINES = 350  # of a module without its docstrings


@pytest.mark.parametrize("package", PACKAGES)
def test_few_modules_lie_at_the_top_of_a_package(package: str) -> None:
    modules = [path for path in (ROOT / package).glob("*.py") if not path.stem.startswith("__")]
    assert len(modules) <= MOST_AT_THE_TOP


def test_no_module_is_long() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): _num_lines(path.read_text()) for path in modules}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def _num_lines(source: str) -> int:
    """Return the number of lines of a module without its docstrings, those of fields included."""
    texts = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    lengths = [(text.end_lineno or text.lineno) - text.lineno + 1 for text in texts]
    return len(source.splitlines()) - sum(lengths)


def _parts() -> set[str]:
    """Return the modules with exactly one importer."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    modules = {name for name in graph.modules if not _is_package(name)}
    importers = {name: graph.find_modules_that_directly_import(name) for name in modules}
    return {name for name, found in importers.items() if len(found) == 1}


def _is_package(module: str) -> bool:
    return (ROOT / module.replace(".", "/")).is_dir()


def test_a_module_with_a_single_importer_has_a_test_of_its_own() -> None:
    assert [name for name in sorted(_parts()) if not _test_of(name).exists()] == []


def _test_of(module: str) -> Path:
    *folders, name = module.split(".")
    return ROOT.joinpath("tests", *folders, f"test_{name}.py")


def test_no_two_public_classes_have_the_same_name() -> None:
    found = [
        node.name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [name for name, count in Counter(found).items() if count > 1] == []
