"""Names of the values of options in help texts, such as N for a number and nothing for a flag.

Without these names, help texts show the names of Python types.
"""

from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

_BY_OPTION = {"temperature": "T", "temperatures": "T", "top_p": "P", "top_k": "K"}
_BY_TYPE = {
    "bool": "",
    "int": "N",
    "int range": "N",
    "float": "X",
    "float range": "X",
    "list[float]": "X",
}


class _NamedValues:
    """Mix-in that names the values of a command's options; a base class of typer follows it."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, whose values have names."""
        command: Any = super()
        return [_named(parameter, ctx) for parameter in command.get_params(ctx)]


class NamedValuesCommand(_NamedValues, TyperCommand):
    """A command whose help names the values of options."""


class NamedValuesGroup(_NamedValues, TyperGroup):
    """A group of commands whose help names the values of options."""


def _named(parameter: Any, context: Any) -> Any:
    """Return a parameter after naming its value, unless its declaration has a metavar."""
    if isinstance(parameter, TyperArgument):
        parameter.display_type_rich = _no_type  # type: ignore[method-assign]
        parameter.metavar = parameter.metavar or str(parameter.name).upper()
    elif isinstance(parameter, TyperOption) and parameter.metavar is None:
        kind, name = parameter.display_type(context).strip("<>"), str(parameter.name)
        by_type = kind if "|" in kind else _BY_TYPE.get(kind, name.upper())
        parameter.metavar = _BY_OPTION.get(name, by_type)
    return parameter


def _no_type(ctx: object) -> None:
    """Return None: the name of an argument is enough."""
