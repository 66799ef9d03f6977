"""Lines of tables in Markdown."""

from collections.abc import Container, Sequence


def markdown_head(names: Sequence[str], left: Container[str]) -> list[str]:
    """Return the two lines above a table's rows; what is not `left` is aligned to the right."""
    return [markdown_line(names), markdown_line(["---" if one in left else "--:" for one in names])]


def markdown_line(cells: Sequence[str]) -> str:
    """Return one row."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
