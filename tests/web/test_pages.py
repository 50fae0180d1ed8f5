"""The pages: what they show to whom, everything escaped, nothing from outside, nothing inline."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from typing import Any

import httpx2
import pytest
from makeway_api.models import Attempt, Checkpoint, Reason, State
from makeway_quota.store.records import Change
from makeway_quota.values import Notice
from web.portal import EVIL, PEOPLE, PREFIX, Portal

OUTSIDE = re.compile(r"""(?:src|href|action|url\()\s*=?\s*["'(]?\s*(?:https?:)?//""", re.IGNORECASE)


class Reader(HTMLParser):
    """Collects what a strict content policy forbids, and what a screen reader needs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.ids: list[str] = []
        self.labelled: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "style" or (tag == "script" and "src" not in attributes) or "style" in attributes:
            self.inline.append(self.get_starttag_text() or tag)
        self.inline += [f"{tag} {name}" for name in attributes if name.startswith(("on", "hx-on"))]
        if attributes.get("id"):
            self.ids.append(str(attributes["id"]))
        if attributes.get("aria-labelledby"):
            self.labelled.append(str(attributes["aria-labelledby"]))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def check(answer: httpx2.Response, status: int = 200) -> str:
    """A page may come from here only, and may contain no script of its own."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cross-origin-opener-policy"] == "same-origin"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert answer.headers["cache-control"] == "no-store"
    reader = Reader(answer.text)
    assert reader.inline == []
    assert len(reader.ids) == len(set(reader.ids)), "an id is used twice"
    assert set(reader.labelled) <= set(reader.ids)
    assert not OUTSIDE.search(answer.text)
    assert "<script>alert" not in answer.text
    return answer.text


def xsrf(text: str) -> dict[str, str]:
    return {"_xsrf": text.partition('name="makeway-xsrf" content="')[2].partition('"')[0]}


def words(text: str) -> str:
    return " ".join(" ".join(Reader(text).words).split())


async def busy(web: Portal) -> list[str]:
    """ana: a session and three jobs, one of them over quota, one waiting; bo: a job."""
    session = await web.run.session("ana", "gpu1", "rnd")
    await web.run.granted(session.id)
    ids = [await web.running_job(EVIL), await web.running_job("second", "ana", "gpu2")]
    ids.append(await web.running_job("third", "ana", "gpu2"))
    ids.append((await web.run.submit("ana", "patient", profile="gpu3")).id)
    await web.run.job(ids[3])
    ids.append(await web.running_job("ops", "bo", "gpu1"))
    return ids


async def test_pages_say_that_the_cluster_cannot_be_read(web: Portal) -> None:
    root, id = await web.browser("root"), await web.running_job()
    assert "as they were seen last" not in words(check(await root.get(PREFIX)))
    web.backend.problem = "the Kubernetes API server does not answer"
    await web.run.converged()
    message = "as they were seen last, and nothing starts: the Kubernetes API server does not answer."
    live = ("panel", f"jobs/{id}", "nodes/virtual-1", "teams/rnd")
    for path in (*(f"live/{part}" for part in live), "nodes", "workloads"):
        assert message in words((await root.get(PREFIX + path)).text), path
    offers = await web.run.client("ana").offers(kind="session")
    assert message in (offers.problem or "")


@pytest.mark.covers("F37", "F40", "N16", "N22")
async def test_the_panel_shows_map_teams_queue_and_log(web: Portal) -> None:
    ids = await busy(web)
    text = check(await (await web.browser("root")).get(PREFIX))
    shown = words(text)
    for part in ("virtual GPUs", "9 /10 GPUs in use", "Cluster map", "R&D", "DevOps", "Decision log"):
        assert part in shown, part
    assert "R&D uses 8 of its limit of 9 GPUs; this job needs 3." in shown
    assert "over quota" in shown
    assert f'href="{PREFIX}jobs/{ids[0]}"' in text
    assert "GPU 1 on virtual-1\nR&amp;D · ana: job &lt;script&gt;" in text
    assert "notebook, starting, guaranteed" in text
    assert text.count('fill="url(#mw-hatch)"') >= 2
    assert "borrows 3 from DevOps" in shown
    assert "lends 3 to R&D" in shown
    assert "uses 8 GPUs; reserved 5, limit 9: 1 in sessions, 4 in quota, 3 borrowed" in text


async def test_people_see_their_own_teams(web: Portal) -> None:
    ids = await busy(web)
    shown = check(await (await web.browser("bo")).get(PREFIX))
    assert f"jobs/{ids[0]}" not in shown, "a job of another team is no link"
    assert f"jobs/{ids[4]}" in shown
    assert "patient" not in shown
    assert 'id="h-teams"' in shown
    assert f"{PREFIX}teams/rnd" not in shown
    assert f"{PREFIX}policy" not in shown
    alone = words(check(await (await web.browser("lone")).get(PREFIX)))
    assert "You are in no team. Ask an administrator of the Hub" in alone


async def test_the_changing_part_comes_alone(web: Portal) -> None:
    ids = await busy(web)
    browser = await web.browser("root")
    for path in ("panel", "teams/rnd", f"jobs/{ids[0]}"):
        part = await browser.get(f"{PREFIX}live/{path}")
        assert part.status_code == 200
        assert "<html" not in part.text
        assert Reader(part.text).inline == []


async def test_older_decisions_are_on_a_page_of_their_own(web: Portal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("makeway_quota.web.pages.panel.LOG_LINES", 3)
    await busy(web)
    browser = await web.browser("root")
    link = re.search(rf'href="({PREFIX}decisions[^"]*)">Older', check(await browser.get(f"{PREFIX}teams/rnd")))
    assert link
    older = words(check(await browser.get(link[1].replace("&amp;", "&"))))
    assert "Decisions about R&D" in older
    assert "ana requests a notebook" in older
    assert "There are no older decisions." in words(check(await browser.get(f"{PREFIX}decisions?before=1")))
    check(await (await web.browser("bo")).get(f"{PREFIX}decisions?team=rnd"), 403)


@pytest.mark.covers("N16")
async def test_a_team_page_is_for_its_members(web: Portal) -> None:
    await busy(web)
    shown = words(check(await (await web.browser("ana")).get(f"{PREFIX}teams/rnd")))
    assert "patient" in shown
    assert "ops" not in shown
    foreign = words(check(await (await web.browser("bo")).get(f"{PREFIX}teams/rnd"), 403))
    assert "You are not in the team rnd, so its page is not for you." in foreign
    assert "no team unknown" in words(check(await (await web.browser("root")).get(f"{PREFIX}teams/unknown"), 404))
    check(await (await web.browser("bo")).get(f"{PREFIX}teams/%3Cscript%3Ealert(1)"), 403)


async def test_a_job_page_escapes_the_source_and_the_log(web: Portal) -> None:
    id = await web.running_job(EVIL, source=f"print({EVIL!r})")
    web.backend.attempts[(id, 1)].log.extend(f"epoch 1\n{EVIL}</pre>".encode())
    browser = await web.browser("ana")
    text = check(await browser.get(f"{PREFIX}jobs/{id}"))
    shown = words(text)
    for part in ("running", "Runs on 3 GPUs within the team's reservation.", "epoch 1", "Attempts", "Cancel"):
        assert part in shown, part
    assert "Resume" not in shown
    assert EVIL in shown
    check(await (await web.browser("bo")).get(f"{PREFIX}jobs/{id}"), 404)
    assert "Cancel" not in words(check(await (await web.browser("eye")).get(f"{PREFIX}jobs/{id}")))


async def test_a_job_page_shows_before_when_a_job_does_not_start(web: Portal) -> None:
    await web.running_job(profile="gpu8")
    waits = await web.run.submit("ana", "waits", profile="gpu3")
    store = web.run.service.components.store
    await web.run.until(lambda: (row := store.workload(waits.id)) and row.reason_code, "the reason why it waits")
    ana, later = await web.browser("ana"), time.time() + 3600.0

    async def shows(text: str, code: str, **numbers: int) -> bool:
        """Write the reason, which the next cycle of the service may replace, and look at the page."""
        reason = {"reason_code": code, "reason_numbers": numbers, "not_before": later}
        store.commit([Change(waits.id, reason)], [], now=time.time())
        return text in words(check(await ana.get(f"{PREFIX}jobs/{waits.id}")))

    await web.run.until(lambda: shows("Not before", "start_deferred", tries=13), "when it is tried again")
    await web.run.until(
        lambda: shows("Nothing makes way for it before", "protected"), "until when others are protected"
    )


@pytest.mark.covers("N12")
async def test_the_buttons_of_a_job_page(web: Portal) -> None:
    web.backend.leaves_after = 0.3
    id = await web.running_job()
    browser = await web.browser("ana")
    token = xsrf((await browser.get(f"{PREFIX}jobs/{id}")).text)
    shown = words(check(await browser.post(f"{PREFIX}jobs/{id}/preempt-test", data=token)))
    assert "The preemption test has started" in shown
    assert "checkpointing" in shown
    await web.run.job(id, "running")
    check(await browser.post(f"{PREFIX}jobs/{id}/cancel", data=token))
    await web.run.job(id, "cancelled")
    assert "back in the queue" in words(check(await browser.post(f"{PREFIX}jobs/{id}/resume", data=token)))
    again = check(await browser.post(f"{PREFIX}jobs/{id}/resume", data=token), 409)
    assert "there is nothing to resume" in words(again)
    check(await browser.post(f"{PREFIX}jobs/{id}/explode", data=token), 404)
    eye = await web.browser("eye")
    forbidden = await eye.post(f"{PREFIX}jobs/{id}/cancel", data=xsrf((await eye.get(PREFIX)).text))
    assert "it needs the scope custom:makeway:submit" in words(check(forbidden, 403))


@pytest.mark.covers("F11")
async def test_a_pending_job_is_moved_to_another_queue_on_its_page(web: Portal) -> None:
    await web.running_job(profile="gpu8")
    waits = await web.run.submit("ana", "waits", profile="gpu8")
    browser, eve = await web.browser("ana"), await web.browser("eve")
    page = check(await browser.get(f"{PREFIX}jobs/{waits.id}"))
    assert "It keeps its submission time" in words(page)
    queues = page.partition('id="mw-queue"')[2].partition("</select>")[0]
    assert 'value="rnd/gpu1"' in queues
    assert 'value="rnd/gpu8"' not in queues, "where it is"
    assert 'id="mw-queue"' not in check(await eve.get(f"{PREFIX}jobs/{waits.id}")), "not hers"
    token = xsrf(page)
    moved = check(await browser.post(f"{PREFIX}jobs/{waits.id}/move", data=token | {"queue": "rnd/gpu1"}))
    assert "The job waits in its new queue, and keeps its submission time." in words(moved)
    assert '<div class="alert alert-success" role="status">' in moved
    await web.run.job(waits.id, "running")
    assert 'id="mw-queue"' not in check(await browser.get(f"{PREFIX}jobs/{waits.id}"))
    late = check(await browser.post(f"{PREFIX}jobs/{waits.id}/move", data=token | {"queue": "rnd/gpu2"}), 409)
    assert "only a pending job can be moved" in words(late)
    for queue in ("", "/", "rnd/nothing", "devops/gpu1"):
        check(
            await browser.post(f"{PREFIX}jobs/{waits.id}/move", data=token | {"queue": queue}),
            422 if queue in ("", "/") else 409,
        )


async def test_a_failed_job_shows_its_exception(web: Portal, monkeypatch: pytest.MonkeyPatch) -> None:
    id = await web.running_job()
    job = await web.run.client("root").job(id)
    lost = Attempt(
        number=1, started_at=job.submitted_at, outcome="preempted", lost_seconds=61, checkpoint=Checkpoint(step=3),
        message=EVIL,
    )  # fmt: skip
    failed = job.model_copy(
        update={
            "state": State.FAILED,
            "attempts": [lost],
            "reason": Reason(code="failed", message=f"It ended with 1: {EVIL}"),
        }
    )

    async def one(*_: Any) -> Any:
        return failed

    async def error(*_: Any) -> dict[str, Any]:
        return {"type": "ValueError", "message": EVIL, "traceback": ["File …\n", EVIL]}

    monkeypatch.setattr(web.services.jobs, "job", one)
    monkeypatch.setattr(web.services.outputs, "error", error)
    shown = words(check(await (await web.browser("root")).get(f"{PREFIX}jobs/{id}")))
    for part in ("ValueError", "step 3", "1 min 1 s", "Resume"):
        assert part in shown


@pytest.mark.covers("F12", "N17")
async def test_the_policy_page_from_edit_to_history(web: Portal) -> None:
    browser = await web.browser("root")
    text = check(await browser.get(f"{PREFIX}policy"))
    document = (await web.services.policies.current(PEOPLE["root"])).document or ""
    form = xsrf(text) | {"base": "1", "comment": EVIL}
    assert "version 1 in force" in words(text)

    wrong = document.replace("reserved: 5", "reserved: 500", 1)
    answer = await browser.post(f"{PREFIX}policy", data=form | {"document": wrong, "action": "apply"})
    shown = check(answer, 422)
    assert "What is wrong" in words(shown)
    assert 'data-line="' in shown
    assert "reserved: 500" in shown, "what was typed is kept"

    better = document.replace("limit: 9", "limit: 10").replace("\n", "\r\n")
    for action in ("validate", "preview"):
        shown = words(check(await browser.post(f"{PREFIX}policy", data=form | {"document": better, "action": action})))
        assert "What it changes" in shown
        assert ("What it would do now" in shown) is (action == "preview")
    shown = words(await applied(browser, form | {"document": better}))
    assert "Version 2 is in force." in shown
    assert EVIL in shown
    stale = await applied(browser, form | {"document": document}, 409)
    assert "The policy changed meanwhile" in words(stale)
    assert "as in version 1" in words(check(await browser.get(f"{PREFIX}policy?version=1")))
    check(await browser.get(f"{PREFIX}policy?version=0"), 422)
    for evil in (EVIL, "a: [", "\x01", "</textarea>" + EVIL, ""):
        check(await browser.post(f"{PREFIX}policy", data=form | {"document": evil, "action": "preview"}), 422)


@pytest.mark.covers("F12")
async def test_an_error_of_the_service_is_a_page_that_says_so(web: Portal, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = await web.browser("root")
    form = xsrf(check(await browser.get(f"{PREFIX}policy"))) | {"base": "1", "document": "pools: []", "comment": ""}
    browser._transport = httpx2.ASGITransport(app=web.app, raise_app_exceptions=False)

    async def fails(*_: Any) -> Any:
        raise ZeroDivisionError(EVIL)

    monkeypatch.setattr(web.services.policies, "validate", fails)
    shown = check(await browser.post(f"{PREFIX}policy", data=form | {"action": "validate"}), 500)
    assert "Something went wrong inside Makeway" in words(shown)
    assert EVIL not in words(shown)


def confirmation(text: str) -> str:
    return text.partition('name="confirmation" value="')[2].partition('"')[0]


async def applied(browser: httpx2.AsyncClient, form: dict[str, str], status: int = 200) -> str:
    """Press Apply, and again on the page that says what the document would do."""
    shown = check(await browser.post(f"{PREFIX}policy", data=form | {"action": "apply"}))
    assert "What it would do now" in words(shown)
    assert confirmation(shown)
    again = form | {"action": "apply", "confirmation": confirmation(shown)}
    return check(await browser.post(f"{PREFIX}policy", data=again), status)


@pytest.mark.covers("F12", "N17")
async def test_a_policy_is_applied_by_who_was_shown_what_it_does(web: Portal, monkeypatch: pytest.MonkeyPatch) -> None:
    browser, other = await web.browser("root"), await web.browser("root")
    policies = web.services.policies
    document = (await policies.current(PEOPLE["root"])).document or ""
    form = xsrf(check(await browser.get(f"{PREFIX}policy"))) | {
        "base": "1", "document": document.replace("limit: 9", "limit: 10"), "action": "apply",
    }  # fmt: skip

    async def press(by: httpx2.AsyncClient = browser, **more: str) -> str:
        return words(check(await by.post(f"{PREFIX}policy", data=form | more)))

    async def version() -> int:
        return (await policies.current(PEOPLE["root"])).version

    shown = check(await browser.post(f"{PREFIX}policy", data=form))
    token = confirmation(shown)
    assert "Nothing is applied yet" in words(shown)
    assert "Nothing is applied yet" in await press(confirmation="x.y")
    changed = form["document"] + "# another text\n"
    assert "Nothing is applied yet" in await press(confirmation=token, document=changed), "another text was shown"
    other.cookies.set("jupyterhub-session-id", "another")
    mine = xsrf(check(await other.get(f"{PREFIX}policy")))
    assert "Nothing is applied yet" in await press(other, confirmation=token, **mine), "to another login"
    signer = web.app.state.authenticator.signer
    monkeypatch.setattr(signer, "_clock", lambda now=signer._clock: now() + 601)
    assert "Nothing is applied yet" in await press(confirmation=token), "ten minutes before"
    assert await version() == 1
    monkeypatch.undo()
    preview = check(await browser.post(f"{PREFIX}policy", data=form | {"action": "preview"}))
    assert "Version 2 is in force." in await press(confirmation=confirmation(preview))
    again = await browser.post(f"{PREFIX}policy", data=form | {"confirmation": token})
    assert "The policy changed meanwhile" in words(check(again, 409)), "it is good for one version"
    assert await version() == 2


@pytest.mark.covers("F12")
async def test_the_policy_page_is_for_administrators(web: Portal) -> None:
    browser = await web.browser("ana")
    assert "by administrators only" in words(check(await browser.get(f"{PREFIX}policy"), 403))
    form = xsrf((await browser.get(PREFIX)).text) | {"document": "x", "action": "apply"}
    check(await browser.post(f"{PREFIX}policy", data=form), 403)


async def test_error_pages_are_friendly(web: Portal) -> None:
    browser = await web.browser("ana")
    shown = words(check(await browser.get(f"{PREFIX}nothing/<script>alert(1)</script>"), 404))
    assert "There is nothing at" in shown
    assert "it needs the scope" in words(check(await (await web.browser("blind")).get(PREFIX), 403))
    check(await web.as_(None, headers={"Accept": "text/html"}).get(f"{PREFIX}jobs/j-1"), 401)
    assert (await browser.get(f"{PREFIX}nothing", headers={"Accept": "application/json"})).json()["status"] == 404


async def test_the_address_without_its_slash(web: Portal) -> None:
    answer = await web.as_(None).get(PREFIX.rstrip("/"))
    assert (answer.status_code, answer.headers["location"]) == (302, PREFIX)


async def test_everything_a_page_needs_is_served_from_here(web: Portal) -> None:
    text = (await (await web.browser("root")).get(PREFIX)).text
    outsider = web.as_(None)
    for path in re.findall(rf'(?:src|href)="({PREFIX}static/[^"]+)"', text):
        if "/vendor/" in path:
            continue  # put there by the build, see test_packages.py
        answer = await outsider.get(path)
        assert answer.status_code == 200, path
        assert "max-age" in answer.headers["cache-control"]
        for needed in re.findall(r"@import\s+url\(([^)]+)\)|@import\s+\"([^\"]+)\"", answer.text):
            inner = httpx2.URL(f"http://hub.test{path}").join("".join(needed).strip("\"'"))
            assert (await outsider.get(inner)).status_code == 200, inner


@pytest.mark.covers("N27")
async def test_the_lists_of_workloads_and_nodes(web: Portal) -> None:
    ids = await busy(web)
    root = await web.browser("root")
    text = check(await root.get(f"{PREFIX}workloads?state=running&team=rnd"))
    assert "Running 4" in words(text)
    assert f"jobs/{ids[4]}" not in text, "bo's job is of another team"
    assert "Queue 1" in words(check(await root.get(f"{PREFIX}workloads?q=PATIENT")))
    assert "No workload matches." in words(check(await root.get(f"{PREFIX}workloads?q=%3Cscript%3E")))
    check(await root.get(f"{PREFIX}workloads?state=paused"), 422)
    assert "Queue 0" in words(check(await (await web.browser("bo")).get(f"{PREFIX}workloads")))
    assert "9 of 10" in words(check(await root.get(f"{PREFIX}nodes?state=free")))
    assert "No node matches." in words(check(await root.get(f"{PREFIX}nodes?state=idle")))
    shown = words(check(await root.get(f"{PREFIX}nodes/virtual-1")))
    assert "9 of 10 GPUs in use" in shown
    assert "Running 5" in shown
    check(await root.get(f"{PREFIX}nodes/nope"), 404)
    check(await (await web.browser("blind")).get(f"{PREFIX}nodes"), 403)


async def test_a_job_that_was_preempted_waits_again_and_shows_no_exit_code(web: Portal) -> None:
    jobs = [await web.running_job(f"borrows {number}", profile="gpu3") for number in range(3)]
    browser = await web.browser("root")
    assert "<dt>Started</dt>" in (await browser.get(f"{PREFIX}live/jobs/{jobs[2]}")).text
    await web.running_job("owner", owner="bo", profile="gpu3")
    store = web.services.context.store
    [row] = [row for row in map(store.workload, jobs) if row is not None and row.state == "pending"]
    assert row.attempt == 1
    text = (await browser.get(f"{PREFIX}live/jobs/{row.id}")).text
    assert "waiting again" in text
    assert "Last started" in text
    assert "<dt>Exit code</dt>" not in text


async def test_the_decision_log_names_jobs_that_have_ended(web: Portal) -> None:
    id = await web.running_job("the name of it")
    web.backend.finish(id, 0)
    await web.run.job(id, "succeeded")
    browser = await web.browser("root")
    for path in ("live/panel", "decisions", "live/teams/rnd"):
        text = (await browser.get(f"{PREFIX}{path}")).text
        assert f'href="{PREFIX}jobs/{id}">the name of it</a>' in text, path


@pytest.mark.covers("N33")
async def test_the_panel_tells_administrators_what_does_not_end(web: Portal, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = await busy(web)
    store = web.run.service.components.store
    assert "h-hanging" not in check(await (await web.browser("root")).get(PREFIX))
    notice = Notice("it makes way", time.time() - 500, time.time() - 400)
    monkeypatch.setattr(web.services.context.world.times, "of", lambda row: row)  # as if it had been seen before
    monkeypatch.setattr(web.run.service.loop, "cycle", no_cycle)
    store.commit([Change(ids[0], {"state": "checkpointing", "notice": notice})], [], now=time.time())
    text = (await (await web.browser("root")).get(f"{PREFIX}live/panel")).text
    shown = words(text)
    assert "Does not end 1" in shown
    assert "3 GPUs on virtual-1" in shown
    assert "not by this replica" in shown
    assert "The kernel cannot end it" in shown
    assert f'<a href="{PREFIX}jobs/{ids[0]}">&lt;script&gt;' in text
    for person in ("ana", "lead", "bo"):
        assert "h-hanging" not in (await (await web.browser(person)).get(f"{PREFIX}live/panel")).text, person


async def test_the_panel_tells_administrators_which_gpus_no_pool_takes(web: Portal) -> None:
    web.services.context.world.unassigned["n1"] = (("nvidia.com/mig-1g.10gb", 7),)
    for person, shown in (("root", True), ("ana", False)):
        text = words(check(await (await web.browser(person)).get(PREFIX)))
        assert ("No pool takes 7 nvidia.com/mig-1g.10gb of n1: add a pool" in text) is shown
        assert ("whose labels this node has, or change the labels." in text) is shown


async def test_the_map_says_of_a_pool_without_nodes_whether_machines_join_it(web: Portal) -> None:
    browser = await web.browser("root")
    document = (await web.services.policies.current(PEOPLE["root"])).document or ""
    grows = "{name: grows, title: Night & day, kind: autoscaled}"
    pools = f"pools:\n  - {grows}\n  - {{name: stays, nodes: {{labels: {{gpu: other}}}}}}\n"
    document = document.replace("\npools:\n", f"\n{pools}", 1)
    await applied(
        browser, xsrf(check(await browser.get(f"{PREFIX}policy"))) | {"base": "1", "document": document, "comment": ""}
    )
    shown = words(check(await browser.get(PREFIX)))
    assert "Night & day 0 of 0 in use Machines join it when jobs wait for them." in shown
    assert "stays 0 of 0 in use This pool has no node now." in shown


@pytest.mark.covers("F75")
async def test_the_page_of_a_job_names_its_image_where_there_is_one(web: Portal) -> None:
    root = await web.browser("root")
    before = await web.run.submit("ana", "before", profile="gpu1")
    document = (await web.services.policies.current(PEOPLE["root"])).document or ""
    changed = document.replace("    title: 1 GPU\n", "    title: 1 GPU\n    image: registry.example/lab:3\n", 1)
    assert changed != document
    form = xsrf(check(await root.get(f"{PREFIX}policy")))
    await applied(root, form | {"base": "1", "document": changed, "comment": ""})
    after = await web.run.submit("ana", "after", profile="gpu1")
    assert "Image registry.example/lab:3" in words(check(await root.get(f"{PREFIX}jobs/{after.id}")))
    assert "<dt>Image</dt>" not in check(await root.get(f"{PREFIX}jobs/{before.id}"))


async def no_cycle(explain: bool = True) -> bool:
    return False
