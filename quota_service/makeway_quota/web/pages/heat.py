"""A large pool as a heat map: one strip of GPUs per node, coloured by team, in a handful of SVG paths.

A thousand nodes of eight GPUs are about 40 KB and twenty elements, where a cell for each GPU would be 15,000. The
script of the page finds the node under the pointer by arithmetic; without it, the list of nodes leads there, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from makeway_api.models import Device, Node, Pool
from markupsafe import Markup

from .look import Look, gpus, number

GPU_WIDTH, GPU_HEIGHT, GAP = 6, 9, 5
"""Pixels of one GPU, and between two nodes."""
WIDTH = 1080
"""Pixels that a map fills before it goes on in the next row."""
ROW_GPUS = 16
"""GPUs of a node that are drawn in one row; larger nodes take several."""
MOST_NODES = 2_000
"""Nodes of one pool that are drawn; the list of nodes has all of them."""

Run = tuple[str, bool, int, int, int]
"""Class, whether over quota, row within the node, first GPU of the run, number of GPUs."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Where each node is: the pitch of a tile in pixels, and the number of tiles in a row."""

    wide: int
    tall: int
    columns: int

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Grid:
        """Return the grid for these nodes: every tile is as large as the largest node needs."""
        most = max((len(node.devices) for node in nodes), default=1) or 1
        wide = min(most, ROW_GPUS) * GPU_WIDTH + GAP
        return cls(wide, -(-most // ROW_GPUS) * GPU_HEIGHT + GAP, max(1, WIDTH // wide))


def heat_map(pool: Pool, look: Look) -> Markup:
    """Return the map of a pool; nodes come in the order of the pool's list."""
    nodes = pool.nodes[:MOST_NODES]
    grid = Grid.of(nodes)
    paths: defaultdict[tuple[str, bool], list[str]] = defaultdict(list)
    for at, node in enumerate(nodes):
        left, top = at % grid.columns * grid.wide, at // grid.columns * grid.tall
        for name, over, row, first, length in _runs(node, look):
            width = length * GPU_WIDTH - 1
            x, y = left + first * GPU_WIDTH, top + row * GPU_HEIGHT
            paths[name, over].append(f"M{x} {y}h{width}v{GPU_HEIGHT - 1}h-{width}z")
    drawn = Markup("").join(_path(name, over, parts) for (name, over), parts in sorted(paths.items()))
    rows = -(-len(nodes) // grid.columns)
    return Markup(
        '<svg class="mw-heat" viewBox="0 0 {} {}" role="img" tabindex="0" aria-label="{}" data-wide="{}" data-tall="{}"'
        ' data-columns="{}" data-nodes="{}">{}</svg>'
    ).format(
        grid.columns * grid.wide,
        rows * grid.tall,
        summary(pool),
        grid.wide,
        grid.tall,
        grid.columns,
        "\n".join(tip(node) for node in nodes),
        drawn,
    )


def tip(node: Node) -> str:
    """Return one line about a node: its name, then what its GPUs do."""
    if not node.ready:
        return f"{node.name} not ready"
    used = sum(1 for device in node.devices if device.holders)
    return f"{node.name} {used}/{len(node.devices)} in use"


def summary(pool: Pool) -> str:
    """Return the pool in one sentence, for screen readers."""
    down = sum(1 for node in pool.nodes if not node.ready)
    ready = f", {down} not ready" if down else ""
    return f"{pool.name}: {number(pool.used)} of {gpus(pool.total)} in use on {len(pool.nodes):,} nodes{ready}"


def _runs(node: Node, look: Look) -> Iterator[Run]:
    """Yield the GPUs of a node as runs of the same look."""
    for row in range(0, len(node.devices), ROW_GPUS):
        first = 0
        for (name, over), run in groupby(_looks(node, node.devices[row : row + ROW_GPUS], look)):
            length = sum(1 for _ in run)
            yield name, over, row // ROW_GPUS, first, length
            first += length


def _looks(node: Node, devices: Iterable[Device], look: Look) -> Iterator[tuple[str, bool]]:
    for device in devices:
        if device.holders:
            holder = device.holders[0]
            yield look.colour(holder.team), holder.over_quota
        elif not node.ready:
            yield "down", False
        else:
            yield ("free" if device.free > 0 else "foreign"), False


def _path(name: str, over: bool, parts: Sequence[str]) -> Markup:
    data = "".join(parts)
    drawn = Markup('<path class="{}" d="{}"></path>').format(name, data)
    if over:
        drawn += Markup('<path class="over" fill="url(#mw-hatch)" d="{}"></path>').format(data)
    return drawn
