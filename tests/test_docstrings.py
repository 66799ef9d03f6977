"""Docstrings: headlines are noun phrases or plain statements, and arguments are described."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("inference", "jakiro", "moa", "training")
RIDDLES = ("What", "Which", "Where", "How", "Who", "When", "Whether")
# Words with which a description begins that lacks its noun.
FRAGMENTS = {"of", "in", "that", "which", "what", "whose", "how", "where", "with", "to", "is"}
COMMANDS = Path("jakiro/cli")  # options of commands are described by their help texts
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Public functions of two or more parameters without `Args`. The number only shrinks.
MOST_WITHOUT_ARGS = 0


def _modules() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def _public_functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node)
        elif isinstance(node, Function) and not node.name.startswith("_"):
            yield node


def _parameters(function: Function) -> list[str]:
    every = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return [each.arg for each in every if each.arg not in {"self", "cls"}]


def test_headlines_of_modules_are_noun_phrases_or_plain_statements() -> None:
    headlines = {path: (ast.get_docstring(tree) or "none").split() for path, tree in _modules()}
    assert [str(path) for path, words in headlines.items() if words[0] in RIDDLES] == []


def test_functions_of_several_parameters_describe_them() -> None:
    silent = [
        f"{path}:{function.lineno} {function.name}"
        for path, tree in _modules()
        for function in _public_functions(tree)
        if path.parent != COMMANDS
        if len(_parameters(function)) > 1 and "Args:" not in (ast.get_docstring(function) or "")
    ]
    assert len(silent) <= MOST_WITHOUT_ARGS, "\n".join(silent)


def test_args_describe_all_parameters_in_their_order() -> None:
    wrong = [
        f"{path}:{function.lineno} {function.name}: {names} instead of {parameters}"
        for path, tree in _modules()
        for function in _public_functions(tree)
        if (names := list(_described(ast.get_docstring(function) or "")))
        if names != (parameters := [*_parameters(function), *_variadic(function)])
        if names != _parameters(function)  # further arguments may be described in prose
    ]
    assert wrong == []


def test_descriptions_of_parameters_are_noun_phrases() -> None:
    fragments = [
        f"{path}:{function.lineno} {function.name}: {name}: {text}"
        for path, tree in _modules()
        for function in _public_functions(tree)
        for name, text in _entries(ast.get_docstring(function) or "")
        if text.split()[:1] and text.split()[0] in FRAGMENTS
    ]
    assert fragments == []


def _variadic(function: Function) -> list[str]:
    stars = ((function.args.vararg, "*"), (function.args.kwarg, "**"))
    return [star + argument.arg for argument, star in stars if argument is not None]


def _described(docstring: str) -> Iterator[str]:
    """Yield the names that a docstring's `Args` section describes."""
    yield from (name for name, _ in _entries(docstring))


def _entries(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the entries of a docstring's `Args` section: names and first lines of descriptions."""
    _, _, section = docstring.partition("Args:\n")
    for line in section.splitlines():
        if line and not line.startswith(" "):
            return
        if line.startswith("    ") and not line.startswith("     ") and ": " in line:
            name, _, text = line.strip().partition(": ")
            yield name, text
