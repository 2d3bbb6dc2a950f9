"""The layout as a picture: ranks in a grid whose rows and columns are mesh axes."""

from rich.text import Text

from fivefold.spec.mesh import AXES, Mesh

DRAWN_RANKS = 16  # more are summarised


def layout_picture(mesh: Mesh) -> Text:
    """A grid of all ranks, or for more than `DRAWN_RANKS` the group of rank 0 along each axis."""
    if mesh.world_size > DRAWN_RANKS:
        return _summary(mesh)
    return _grid(mesh)


def _grid(mesh: Mesh) -> Text:
    """The inner half of the axes in use runs over the columns, the outer half over the rows:

    dp_shard   0       1
          tp   0   1   0   1
             ┌───┬───┬───┬───┐
        pp 0 │ 0 │ 1 │ 2 │ 3 │
        pp 1 │ 4 │ 5 │ 6 │ 7 │
             └───┴───┴───┴───┘
    """
    axes = [axis for axis in AXES if getattr(mesh, axis) > 1]
    across = axes[len(axes) // 2 :]
    rows = mesh.groups(*across)  # ranks that differ only on the axes across; one row each
    down = [axis for axis in axes if axis not in across]
    labels = [_coordinates(mesh, row[0], down) or "rank" for row in rows]
    width = max(map(len, [*labels, *across]))
    cell = 3 if len(rows[0]) <= 12 else 2  # 16 narrow columns fit a page of 80
    picture = Text(no_wrap=True)
    for axis in across:
        picture.append(f"{axis:>{width}}  ", "dim")
        picture.append(_column_heads(mesh, rows[0], axis, cell) + "\n", "dim")
    rules = ["─" * cell] * len(rows[0])
    picture.append(" " * width + f" ┌{'┬'.join(rules)}┐\n", "dim")
    for label, row in zip(labels, rows, strict=True):
        picture.append(f"{label:>{width}} │", "dim")
        for rank in row:
            picture.append(f"{rank:>2}".ljust(cell), "bold")
            picture.append("│", "dim")
        picture.append("\n")
    picture.append(" " * width + f" └{'┴'.join(rules)}┘", "dim")
    return picture


def _column_heads(mesh: Mesh, row: list[int], axis: str, cell: int) -> str:
    """The coordinates of a row's ranks on `axis`, written only where they change."""
    heads, last = "", None
    for rank in row:
        here = mesh.coordinates(rank)[axis]
        heads += (f"{here:>2}" if here != last else "").ljust(cell + 1)
        last = here
    return heads.rstrip()


def _summary(mesh: Mesh) -> Text:
    axes = [axis for axis in AXES if getattr(mesh, axis) > 1]
    width, digits = max(map(len, axes)), len(str(mesh.world_size))
    lines = [f"ranks 0 … {mesh.world_size - 1}; rank 0 shares each axis with"]
    for axis in axes:
        lines.append(f"{axis:>{width}} {getattr(mesh, axis):>{digits}}  {_ranks(mesh.groups(axis)[0])}")
    return Text("\n".join(lines), "dim")


def _ranks(ranks: list[int]) -> str:
    if len(ranks) <= 5:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, {ranks[2]}, … {ranks[-1]}"


def _coordinates(mesh: Mesh, rank: int, axes: list[str]) -> str:
    at = mesh.coordinates(rank)
    return " ".join(f"{axis} {at[axis]}" for axis in axes)
