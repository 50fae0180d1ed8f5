"""Offers: correct after every change, shared by equal requests, and within a share of a processor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from makeway_api.errors import MakewayError
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control.world.engine_view import EngineChanges
from makeway_quota.engine import Snapshot, WhatIf
from makeway_quota.services import policies
from makeway_quota.services.cluster import offer_engine
from makeway_quota.services.cluster import offers as offers_module
from makeway_quota.services.cluster.offer_engine import Budget, OfferEngine, Question, question_of
from makeway_quota.store.records import Change, NewWorkload
from makeway_quota.wording import gpus_are
from running import PEOPLE, Running, running

NODE = NodeStatus("virtual-1", "gpu", tuple(range(10)), virtual=True)


def backend() -> MemoryBackend:
    return MemoryBackend([NODE], real_time=True)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def code(run: Running, profile: str) -> str:
    table = await run.client("ana").offers("ana", "job")
    return next(offer.code for offer in table.offers if offer.profile == profile)


async def test_an_offer_follows_every_change_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, backend=backend()) as run:
        for _ in range(2):
            assert await code(run, "gpu3") == "ready_now"
            made = [await run.submit("ana", f"job {number}", profile="gpu3") for number in range(3)]
            for job in made:
                await run.job(job.id, "running")
            assert await code(run, "gpu3") != "ready_now"
            for job in made:
                await run.client("ana").cancel(job.id)
                await run.job(job.id, "cancelled")


async def test_the_same_question_of_many_users_costs_one_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Question] = []
    ask = OfferEngine._ask

    def counted(self: OfferEngine, unread: Sequence[EngineChanges], question: Question, now: float) -> object:
        asked.append(question)
        return ask(self, unread, question, now)

    monkeypatch.setattr(OfferEngine, "_ask", counted)
    async with running(tmp_path, backend=backend()) as run:
        await run.converged()
        offers = run.service.services.offers
        tables = await asyncio.gather(
            *(offers.offers(PEOPLE["ana"], f"user{number}", ["rnd"], "session") for number in range(40))
        )
        assert len({table.model_copy(update={"user": ""}).model_dump_json() for table in tables}) == 1
        assert len(asked) == len(set(asked)), "each question is answered once"
        before = len(asked)
        await offers.offers(PEOPLE["ana"], "ana", ["rnd"], "session")
        assert len(asked) == before, "nothing changed"


async def test_a_what_if_lets_a_cycle_go_first_between_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, backend=backend()) as run:
        for number in range(3):
            job = await run.submit("ana", f"job {number}", profile="gpu3")
            await run.job(job.id, "running")
        gate, asked = run.service.services.context.gate, list[bool]()
        monkeypatch.setattr(type(gate), "wait_in_thread", lambda self: asked.append(self.is_open))
        table = await run.service.services.offers.offers(PEOPLE["bo"], "bo", ["devops"], "session")
        assert any(offer.code == "ready_after_reclaim" for offer in table.offers)
        assert asked


async def test_an_answer_is_written_once_for_all_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed, written = [0], [0]
    ask, sentence = OfferEngine._ask, offers_module.sentence

    def counted(self: OfferEngine, *arguments: Any) -> object:
        computed[0] += 1
        return ask(self, *arguments)

    def counted_sentence(*arguments: Any) -> str:
        written[0] += 1
        return sentence(*arguments)

    monkeypatch.setattr(OfferEngine, "_ask", counted)
    monkeypatch.setattr(offers_module, "sentence", counted_sentence)
    async with running(tmp_path, backend=backend()) as run:
        await run.converged()
        offers = run.service.services.offers
        for _ in range(20):
            table = await offers.offers(PEOPLE["ana"], "ana", ["rnd"], "session")
            assert any(offer.team == "rnd" for offer in table.offers)
        assert 0 < written[0] <= computed[0]

        world, before = run.service.services.context.world, written[0]
        world.use(replace(world.document), world.policy_version + 1)
        again = await offers.offers(PEOPLE["ana"], "ana", ["rnd"], "session")
        assert again.offers
        assert written[0] > before, "a new document may have other titles"


async def test_the_answers_of_two_users_of_a_team_do_not_replace_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine answers each user on their own: jobs wait in line with the others of their owner."""
    written: list[str] = []
    sentence = offers_module.sentence

    def counted(*arguments: Any) -> str:
        written.append(sentence(*arguments))
        return written[-1]

    monkeypatch.setattr(offers_module, "sentence", counted)
    monkeypatch.setattr(offer_engine, "LASTS", 3600.0)
    async with running(tmp_path, backend=backend()) as run:
        await run.converged()
        offers = run.service.services.offers
        tables = [await offers.offers(PEOPLE[user], user, ["rnd"], "job") for user in ("ana", "lea")]
        before = len(written)
        assert before
        again = [await offers.offers(PEOPLE[user], user, ["rnd"], "job") for user in ("ana", "lea") for _ in range(3)]
        assert len(written) == before
        assert [table.offers for table in again] == [table.offers for table in tables for _ in range(3)]


async def test_a_slow_answer_is_given_while_a_new_one_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offer_engine, "CHEAP", -1.0)
    async with running(tmp_path, backend=backend()) as run:
        await run.converged()
        context = run.service.services.context
        clock = Clock()
        engine = OfferEngine(context, clock)
        first = await engine.answer("rnd", "gpu3", "session", "ana")
        made = await run.submit("ana", "job", profile="gpu3")
        await run.job(made.id, "running")
        assert await engine.answer("rnd", "gpu3", "session", "bo") is first, "two seconds old at most"
        await engine._under_way[Question("rnd", "gpu3", "session", "")]
        second = await engine.answer("rnd", "gpu3", "session", "ana")
        assert second.state > first.state
        await run.client("ana").cancel(made.id)
        await run.job(made.id, "cancelled")
        clock.now = 100.0
        assert (await engine.answer("rnd", "gpu3", "session", "ana")).state > second.state, (
            "an old answer is not given while there is budget"
        )


async def test_an_answer_stands_while_nothing_changes_that_the_engine_sees(tmp_path: Path) -> None:
    async with running(tmp_path, backend=backend()) as run:
        context = run.service.services.context
        made = await run.submit("ana", "job", profile="gpu3")
        await run.job(made.id, "running")
        engine = OfferEngine(context, Clock())
        first = await engine.answer("rnd", "gpu3", "session", "ana")
        await run.converged()
        again = await engine.answer("rnd", "gpu3", "session", "ana")
        step = Change(made.id, {"checkpoint_step": 7})
        await asyncio.to_thread(context.store.commit, [step], now=run.service.components.clock())
        assert (row := await context.world.row(made.id)) is not None
        assert row.checkpoint_step == 7
        known = await engine.answer("rnd", "gpu3", "session", "ana")
        assert (known.offer, known.state, known.at) == (again.offer, again.state, again.at)
        assert known.as_of > first.as_of, "it holds for the newer version too"


async def test_after_an_error_the_engine_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path, backend=backend()) as run:
        await run.converged()
        engine = OfferEngine(run.service.services.context)
        assert (await engine.answer("rnd", "gpu3", "session", "ana")).offer.code == "ready_now"

        def fails(*_: object) -> None:
            raise RuntimeError("half changed")

        with monkeypatch.context() as patch:
            patch.setattr(WhatIf, "change", fails)
            with pytest.raises(RuntimeError, match="half changed"):
                await engine.answer("rnd", "gpu1", "session", "ana")
        for number in range(3):
            await run.job((await run.submit("ana", f"job {number}", profile="gpu3")).id, "running")
        result = await engine.answer("rnd", "gpu3", "session", "ana")
        snapshot = await snapshot_of(run)
        assert len(snapshot.workloads) == 3
        assert result.offer == WhatIf(snapshot).offer("rnd", "gpu3", "session")


@pytest.mark.covers("N25")
async def test_changes_that_the_engine_was_not_shown_for_long_are_dropped_and_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offer_engine, "CHEAP", -1.0)  # an older answer will do
    monkeypatch.setattr(offer_engine, "MAX_UNREAD", 12)
    async with running(tmp_path, backend=backend()) as run:
        await run.converged()
        engine = OfferEngine(run.service.services.context, Clock())
        first = await engine.answer("rnd", "gpu3", "session", "ana")
        kept, dropped = [], 0
        async with engine._lock:  # the engine is busy
            for number in range(20):
                made = await run.submit("ana", f"job {number}", profile="gpu3")
                assert (await run.job(made.id)).state in ("pending", "starting", "running")
                assert await engine.answer("rnd", "gpu3", "session", "ana") is first
                kept.append(len(engine._unread))
                dropped += engine._built_at is None
        assert max(kept) <= 12
        assert dropped
        await run.converged()
        result = first
        while result is first or engine._under_way:
            await asyncio.gather(*engine._under_way.values())
            result = await engine.answer("rnd", "gpu3", "session", "bo")
        snapshot = await snapshot_of(run)
        assert len(snapshot.workloads) == 20
        assert result.offer == WhatIf(snapshot).offer("rnd", "gpu3", "session")


@pytest.mark.covers("N25")
async def test_an_answer_computed_after_too_many_changes_is_that_of_a_new_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offer_engine, "MAX_UNREAD", 12)
    async with running(tmp_path, backend=backend()) as run:
        await run.converged()
        engine = OfferEngine(run.service.services.context, Clock())
        await engine.answer("rnd", "gpu3", "session", "ana")
        async with engine._lock:  # the engine is busy
            await run.submit("ana", "first", profile="gpu3")
            await run.converged()
            asking = asyncio.ensure_future(engine.answer("rnd", "gpu3", "session", "ana"))
            for number in range(20):
                await run.submit("ana", f"job {number}", profile="gpu3")
            await run.converged()
            assert engine._under_way
        result = await asking
        snapshot = await snapshot_of(run)
        assert len(snapshot.workloads) == 21
        assert result.offer == WhatIf(snapshot).offer("rnd", "gpu3", "session")


async def snapshot_of(run: Running) -> Snapshot:
    world = run.service.services.context.world
    return world.snapshot(await world.rows(), run.service.components.clock())


async def test_young_answers_are_given_again_while_many_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offer_engine, "CROWDED", 0)
    async with running(tmp_path, backend=backend()) as run:
        await run.converged()
        clock = Clock()
        engine = OfferEngine(run.service.services.context, clock)
        first = await engine.answer("rnd", "gpu3", "session", "ana")
        made = await run.submit("ana", "job", profile="gpu3")
        await run.job(made.id, "running")
        clock.now = offer_engine.OLDEST - 0.1
        assert await engine.answer("rnd", "gpu3", "session", "bo") is first
        await engine._under_way[Question("rnd", "gpu3", "session", "")]
        await run.client("ana").cancel(made.id)
        await run.job(made.id, "cancelled")
        clock.now = 2 * offer_engine.OLDEST
        assert (await engine.answer("rnd", "gpu3", "session", "bo")).state > first.state


async def test_questions_beyond_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_engine, "MAX_WAITING", 1)
    async with running(tmp_path, backend=backend()) as run:
        engine = OfferEngine(run.service.services.context)
        answers = await asyncio.gather(
            *(engine.answer("rnd", "gpu1", "job", f"user{n}") for n in range(5)),
            return_exceptions=True,
        )
        refused = [answer for answer in answers if isinstance(answer, MakewayError)]
        assert len(refused) == 4
        assert (refused[0].status, refused[0].code, refused[0].numbers) == (503, "offers_busy", {"retry_after": 2})


async def test_previews_beyond_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "MAX_PREVIEWS", 1)
    async with running(tmp_path, backend=backend()) as run:
        service = run.service.services.policies
        text = (await service.current(PEOPLE["root"])).document or ""
        answers = await asyncio.gather(
            *(service.preview(PEOPLE["root"], text) for _ in range(3)), return_exceptions=True
        )
        refused = [answer for answer in answers if isinstance(answer, MakewayError)]
        assert [(error.status, error.code) for error in refused] == [(503, "previews_busy")] * 2


async def test_a_preview_neither_delays_offers_nor_runs_twice_for_one_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, free = threading.Event(), threading.Event()
    both = policies._project_both

    def slow(*args: Any) -> Any:
        under_way.set()
        assert free.wait(30)
        return both(*args)

    monkeypatch.setattr(policies, "_project_both", slow)
    async with running(tmp_path, backend=backend()) as run:
        service, context = run.service.services.policies, run.service.services.context
        text = (await service.current(PEOPLE["root"])).document or ""
        first = asyncio.create_task(service.preview(PEOPLE["root"], text))
        try:
            assert await asyncio.to_thread(under_way.wait, 30)
            async with asyncio.timeout(60):
                await OfferEngine(context).answer("rnd", "gpu1", "job", "ana")
            with pytest.raises(MakewayError) as refused:
                await service.preview(PEOPLE["root"], text)
            assert (refused.value.status, refused.value.code) == (429, "preview_under_way")
        finally:
            free.set()
        await first
        await service.preview(PEOPLE["root"], text)


def test_the_budget_grows_with_the_clock_up_to_a_burst() -> None:
    clock = Clock()
    budget = Budget(0.1, 1.0, clock)
    budget.spend(1.0)
    assert budget.wait() == 0.0
    budget.spend(0.5)
    assert budget.wait() == pytest.approx(5.0)
    clock.now = 2.0
    assert budget.wait() == pytest.approx(3.0)
    clock.now = 1.0  # a clock that jumps back gives nothing and takes nothing
    assert budget.wait() == pytest.approx(3.0)
    clock.now = 1000.0
    assert budget.wait() == 0.0
    budget.spend(1.0)
    assert budget.wait() == 0.0, "no more than the burst was saved"
    budget.spend(0.1)
    assert budget.wait() == pytest.approx(1.0)


def test_gpus_have_their_verb() -> None:
    assert [gpus_are(milli) for milli in (500, 1000, 2000, 0)] == ["0.5 GPU is", "1 GPU is", "2 GPUs are", "0 GPUs are"]


async def test_the_owner_matters_while_a_session_of_the_team_is_pending(tmp_path: Path) -> None:
    async with running(tmp_path, backend=MemoryBackend([])) as run:
        models = run.service.services.context.read_models
        assert question_of(await models.current(), "rnd", "gpu3", "session", "ana").owner == ""
        assert question_of(await models.current(), "rnd", "gpu3", "job", "ana").owner == "ana"
        store = run.service.components.store
        new = NewWorkload("s-1", "session", "rnd", "gpu3", "bo", gpus=3000, server="x")
        await asyncio.to_thread(store.add_workload, new, now=run.service.components.clock())
        model = await models.current()
        if (row := model.sessions.get("s-1")) is None or row.state != "pending":
            pytest.fail("nothing can start without a node")
        assert question_of(model, "rnd", "gpu3", "session", "ana").owner == "ana"
        assert question_of(model, "devops", "gpu3", "session", "ana").owner == ""
