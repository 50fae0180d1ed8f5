"""The page of what is kept: one's own bytes for everybody, all accounts and the deletion for administrators."""

from __future__ import annotations

import pytest
from makeway_api.errors import MakewayError
from makeway_quota.backends.base import BackendUnavailable
from makeway_quota.services.jobs import storage_measurements
from makeway_quota.store.records import Attempt, Change, NewWorkload
from web.portal import EVIL, PREFIX, Portal


def ended(web: Portal, number: int, owner: str, ago: float) -> str:
    """Add a job that ended some days ago and left a result."""
    store, now = web.run.service.components.store, web.run.service.components.clock()
    new = NewWorkload(f"j-{number:08d}", "job", "rnd", "gpu1", owner, name=f"job {number}", gpus=1000)
    store.add_workload(new, now=now - ago * 86_400 - 10)
    store.outputs.append((new.id, 1, 0), "result", 0, b"r" * 100_000, 10**6)
    store.commit([Change(new.id, {"state": "succeeded", "ended_at": now - ago * 86_400})], now=now)
    return new.id


@pytest.mark.covers("N25")
async def test_an_administrator_sees_who_keeps_what_and_deletes_it(web: Portal) -> None:
    old, new = ended(web, 1, "ana", 40), ended(web, 2, "ana", 2)
    ended(web, 3, EVIL, 2)
    root = await web.browser("root")
    page = await root.get(f"{PREFIX}storage")
    assert page.status_code == 200
    assert "200 kB" in page.text
    assert EVIL not in page.text, "names are escaped"
    form = {"owner": "ana", "days": "30"}
    assert (await root.post(f"{PREFIX}storage/delete", data=form)).status_code == 403, "without the page's own token"
    form["_xsrf"] = page.text.partition('name="_xsrf" value="')[2].partition('"')[0]
    done = await root.post(f"{PREFIX}storage/delete", data=form)
    assert "Deleted: 1 ended job of ana with 106 kB" in done.text
    store = web.run.service.components.store
    assert (store.workload(old), store.workload(new) is not None) == (None, True)
    done = await root.post(f"{PREFIX}storage/delete", data=form | {"days": "0"})
    assert store.workload(new) is None
    assert store.accounts.list_lines("ana") == []


async def test_others_see_their_own_bytes_and_delete_their_own_jobs(web: Portal) -> None:
    mine, theirs = ended(web, 1, "ana", 2), ended(web, 2, "eve", 2)
    ana = await web.browser("ana")
    page = await ana.get(f"{PREFIX}storage")
    assert "You keep 106 kB of the 10 GB that one person may keep" in page.text
    assert "<td>eve</td>" not in page.text
    assert "Delete ended jobs" not in page.text
    job = await ana.get(f"{PREFIX}jobs/{mine}")
    token = job.text.partition('name="_xsrf" value="')[2].partition('"')[0]
    refused = await ana.post(f"{PREFIX}storage/delete", data={"owner": "eve", "_xsrf": token})
    assert refused.status_code == 403
    assert (await ana.post(f"{PREFIX}jobs/{theirs}/delete", data={"_xsrf": token})).status_code == 403
    done = await ana.post(f"{PREFIX}jobs/{mine}/delete", data={"_xsrf": token})
    assert "Deleted: 1 ended job" in done.text
    assert (await ana.get(f"{PREFIX}jobs/{mine}")).status_code == 410


async def test_the_page_of_a_job_shows_its_bytes_and_deletes_what_an_attempt_wrote(web: Portal) -> None:
    mine = ended(web, 1, "ana", 2)
    store = web.run.service.components.store
    opened = Attempt(mine, 1, 0.0, ended_at=1.0, outcome="succeeded")
    store.commit([Change(mine, {"attempt": 1}, open_attempt=opened)], now=1.0)
    store.outputs.append((mine, 1, 0), "log", 0, b"l" * 40_000, 10**6)
    ana = await web.browser("ana")
    page = await ana.get(f"{PREFIX}jobs/{mine}")
    assert "This job keeps 147 kB." in page.text
    assert '<td data-label="Log">40 kB</td>' in page.text
    assert '<td data-label="Result">100 kB</td>' in page.text
    largest = (await ana.get(f"{PREFIX}storage")).text
    assert f'<a href="{PREFIX}jobs/{mine}">job 1</a>' in largest
    assert f'action="{PREFIX}jobs/{mine}/delete"' in largest
    form = {"_xsrf": page.text.partition('name="_xsrf" value="')[2].partition('"')[0]}
    output = f"{PREFIX}jobs/{mine}/attempts/1/delete"
    eve = await web.browser("eve")
    assert (await eve.post(output, data=form)).status_code in (403, 404)
    assert (await ana.post(output.replace("/1/", "/7/"), data=form)).status_code == 404
    done = await ana.post(output, data=form)
    assert "Deleted: the log and the result of attempt 1, 140 kB." in done.text
    assert '<span class="mw-quiet">nothing is kept</span>' in done.text
    assert "This job keeps 7.0 kB." in done.text
    assert store.workload(mine) is not None, "the job stays"
    store.commit([Change(mine, {"state": "running", "ended_at": None})], now=2.0)
    refused = await ana.post(output, data=form)
    assert refused.status_code == 409
    assert "has not ended (running)" in refused.text
    assert "it runs" in (await ana.get(f"{PREFIX}jobs/{mine}")).text


async def test_what_a_running_job_keeps_is_live_and_pages_share_the_measurement(
    web: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, folder, walks = await web.running_job(), [4096], []

    def walk(id: str) -> int:
        walks.append(id)
        return folder[0]

    monkeypatch.setattr(web.backend, "folder_bytes", walk)
    ana, root = await web.browser("ana"), await web.browser("root")
    live = f"{PREFIX}live/jobs/{job}"
    assert "4.1 kB" in (await ana.get(f"{PREFIX}jobs/{job}")).text
    folder[0] = 80_000_000
    for browser in (ana, root, ana):
        assert "data-again" in (await browser.get(live)).text
    assert walks == [job], "open pages walk through no folder"
    monkeypatch.setattr(storage_measurements, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(storage_measurements, "PAUSE_FACTOR", 0)
    web.services.storage._measurements.forget(job)
    assert "80 MB" in (await root.get(live)).text


async def test_a_storage_that_cannot_be_measured_is_a_sentence_on_the_page(
    web: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await web.running_job()

    async def unreachable(id: str, attempt: int) -> None:
        raise BackendUnavailable("the cluster does not answer")

    monkeypatch.setattr(web.backend, "output_bytes", unreachable)
    page = await (await web.browser("ana")).get(f"{PREFIX}jobs/{job}")
    assert page.status_code == 200
    assert "What this job keeps was not measured: " in page.text
    assert "the cluster does not answer" in page.text


@pytest.mark.covers("N25")
async def test_an_administrator_sees_what_grows_and_when_it_is_full(web: Portal) -> None:
    store, now = web.run.service.components.store, web.run.service.components.clock()
    root, ana = await web.browser("root"), await web.browser("ana")
    assert "growth is shown from the second day on" in (await root.get(f"{PREFIX}storage")).text
    for ago in range(9, -1, -1):
        ended(web, 10 + ago, "ana" if ago % 2 else EVIL, ago)
        store.growth.note(now - ago * 86_400, 2_000_000 - 106_000 * (9 - ago))
    page = (await root.get(f"{PREFIX}storage")).text
    assert '<svg class="mw-growth"' in page
    assert "and keep 1.1 MB now." in page
    full = "The disk is full in about 10 days at the present rate; after that submissions and results are refused."
    assert full in page
    assert EVIL not in page, "names are escaped"
    assert "+742 kB" in page, "R&amp;D in seven days"
    assert "Growth</h2>" not in (await ana.get(f"{PREFIX}storage")).text
    grows = await web.run.client("root").storage_growth()
    assert [(trend.name, trend.week) for trend in grows.teams] == [("rnd", 742_000)]
    assert sorted((trend.name, trend.week) for trend in grows.people) == sorted([("ana", 318_000), (EVIL, 424_000)])
    with pytest.raises(MakewayError) as refused:
        await web.run.client("ana").storage_growth()
    assert refused.value.status == 403
