"""A table of text."""

from __future__ import annotations

from collections.abc import Sequence


def render_table(rows: Sequence[Sequence[str]], left: int) -> str:
    """The header, a rule and the rows, indented; the first `left` columns lean left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("   " + "  ".join(cells).rstrip())
    lines.insert(1, "   " + "  ".join("-" * width for width in widths))
    return "\n".join(lines)
