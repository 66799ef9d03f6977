"""The layout of the packages: few modules at the top, and tests for modules of one importer."""

import ast
from collections import Counter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("inference", "jakiro", "moa", "training")
MOST_AT_THE_TOP = 8


@pytest.mark.parametrize("package", PACKAGES)
def test_few_modules_lie_at_the_top_of_a_package(package: str) -> None:
    modules = [path for path in (ROOT / package).glob("*.py") if not path.stem.startswith("__")]
    assert len(modules) <= MOST_AT_THE_TOP


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
