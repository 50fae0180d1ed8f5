"""Offers of profiles in pools that grow, on the real service: in the API, the commands, a notebook and the picker."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from makeway import cli, connection, teams
from makeway_api.errors import MakewayError
from makeway_api.models import Offer, OfferTable
from makeway_quota.autoscale.providers.local import LocalFaults
from makeway_quota.backends.base import NodeStatus
from makeway_spawner.picker import Picker
from running import PEOPLE, python

from .test_deployments_of_machines import DOCUMENT, POLICY, Site, site

PRICED = DOCUMENT.replace("gpus: 2,", "gpus: 2, price: 3.10,")
HAS = "demo has {} of at most 2 machines."
STARTED = f"A machine of type g2 would be started: boot time not known yet, about 3.10 EUR/h. {HAS}"


async def table(world: Site, kind: str = "job") -> OfferTable:
    return await world.run.client("ana").offers("ana", kind)


async def until_offer(world: Site, profile: str, message: str, kind: str = "job") -> Offer:
    told: list[Offer] = []

    async def there() -> bool:
        told[:] = [offer for offer in (await table(world, kind)).offers if offer.profile == profile]
        return re.fullmatch(message, told[0].message) is not None

    try:
        await world.run.until(there, f"{profile} is offered: {message}", 30)
    except BaseException:
        print(told)
        raise
    return told[0]


@pytest.mark.slow
@pytest.mark.covers("F54", "N03")
async def test_an_offer_says_which_machine_would_be_started_and_why_none_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with site(tmp_path, PRICED) as world:
        offer = await until_offer(world, "gpu2", re.escape(STARTED.format(0)))
        assert offer.reason is not None
        assert (offer.code, offer.seconds, offer.reason.code) == ("ready_after_launch", None, "waiting_for_node")
        assert not world.machines, "an offer launches nothing"

        done = await world.run.submit("ana", "one", python("print()"), profile="gpu2")
        await world.run.job(done.id, "succeeded", "failed", seconds=90)
        await world.until_machines()
        known = r"A machine of type g2 would be started: ready in about (\d+) s, about 3\.10 EUR/h\. " + HAS.format(0)
        offer = await until_offer(world, "gpu2", known)
        assert f"about {offer.seconds} s" in offer.message

        await asyncio.to_thread(_commands, world, offer)
        out = capsys.readouterr().out
        assert f"Now: gpu1 in about {offer.seconds} s (on a machine), gpu2 in about" in out
        assert f"gpu1 and gpu2: {offer.message}" in out
        assert f"Nothing was submitted.\n  {offer.message}\n" in out

        world.store.deployments.save("demo", f"{PRICED}paused: true\n", 1, "root", 1.0)
        none = f"No machine would be started for it: demo is paused. {HAS.format(0)}"
        offer = await until_offer(world, "gpu2", re.escape(none))
        assert (offer.code, offer.seconds) == ("waits", None)
        assert offer.reason is not None
        assert offer.reason.numbers["causes"] == ["paused"]


def _commands(world: Site, offer: Offer) -> None:
    """Run what a person runs in a shell and in a notebook."""
    connection.connect(world.address, "ana")
    try:
        assert cli.main(["usage", "--now"]) == 0
        assert cli.main(["submit", "-p", "gpu2", "-t", "rnd", "--dry-run", "--", "true"]) == 0
        shown = teams.gpus_now()
        line = f"gpu1 and gpu2: {offer.message}"
        assert line in repr(shown)
        assert line in shown._repr_html_()
    finally:
        connection.disconnect()


@pytest.mark.slow
async def test_an_offer_counts_what_waits_and_follows_the_stock_of_the_provider(tmp_path: Path) -> None:
    document = PRICED.replace("max_machines: 2", "max_machines: 1")
    async with site(tmp_path, document) as world:
        world.cloud.set_faults(LocalFaults(boot_seconds=0.5, stock={"g2": 0}))
        job = await world.run.submit("ana", "one", python("print()"), profile="gpu2")
        out = "the provider is out of machines of type g2. demo has 0 of at most 1 machine."
        await until_offer(
            world, "gpu1", re.escape(f"No machine would be started for it: {out} The next try is in about 5 min.")
        )
        await world.run.client("ana").cancel(job.id)


@pytest.mark.slow
@pytest.mark.covers("N03")
async def test_the_picker_offers_notebooks_machines_of_a_cluster_and_none_that_join_by_agents(tmp_path: Path) -> None:
    """No machine is launched for a notebook that could not start there."""
    async with site(tmp_path, PRICED) as world:
        refused = (
            "gpu2 cannot be used for notebooks: it may go to the pool cloud, where only jobs run, as notebooks start "
            "on the nodes of the first backend. Leave it to jobs, or an administrator can take that pool out of it."
        )
        offer = await until_offer(world, "gpu2", re.escape(refused), "session")
        assert offer.code == "refused"
        with pytest.raises(MakewayError) as error:
            await world.run.session("ana", "gpu2", "rnd")
        assert (error.value.code, error.value.message) == ("no_sessions", refused)
        check = await world.run.service.services.policies.validate(PEOPLE["root"], POLICY)
        assert [issue.message for issue in check.warnings if "notebooks" in issue.message][-1] == refused

        cluster = PRICED.replace("provider: local", "provider: kubernetes").replace(', init_script: "echo hello"', "")
        world.store.deployments.save("demo", cluster, 1, "root", 1.0)
        offer = await until_offer(world, "gpu2", re.escape(STARTED.format(0)), "session")
        assert offer.code == "ready_after_launch"
        html = Picker("ana", "/hub/", "/services/makeway/").render(await table(world, "session"), None, {})
        row = re.search(r'data-queue="rnd/gpu2" data-code="ready_after_launch".*?</label>', html, re.S)
        assert row is not None
        assert '<span class="badge mw-badge">Starts a machine</span>' in row[0]
        assert f'<span class="mw-message small">{STARTED.format(0)}</span>' in row[0]
        assert "disabled" not in row[0]


@pytest.mark.slow
async def test_a_notebook_starts_in_the_pools_that_hold_notebooks_and_no_machine_is_launched_for_it(
    tmp_path: Path,
) -> None:
    """A profile with two pools, of which machines that agents join serve one."""
    policy = POLICY.replace("gpus: 2, pools: [cloud]", "gpus: 2, pools: [here, cloud]")
    policy = policy.replace("quotas: [{pools: [cloud]", "quotas: [{pools: [here, cloud]")
    here = NodeStatus("here-1", "here", (0, 1))
    async with site(tmp_path, PRICED, policy, nodes=[here]) as world:
        first = await world.run.granted((await world.run.session("ana", "gpu2", "rnd", "first")).id)
        assert first.phase == "granted"
        waits = (await world.run.session("lea", "gpu2", "rnd")).id
        assert "machine" in (await until_offer(world, "gpu2", ".*would be started.*")).message
        [offer] = [one for one in (await table(world, "session")).offers if one.profile == "gpu2"]
        assert offer.code == "waits", offer
        assert "machine" not in offer.message, offer

        async def explained() -> bool:
            session = await world.run.client("spawner").session(waits)
            return (
                session.phase == "admission" and session.reason is not None and "machine" not in session.reason.message
            )

        await world.run.until(explained, "the notebook waits for GPUs, and for no machine", 10)
        job = await world.run.submit("ana", "one", python("print()"), profile="gpu1")
        await world.run.job(job.id, "succeeded", "failed", seconds=90)
        await world.until_machines()
        events = world.store.machine_log.events()
        assert len({event.machine for event in events if event.machine}) == 1, "only that of the job"
