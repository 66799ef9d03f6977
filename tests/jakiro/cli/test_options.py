"""An option that several commands share is described once."""

import ast
from collections import defaultdict
from pathlib import Path

import jakiro.cli


def test_no_two_commands_describe_the_same_option() -> None:
    commands = defaultdict(set)
    for path in Path(jakiro.cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg) and node.annotation is not None:
                text = ast.unparse(node.annotation)
                if text.startswith("Annotated"):
                    commands[node.arg, text].add(path.stem)
    alike = {"generate", "connect"}  # two commands with the same purpose
    shared = {name: found for (name, _), found in commands.items() if len(found) > 1}
    assert {name: found for name, found in shared.items() if found != alike} == {}
