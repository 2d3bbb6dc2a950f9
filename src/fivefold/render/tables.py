"""Plain tables for a terminal: aligned columns, numbers to the right."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows under a head; the first `left` columns are aligned to the left, the others to the right."""
    widths = [max(len(row[index]) for row in (head, *rows)) for index in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(head), "  ".join("─" * width for width in widths), *(line(row) for row in rows)])


def bar(value: float, limit: float, width: int = 30) -> str:
    """A bar of `value` against `limit`; what goes beyond it is marked."""
    filled = round(width * min(value / limit, 1.0)) if limit else 0
    return "█" * filled + "░" * (width - filled) + (" over" if value > limit else "")
