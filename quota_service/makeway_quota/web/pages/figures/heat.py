"""A large pool as a heat map: one strip of GPUs per node, coloured by team, in a handful of SVG paths.

A thousand nodes of eight GPUs are about 40 KB and twenty elements, where a cell for each GPU would be 15,000. The
script of the page finds the node under the pointer by arithmetic; without it, the list of nodes leads there, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from makeway_api.models import Node, Pool
from makeway_api.quantities import gpus, number
from markupsafe import Markup

from .display import Display
from .node_facts import ROW_GPUS, NodeFacts, facts_of

GPU_WIDTH, GPU_HEIGHT, GAP = 6, 9, 5
"""Pixels of one GPU, and between two nodes."""
WIDTH = 1080
"""Pixels that a map fills before it goes on in the next row."""
MAX_NODES = 2_000
"""Nodes of one pool that are drawn; the list of nodes has all of them."""
BLOCK = 32
"""Nodes per block; a block is drawn again only when one of its nodes changed"""
MAX_BLOCKS = 4_000
"""Blocks kept in memory; beyond that, all are dropped"""
MAX_DRAWINGS = 4
"""Drawings of a block in memory, the newest: visitors who see other teams may see other colours"""

Paths = Mapping[tuple[str, bool], str]
"""The outlines of GPUs by class, and by whether they are over quota"""


@dataclass(frozen=True, slots=True)
class Grid:
    """Where each node is: the pitch of a tile in pixels, and the number of tiles in a row."""

    wide: int
    tall: int
    columns: int

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Grid:
        """Return the grid for these nodes: every tile is as large as the largest node needs."""
        maximum = max((len(node.devices) for node in nodes), default=1) or 1
        wide = min(maximum, ROW_GPUS) * GPU_WIDTH + GAP
        return cls(wide, -(-maximum // ROW_GPUS) * GPU_HEIGHT + GAP, max(1, WIDTH // wide))


def heat_map(pool: Pool, display: Display) -> Markup:
    """Return the map of a pool; nodes come in the order of the pool's list."""
    nodes = pool.nodes[:MAX_NODES]
    grid = Grid.of(nodes)
    blocks = [_block(pool.name, at, nodes[at : at + BLOCK], grid, display) for at in range(0, len(nodes), BLOCK)]
    paths: defaultdict[tuple[str, bool], list[str]] = defaultdict(list)
    for block in blocks:
        for key, data in block.paths.items():
            paths[key].append(data)
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
        "\n".join(block.tips for block in blocks),
        drawn,
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """A drawing of some nodes of a pool that follow each other; it holds neither the nodes nor their facts."""

    serials: Sequence[int]
    """of the facts of the nodes"""
    colours: Sequence[tuple[str, str]]
    """of the teams on these nodes"""
    paths: Paths
    tips: str


_KNOWN: dict[tuple[str, int, Grid], Sequence[_Block]] = {}
"""Drawings by pool, position and grid, newest first: the same for all who see these teams in these colours"""


def _block(pool: str, start: int, nodes: Sequence[Node], grid: Grid, display: Display) -> _Block:
    """Return a block of nodes from position `start` on, drawn again only if a node or a colour changed."""
    key, facts = (pool, start, grid), [facts_of(node) for node in nodes]
    serials = [node.serial for node in facts]
    kept = _KNOWN.get(key, ())
    for known in kept:
        if known.serials == serials and all(display.colour(team) == colour for team, colour in known.colours):
            return known
    colours = [(team, display.colour(team)) for team in frozenset().union(*(node.teams for node in facts))]
    block = _Block(serials, colours, _paths(start, facts, grid, display), "\n".join(node.tip for node in facts))
    if key not in _KNOWN and len(_KNOWN) >= MAX_BLOCKS:
        _KNOWN.clear()
    _KNOWN[key] = (block, *kept[: MAX_DRAWINGS - 1])
    return block


def _paths(start: int, facts: Sequence[NodeFacts], grid: Grid, display: Display) -> Paths:
    paths: defaultdict[tuple[str, bool], list[str]] = defaultdict(list)
    for at, node in enumerate(facts, start):
        left, top = at % grid.columns * grid.wide, at // grid.columns * grid.tall
        for strip in node.strips:
            name = strip.state if strip.team is None else display.colour(strip.team)
            width = strip.length * GPU_WIDTH - 1
            x, y = left + strip.first * GPU_WIDTH, top + strip.row * GPU_HEIGHT
            paths[name, strip.over_quota].append(f"M{x} {y}h{width}v{GPU_HEIGHT - 1}h-{width}z")
    return {key: "\n".join(parts) for key, parts in paths.items()}


def summary(pool: Pool) -> str:
    """Return the pool in one sentence, for screen readers."""
    down = sum(1 for node in pool.nodes if not node.ready)
    ready = f", {down} not ready" if down else ""
    return f"{pool.name}: {number(pool.used)} of {gpus(pool.total)} in use on {len(pool.nodes):,} nodes{ready}"


def _path(name: str, over: bool, parts: Sequence[str]) -> Markup:
    data = "\n".join(parts)  # a line for each strip: what is sent is what changed
    drawn = Markup('<path class="{}" d="{}"></path>').format(name, data)
    if over:
        drawn += Markup('<path class="over" fill="url(#mw-hatch)" d="{}"></path>').format(data)
    return drawn
