"""The nodes: a list with filters, and one node with its GPUs and what runs there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from makeway_api.errors import MakewayError
from makeway_api.models import Node

from ...services.jobs.listing import PAGE_LINES, ListQuery
from ..dependencies import ServicesDep
from .access import PageVisitor
from .filters import Page, Text
from .panel import display_of
from .render import page, part

STATES = {
    "free": "with a free GPU",
    "idle": "without any work",
    "full": "with no free GPU",
    "down": "not ready",
}
"""The filter by state, as people read it."""

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class NodeLine:
    """A node as one line of the list; counts are GPUs."""

    node: Node
    pool: str
    used: float
    teams: Sequence[str]

    @property
    def total(self) -> int:
        """The number of GPUs."""
        return len(self.node.devices)

    def is_in(self, state: str) -> bool:
        """Whether the node is in a state of the filter."""
        node = self.node
        free = any(device.free > 0 for device in node.devices)
        return {
            "free": free,
            "full": node.ready and not free,
            "idle": node.ready and not self.used,
            "down": not node.ready,
        }.get(state, True)


@router.get("/nodes")
async def nodes_page(
    request: Request,
    visitor: PageVisitor,
    services: ServicesDep,
    pool: Text = "",
    state: Annotated[str, Query(pattern=f"^({'|'.join(STATES)})?$")] = "",
    team: Text = "",
    q: Text = "",
    number: Page = 1,
) -> Response:
    """Every node that matches, fifty a page."""
    caller, settings = visitor.caller, request.app.state.settings
    usage, pools = await services.usage.usage(caller), await services.inventory.pools(caller)
    words = q.casefold().strip()

    def matching() -> list[NodeLine]:  # ten thousand nodes take a second: not in the event loop
        lines = (_line(node, known.name) for known in pools if pool in ("", known.name) for node in known.nodes)
        return [
            line for line in lines
            if line.is_in(state) and (not team or team in line.teams) and words in line.node.name.casefold()
        ]  # fmt: skip

    result = await services.context.call(matching)
    pages = max(1, -(-len(result) // PAGE_LINES))
    number = min(number, pages)
    shown = result[(number - 1) * PAGE_LINES :][:PAGE_LINES]
    return await page(
        request,
        "nodes.html",
        visitor,
        lines=shown,
        total=len(result),
        number=number,
        pages=pages,
        pools=[known.name for known in pools],
        states=STATES,
        chosen={"pool": pool, "state": state, "team": team, "q": q},
        display=display_of(services, caller, usage, pools, settings, nodes=[]),
    )


@router.get("/nodes/{name}")
@router.get("/live/nodes/{name}")
async def node_page(request: Request, name: str, visitor: PageVisitor, services: ServicesDep) -> Response:
    """Show one node: its GPUs, the workloads that hold them, and what runs there."""
    caller, settings = visitor.caller, request.app.state.settings
    usage, pools = await services.usage.usage(caller), await services.inventory.pools(caller)
    result = next(((listed, node) for listed in pools for node in listed.nodes if node.name == name), None)
    if result is None:
        raise MakewayError(f"There is no node {name[:80]} now.", code="not_found", status=404)
    pool, node = result
    return await page(
        request,
        part(request, "node"),
        visitor,
        pool=pool,
        node=node,
        line=_line(node, pool.name),
        running=await services.listings.listing(caller, ListQuery("running", node=name, lines=100)),
        display=display_of(services, caller, usage, pools, settings, nodes=[node]),
    )


def _line(node: Node, pool: str) -> NodeLine:
    held = [holder for device in node.devices for holder in device.holders]
    return NodeLine(node, pool, round(sum(h.gpus for h in held), 3), sorted({h.team for h in held if h.team}))
