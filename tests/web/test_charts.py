"""Pictures: sums of widths, fractions, words for those who do not see them, colours that stay."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from weakref import ref

import pytest
from makeway_api.models import Device, Holder, Kind, Node, Pool, State, TeamUsage
from makeway_quota.web.pages.figures import heat
from makeway_quota.web.pages.figures.bars import bar, bar_scale, sentence
from makeway_quota.web.pages.figures.cells import cell_tip, node
from makeway_quota.web.pages.figures.display import SLOTS, Display, colours
from makeway_quota.web.pages.figures.heat import GPU_WIDTH, ROW_GPUS, WIDTH, Grid, heat_map
from makeway_quota.web.pages.figures.node_facts import facts_of
from web.portal import EVIL

DISPLAY = Display(classes={"rnd": "t0", "devops": "t1"}, titles={"rnd": "R&D"}, jobs="/jobs/", devices=10)


def holder(team: str = "rnd", gpus: float = 1, kind: Kind = Kind.JOB, over: bool = False, name: str = "n") -> Holder:
    return Holder(
        workload="j-1", kind=kind, team=team, owner="ana", name=name, gpus=gpus, over_quota=over, state=State.RUNNING
    )


def machine(*devices: Device, ready: bool = True) -> Node:
    return Node(name="n1", pool="gpu", devices=list(devices), ready=ready)


def team(**changes: object) -> TeamUsage:
    facts = {"team": "rnd", "reserved": 5, "limit": 9, "used": 0, "guaranteed": 0, "in_quota": 0, "borrowed": 0}
    return TeamUsage.model_validate({**facts, "lent": 0, "free": 5, **changes})


def widths(svg: str, name: str) -> list[float]:
    return [float(width) for width in re.findall(rf'class="seg {name} t0" x="[^"]*%" y="6" width="([^"]*)%"', svg)]


def test_a_bar_adds_up_to_its_scale() -> None:
    usage = team(used=8, guaranteed=1, in_quota=4, borrowed=3, free=0)
    svg = str(bar(usage, 10, "t0"))
    assert [widths(svg, name) for name in ("guaranteed", "in_quota", "borrowed", "lent", "free")] == [
        [10], [40], [30], [], [],
    ]  # fmt: skip
    assert 'class="tick" x1="50%"' in svg
    assert 'class="end" x1="90%"' in svg
    assert sentence(usage) == "rnd uses 8 GPUs; reserved 5, limit 9: 1 in sessions, 4 in quota, 3 borrowed."


def test_lent_and_free_fill_up_to_the_reservation() -> None:
    svg = str(bar(team(used=1.5, guaranteed=0.5, in_quota=1, lent=2, free=1.5), 10, "t0"))
    assert sum(sum(widths(svg, name)) for name in ("guaranteed", "in_quota", "lent", "free")) == 50


def test_a_team_without_limit_reaches_the_end_of_the_scale() -> None:
    usage = team(limit=None)
    assert bar_scale([usage], 40) == pytest.approx(40, rel=0.01)
    assert 'class="end"' not in str(bar(usage, 40, "t0"))
    assert "no limit" in sentence(usage)


def test_a_bar_of_nothing_is_no_division_by_zero() -> None:
    assert "svg" in str(bar(team(reserved=0, limit=0, free=0), 0, "t0"))
    assert bar_scale([], 0) > 0


def test_shares_of_a_device_fill_their_part_of_the_cell() -> None:
    drawn = str(node(machine(Device(index=0, free=0.25, holders=[holder(gpus=0.5), holder("devops", 0.25)])), DISPLAY))
    assert re.findall(r'class="mw-box fill (t\d) running" x="([\d.]+)" y="0" width="([\d.]+)"', drawn) == [
        ("t0", "0", "37"), ("t1", "37", "18.5"),
    ]  # fmt: skip
    assert "0.25 free" in drawn


def test_cells_show_owner_workload_and_quota() -> None:
    free, down = Device(index=1, free=1), Device(index=2, free=0)
    assert cell_tip(machine(free), free, DISPLAY) == "GPU 1 on n1: free"
    assert "not ready" in cell_tip(machine(free, ready=False), free, DISPLAY)
    assert "held by work of others, or by a pod whose workload has ended" in cell_tip(machine(down), down, DISPLAY)
    over = Device(index=0, free=0, holders=[holder(over=True)])
    assert cell_tip(machine(over), over, DISPLAY) == (
        "GPU 0 on n1\nR&D · ana: job n, running, over quota: makes way when a team needs GPUs that it reserved"
    )
    assert "#mw-hatch" in str(node(machine(over), DISPLAY))
    session = Device(index=0, free=0, holders=[holder(kind=Kind.SESSION)])
    drawn = str(node(machine(session), DISPLAY))
    assert "#mw-session" in drawn
    assert "href=" not in drawn.replace('href="#mw-session"', "")


def test_names_with_markup_stay_text() -> None:
    drawn = str(node(machine(Device(index=0, free=0, holders=[holder(name=EVIL, team=EVIL)])), DISPLAY))
    assert "<script>" not in drawn
    assert "&lt;script&gt;" in drawn


def large_pool(*nodes: Node) -> Pool:
    devices = [device for node in nodes for device in node.devices]
    return Pool(name="h100", total=len(devices), used=sum(1 for d in devices if d.holders), nodes=list(nodes))


def full_node(name: str, *teams: str, over: bool = False, ready: bool = True) -> Node:
    """A node of eight GPUs; the first ones are held by these teams."""
    held = [Device(index=i, free=0, holders=[holder(team, over=over)]) for i, team in enumerate(teams)]
    free = [Device(index=i, free=1) for i in range(len(teams), 8)]
    return Node(name=name, pool="h100", devices=[*held, *free], ready=ready)


def areas(svg: str, name: str) -> float:
    """The number of GPUs that the path of a class covers."""
    path = re.search(rf'<path class="{name}" d="([^"]*)"', svg)
    return sum((int(width) + 1) / GPU_WIDTH for width in re.findall(r"h(\d+)v", path[1])) if path else 0


def test_a_heat_map_draws_every_gpu_once_in_the_colour_of_its_team() -> None:
    nodes = [
        full_node("a", "rnd", "rnd", "devops"),
        full_node("b", *["devops"] * 8, over=True),
        full_node("c", ready=False),
    ]
    svg = str(heat_map(large_pool(*nodes), DISPLAY))
    assert areas(svg, "t0") == 2
    assert sum(areas(svg, name) for name in ("t0", "t1", "free", "down")) == 24 - 8, "t1 has two paths"
    assert svg.count('class="t1"') == 2, "over quota has a path of its own"
    assert svg.count("#mw-hatch") == 1
    assert areas(svg, "down") == 8
    assert "a 3/8 in use\nb 8/8 in use\nc not ready" in svg
    assert "h100: 11 of 24 GPUs in use on 3 nodes, 1 not ready" in svg


def test_idle_gpus_of_a_cordoned_node_are_not_drawn_as_held_by_others() -> None:
    held = Device(index=0, free=0, holders=[holder()])
    idle = [Device(index=i, free=0) for i in range(1, 8)]
    cordoned = Node(name="a", pool="h100", devices=[held, *idle], cordoned=True)
    others = Node(name="b", pool="h100", devices=[held, *idle], foreign=7)
    svg = str(heat_map(large_pool(cordoned, others), DISPLAY))
    assert (areas(svg, "t0"), areas(svg, "unavailable"), areas(svg, "foreign")) == (2, 7, 7)
    assert "a cordoned 1/8 in use\nb 1/8 in use" in svg


def test_tiles_of_a_heat_map_do_not_overlap() -> None:
    nodes = [full_node(f"n{i}", *["rnd"] * (i % 9)) for i in range(500)]
    svg = str(heat_map(large_pool(*nodes), DISPLAY))
    boxes = [tuple(map(int, box)) for box in re.findall(r"M(\d+) (\d+)h(\d+)v", svg)]
    cells = [(x + step * GPU_WIDTH, y) for x, y, width in boxes for step in range((width + 1) // GPU_WIDTH)]
    assert len(cells) == len(set(cells)) == 4_000
    grid = Grid.of(nodes)
    assert max(x for x, _ in cells) < grid.columns * grid.wide <= WIDTH


def test_a_node_with_more_gpus_than_a_row_takes_several() -> None:
    node = Node(name="nvl72", pool="h100", devices=[Device(index=i, free=1) for i in range(72)])
    svg = str(heat_map(large_pool(node), DISPLAY))
    assert len({y for _, y in re.findall(r"M(\d+) (\d+)h", svg)}) == -(-72 // ROW_GPUS)
    assert areas(svg, "free") == 72


def test_a_heat_map_of_a_thousand_nodes_is_small() -> None:
    nodes = [full_node(f"node-{i:04}", *["rnd", "devops"] * (i % 5)) for i in range(1_000)]
    svg = str(heat_map(large_pool(*nodes), DISPLAY))
    assert len(svg) < 120 * 1024, "though no two neighbours are of the same team"
    assert svg.count("<") < 40


def test_a_heat_map_drawn_again_is_that_of_the_nodes_and_colours_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of a drawing is used for the same nodes at the same place in the same colours only."""
    other = replace(DISPLAY, classes={"rnd": "t5", "devops": "t1"})
    nodes = [full_node(f"n{i}", *["rnd", "devops"] * (i % 5)) for i in range(100)]
    changed = [*nodes[:40], full_node("n40", "devops", over=True), *nodes[41:]]
    larger = [*nodes, Node(name="large", pool="h100", devices=[Device(index=i, free=1) for i in range(16)])]
    cases = [
        (nodes, DISPLAY),
        (nodes, other),
        (changed, DISPLAY),
        (nodes[1:], DISPLAY),
        (larger, DISPLAY),
        (nodes, DISPLAY),
    ]
    again = [heat_map(large_pool(*drawn), display) for drawn, display in cases]
    for (drawn, display), drawing in zip(cases, again, strict=True):
        monkeypatch.setattr(heat, "_KNOWN", {})
        assert heat_map(large_pool(*drawn), display) == drawing
    assert len(set(again)) == len(cases) - 1


def test_a_heat_map_keeps_no_node_in_memory_that_was_replaced() -> None:
    """Every version of the nodes is drawn in other colours, as when a team gains or loses its last GPU."""
    alive: list[ref[Node]] = []
    for version in range(12):
        nodes = [full_node(f"replaced-{i}", *["rnd"] * (1 + (version + i) % 8)) for i in range(40)]
        classes = {**DISPLAY.classes, f"team-{version}": "t7"}
        heat_map(large_pool(*nodes), replace(DISPLAY, classes=classes))
        alive += map(ref, nodes)
        del nodes
    gc.collect()
    assert not [node for node in alive if node() is not None]


def test_a_block_of_a_heat_map_has_a_bounded_number_of_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat, "_KNOWN", {})
    nodes = [full_node(f"n{i}", "rnd") for i in range(2 * heat.BLOCK)]
    for slot in range(SLOTS):
        heat_map(large_pool(*nodes), replace(DISPLAY, classes={"rnd": f"t{slot}"}))
    drawings = [block for kept in heat._KNOWN.values() for block in kept]
    assert len(drawings) == 2 * heat.MAX_DRAWINGS


def test_a_heat_map_is_drawn_once_for_visitors_whose_colours_differ_in_teams_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[int] = []
    paths = heat._paths
    monkeypatch.setattr(heat, "_paths", lambda start, *rest: drawn.append(start) or paths(start, *rest))
    nodes = [full_node(f"shared-{i}", *["rnd", "devops"][: i % 3]) for i in range(2 * heat.BLOCK)]
    maps = {
        heat_map(large_pool(*nodes), replace(DISPLAY, classes={**DISPLAY.classes, f"x{i}": "t8"})) for i in range(20)
    }
    assert len(maps) == 1
    assert drawn == [0, heat.BLOCK]


def test_a_node_divided_evenly_among_pools_is_derived_once_in_each() -> None:
    """Both parts have the same name and the same number of devices."""
    half = full_node("divided", "rnd")
    other = half.model_copy(update={"pool": "h200", "devices": [Device(index=i, free=1) for i in range(8)]})
    facts = [facts_of(part) for part in (half, other)]
    assert [facts_of(part) for part in (half, other)] == facts
    assert [node_facts.teams for node_facts in facts] == [{"rnd"}, frozenset()]


def test_foreign_jobs_are_no_links() -> None:
    display = Display(classes={}, titles={}, jobs="/jobs/", linked=frozenset({"devops"}))
    assert "href" not in str(node(machine(Device(index=0, free=0, holders=[holder()])), display))


def test_colours_differ_and_stay() -> None:
    names = [f"team-{number}" for number in range(SLOTS)]
    given = colours(names)
    assert len(set(given.values())) == SLOTS
    assert colours(reversed(names)) == given
    assert (colours(["rnd", "devops"])["rnd"], colours(["rnd"])["rnd"]) == ("t0", "t0")
    assert len(colours([*names, "one more"])) == SLOTS + 1
