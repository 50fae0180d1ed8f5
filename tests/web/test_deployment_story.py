"""In a real Chromium: administrators create a queue and its machines, and watch them come for work and go without it.

The machines are real processes of the cloud in a folder, each with the real agent, and the jobs run on them.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from axe import AXE
from playwright.async_api import Page, async_playwright, expect
from running import python
from service.test_deployments_of_machines import Site, site

pytestmark = [pytest.mark.browser, pytest.mark.slow]

expect.set_options(timeout=30_000)  # most take a second, but not on a machine that runs other tests beside

ARGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
HERE = """\
version: 1
pools:
  - {name: here, nodes: {local: {gpus: all}}}
profiles:
  - {name: gpu1, gpus: 1, pools: [here], policies: [[rnd]]}
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [here], reserved: 1}]}
"""
WITH_CLOUD = """\
version: 1
pools:
  - {name: here, nodes: {local: {gpus: all}}}
  - {name: cloud, kind: autoscaled}
profiles:
  - {name: gpu1, gpus: 1, pools: [here], policies: [[rnd]]}
  - {name: cloud2, gpus: 2, pools: [cloud], policies: [[rnd]]}
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [here], reserved: 1}, {pools: [cloud], reserved: 8, limit: 8}]}
"""
DEPLOYMENT = {
    "name": "demo",
    "title": "Two machines for research",
    "provider": "local",
    "hour": "7",
    "machine_types.0.name": "g2",
    "machine_types.0.pool": "cloud",
    "machine_types.0.instance": "big-2",
    "machine_types.0.gpus": "2",
    "machine_types.0.price": "3.10",
    "machine_types.0.max_machines": "2",
    "machine_types.0.idle_timeout": "8s",
}
TWO_QUEUES = """\
version: 1
pools:
  - {name: cpus, kind: autoscaled}
  - {name: gpus, kind: autoscaled}
profiles:
  - {name: cpu2, gpus: 0, cpu: 2, pools: [cpus], policies: [[rnd]]}
  - {name: gpu1, gpus: 1, pools: [gpus], policies: [[rnd]]}
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [gpus], reserved: 8, limit: 8}]}
"""
TWO_TYPES = """\
name: demo
provider: local
poll_interval: 1
machine_types:
  - {name: c2, pool: cpus, instance: small, cpu: 2, price: 0.20, max_machines: 5}
  - {name: g1, pool: gpus, instance: big-1, gpus: 1, price: 1.50, max_machines: 5}
"""


@asynccontextmanager
async def administrator(address: str) -> AsyncIterator[Page]:
    """Yield a page on which an administrator has logged in; nothing that the browser complains about is accepted."""
    complaints: list[str] = []
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path="/usr/bin/chromium", args=ARGS)
        page = await browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(60_000)
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(f"{address}?login_token=root")
        yield page
        await browser.close()
    # the Hub with its logo is not there in this test
    assert [text for text in complaints if "responded with a status of 4" not in text] == []


async def deploy(page: Page, address: str, document: str) -> None:
    """Create a deployment from YAML; its page is shown then."""
    await page.goto(f"{address}deployments")
    await page.get_by_role("link", name="New").click()
    await page.get_by_role("button", name="Edit as YAML").click()
    await page.locator("#document").fill(document)
    await save(page)


async def deploy_by_fields(page: Page, address: str, values: Mapping[str, str]) -> None:
    """Create a deployment with one machine type from the fields of the form, by their names."""
    await page.goto(f"{address}deployments")
    await page.get_by_role("link", name="New").click()
    for name, value in values.items():
        field = page.locator(f'[name="f.{name}"]')
        await (field.select_option(value) if name == "provider" else field.fill(value))
    await save(page)


async def save(page: Page) -> None:
    await page.get_by_role("button", name="Save", exact=True).click()
    await expect(page.get_by_text("Nothing is saved yet.")).to_be_visible()
    await page.get_by_role("button", name="Save now").click()
    await expect(page.locator("#mw-live")).to_have_text("live")


def until(file: Path) -> list[str]:
    """Return the command of a job that runs until a file is there."""
    return python(f"import os, time\nwhile not os.path.exists({str(file)!r}): time.sleep(.05)")


async def job_states(world: Site) -> list[str]:
    return sorted((await world.run.states()).values())


@pytest.mark.covers("F74", "F55", "F56")
async def test_the_seven_steps_from_a_new_queue_to_machines_that_end(tmp_path: Path) -> None:
    async with site(tmp_path, "", HERE) as world, administrator(world.address) as page:
        # 1: create the queue
        await page.goto(f"{world.address}policy")
        await page.locator("#document").fill(WITH_CLOUD)
        await page.get_by_role("button", name="Apply", exact=True).click()
        await page.get_by_role("button", name="Apply now").click()
        await expect(page.get_by_role("status").filter(has_text="in force")).to_be_visible()
        # 2 and 3: attach machines with a budget, and launch the deployment
        await deploy_by_fields(page, world.address, DEPLOYMENT)
        await expect(page.get_by_role("heading", level=1)).to_have_text("Two machines for research")
        await expect(page.get_by_text("Launches machines when work waits for them.")).to_be_visible()
        await expect(page.get_by_text("0.00 of 7.00 EUR an hour")).to_be_visible()
        await page.evaluate("window.same = true")
        await page.screenshot(path=tmp_path / "1-deployed.png")
        # 4 and 5: work is enqueued, and a machine spins up
        first = await world.run.submit("ana", "first", until(tmp_path / "end-1"), profile="cloud2")
        await expect(page.locator("#h-running")).to_have_text("Running machines 1")
        await expect(page.get_by_text("3.10 of 7.00 EUR an hour")).to_be_visible()
        await page.screenshot(path=tmp_path / "2-spins-up.png")
        await world.run.job(first.id, "running", seconds=60)
        # 6: more work, more machines, up to the maximum
        for number in (2, 3):
            await world.run.submit("ana", f"next {number}", until(tmp_path / "end-2"), profile="cloud2")
        await expect(page.locator("#h-running")).to_have_text("Running machines 2")
        await world.run.until(lambda: _are(world, "pending", "running", "running"), "both machines are full")
        await expect(page.locator("#h-queues")).to_have_text("Jobs and notebooks per queue 1 waiting")
        await page.screenshot(path=tmp_path / "3-maximum.png")
        (tmp_path / "end-1").touch()
        await world.run.until(lambda: _are(world, "running", "running", "succeeded"), "the third job runs")
        assert len(world.machines) == 2
        # 7: without work they idle, and end
        (tmp_path / "end-2").touch()
        await expect(page.locator("#h-idle")).to_have_text(re.compile("Idle machines [12]"))
        await page.screenshot(path=tmp_path / "4-idle.png")
        await expect(page.locator("#h-running")).to_have_text("Running machines 0", timeout=60_000)
        await expect(page.locator("#h-idle")).to_have_text("Idle machines 0")
        await expect(page.get_by_text("0.00 of 7.00 EUR an hour")).to_be_visible()
        await page.screenshot(path=tmp_path / "5-ended.png")
        assert await page.evaluate("window.same"), "the page was never loaded again"
        assert {one.state for one in world.cloud.list("demo", 0.0).instances} == {"terminated"}
        assert len(world.cloud.list("demo", 0.0).instances) == 2, "no third machine was ever launched"
        assert await job_states(world) == ["succeeded"] * 3


async def _are(world: Site, *states: str) -> bool:
    return await job_states(world) == list(states)


@pytest.mark.covers("F57")
async def test_each_field_explains_itself_to_pointer_keyboard_and_screen_reader(tmp_path: Path) -> None:
    async with site(tmp_path, "", WITH_CLOUD) as world, administrator(world.address) as page:
        await page.goto(f"{world.address}deployment-form")
        help = page.get_by_role("button", name="Help: Price", exact=True)
        told = "Price of a machine for an hour on demand; with a budget, no type without a price is launched"
        await help.hover()
        await expect(page.get_by_role("tooltip")).to_have_text(told)
        await page.mouse.move(0, 0)
        await expect(page.get_by_role("tooltip")).to_be_hidden()
        await page.get_by_label("Market", exact=True).focus()
        await page.keyboard.press("Tab")
        await expect(help).to_be_focused()
        await expect(page.get_by_role("tooltip")).to_have_text(told)
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("tooltip")).to_be_hidden()
        price = page.get_by_role("textbox", name="Price", exact=True)
        await expect(price).to_have_accessible_description(told)
        await page.screenshot(path=tmp_path / "form.png", full_page=True)
        await price.fill("much")
        await page.keyboard.press("Enter")
        await expect(price).to_have_accessible_description(re.compile("amount of money such as 3.10"))
        await expect(price).to_have_attribute("aria-invalid", "true")
        await expect(price).to_have_value("much")
        await page.get_by_role("button", name="Add a schedule entry").click()
        await expect(page.get_by_role("group", name="Schedule 1")).to_be_visible()
        await page.screenshot(path=tmp_path / "wrong.png", full_page=True)
        for width in (1280, 390):
            await page.set_viewport_size({"width": width, "height": 900})
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
        assert page.context.browser is not None
        other = await page.context.browser.new_page()  # axe-core applies styles, which the page's policy reports
        await other.goto(f"{world.address}?login_token=root")
        await other.goto(f"{world.address}deployment-form")
        await other.evaluate(AXE.read_text(encoding="utf-8"))
        result = await other.evaluate("() => axe.run(document.querySelector('main') ?? document)")
        assert [(rule["id"], [node["html"][:120] for node in rule["nodes"]]) for rule in result["violations"]] == []


@pytest.mark.covers("F79", "F62", "F68")
async def test_two_queues_with_two_tasks_each_get_four_machines(tmp_path: Path) -> None:
    async with site(tmp_path, "", TWO_QUEUES) as world, administrator(world.address) as page:
        await deploy(page, world.address, TWO_TYPES)
        names = [f"{profile} {number}" for number in (1, 2) for profile in ("cpu2", "gpu1")]
        jobs = [await world.run.submit("ana", name, until(tmp_path / "end"), profile=name.split()[0]) for name in names]
        for job in jobs:
            await world.run.job(job.id, "running", seconds=90)
        await expect(page.locator("#h-running")).to_have_text("Running machines 4")
        await page.screenshot(path=tmp_path / "four.png")
        types = {machine.id: machine.type for machine in world.machines}
        assert sorted(types.values()) == ["c2", "c2", "g1", "g1"]
        nodes = {name: world.nodes_of(job.id) for name, job in zip(names, jobs, strict=True)}
        assert sorted(node for placed in nodes.values() for node in placed) == sorted(types)
        for name, [node] in nodes.items():
            assert types[node] == {"cpu2": "c2", "gpu1": "g1"}[name.split()[0]]
        assert len(world.cloud.list("demo", 0.0).instances) == 4
        (tmp_path / "end").touch()
        for job in jobs:
            await world.run.job(job.id, "succeeded", seconds=60)
