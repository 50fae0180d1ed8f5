"""A full disk: large writes are refused in time, what ends and deletes works, a restart works, deleting makes room."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from makeway_api.errors import MakewayError
from makeway_api.models import FileIn, StorageDelete
from makeway_quota.services.limits.storage_limits import DiskSpace, StorageLimits, StorageReservation
from makeway_quota.settings import load
from makeway_quota.store.database import reserve
from makeway_quota.store.records import NewWorkload
from makeway_quota.store.storage import contents
from makeway_quota.store.store import open_store
from running import IDLE, Running, python, running

MB = 1_000_000
SIZE = 400 * MB
FILL = """
import os, time
with open(os.environ["MAKEWAY_CHECKPOINT_DIR"] + "/junk", "wb", buffering=0) as file:
    size = 2**20
    while True:
        try:
            file.write(bytes(size))
        except OSError:
            size = max(4096, size // 2)
            time.sleep(0.01)
"""
"""A job that fills its disk and takes whatever becomes free, until it is stopped"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder]).returncode:
        pytest.skip("only root mounts a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def file(number: int, size: int = 8 * MB) -> FileIn:
    """Make a file whose content no other has."""
    return FileIn(path="data.bin", data=base64.b64encode(f"{number:010}".encode() * (size // 10)).decode())


async def report(run: Running, person: str = "root") -> dict[str, int]:
    result = await run.client(person).storage()
    return {account.owner: account.bytes for account in result.accounts}


@pytest.mark.covers("N25")
async def test_a_disk_that_is_filled_by_every_way_in(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "DELETED_AGE", -10.0)
    state = disk / "state"
    async with running(state, MAKEWAY_KEEP_WORKLOADS_DAYS=90) as run:
        await run.service.retention.sweep()
        ana, root = run.client("ana"), run.client("root")
        fills = await run.submit("bo", "fills", profile="gpu1", command=python(FILL))
        await run.until(lambda: shutil.disk_usage(disk).free < MB, "the disk is full", 120)
        waits = [await _waiting(run, number) for number in range(2)]
        with pytest.raises(MakewayError) as refused:
            await run.submit("ana", "late", profile="gpu1", command=IDLE, files=[file(1)])
        assert (refused.value.code, refused.value.status) == ("disk_full", 507)
        assert refused.value.numbers["reserve_bytes"] == pytest.approx(SIZE // 10, rel=0.01)
        assert "Delete ended jobs" in refused.value.message
        assert (await ana.cancel(waits[0])).state.value == "cancelled"
        with pytest.raises(MakewayError) as refused:
            await ana.resume(waits[0])
        assert refused.value.status == 507
        await root.cancel(fills.id)
        await run.job(fills.id, "cancelled")
        assert run.service.components.world.failure is None
        assert shutil.disk_usage(disk).free < 10 * MB
    async with running(state) as run:  # a restart
        ana, root = run.client("ana"), run.client("root")
        assert run.service.components.world.failure is None
        assert (await ana.cancel(waits[1])).state.value == "cancelled"
        await run.service.retention.sweep()
        kept = await report(run)
        assert kept["bo"] > 300 * MB, "the folder of the job was measured"
        assert "bo" not in await report(run, "ana"), "others are not shown to everybody"
        with pytest.raises(MakewayError) as refused:
            await ana.delete_storage(StorageDelete(owner="bo"))
        assert refused.value.status == 403
        deleted = await root.delete_storage(StorageDelete(owner="bo"))
        assert deleted.jobs == 1
        assert deleted.bytes > 300 * MB
        await run.service.retention.sweep()
        assert shutil.disk_usage(disk).free > 300 * MB
        assert (disk / "state" / reserve.FOLDER).exists(), "room for small writes is taken again"
        taken = list[str]()
        with pytest.raises(MakewayError, match="keeps 40 MB for ending, cancelling and deleting"):
            await _submit_for_ever(run, taken)
        assert 10 < len(taken) < 60
        assert shutil.disk_usage(disk).free > SIZE // 20, "submissions leave the reserve alone"


async def _submit_for_ever(run: Running, taken: list[str]) -> None:
    """Submit jobs with files of their own until one is refused."""
    while True:
        given = {"profile": "gpu8", "command": python("pass"), "files": [file(len(taken))]}
        taken.append((await run.submit("ana", "file", **given)).id)


async def _waiting(run: Running, number: int) -> str:
    """Add a job that waits, past the limits, as on a disk that had room then."""
    store = run.service.components.store
    row = store.add_workload(
        NewWorkload(f"j-{number:08d}", "job", "rnd", "gpu8", "ana", gpus=8000, workers=5), now=1.8e9
    )
    return row.id


def test_limits_of_a_person_a_team_and_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'db.sqlite'}")
    environ = {
        "MAKEWAY_STATE_DIR": str(tmp_path),
        "MAKEWAY_MAX_KEPT_PERSON_MB": "2",
        "MAKEWAY_MAX_KEPT_TEAM_MB": "3",
        "MAKEWAY_MAX_KEPT_MB": "4",
    }
    now = 0.0
    limits = StorageLimits(store, load(environ=environ), lambda: now)
    first = StorageReservation("ana", "rnd", 1_500_000)
    assert limits.reserve(first)
    with pytest.raises(MakewayError) as refused:
        limits.reserve(StorageReservation("ana", "rnd", 600_000))
    assert (refused.value.code, refused.value.status) == ("storage_quota", 507)
    assert refused.value.message == (
        "ana keeps 1.5 MB of the 2.0 MB that one person may keep: 600 kB more do not fit. Delete ended jobs that are "
        "not needed any more: `%quota` and the page Storage list those that keep the most, `%delete ID` deletes one."
    )
    assert not limits.reserve(StorageReservation("ana", "rnd", 600_000), may_wait=True), (
        "the first one may be refused yet"
    )
    limits.release(first)
    again = StorageReservation("ana", "rnd", 600_000)
    assert limits.reserve(again)
    limits.release(again)
    for number, owner in enumerate(("ana", "bo")):
        new = NewWorkload(f"j{number}", "job", "rnd", "gpu1", owner, source="x" * 1_600_000)
        store.add_workload(new, now=0.0)
    now = 20.0
    assert limits.quota_refusal("ana", "rnd", 100_000) is not None, "the team"
    team = "The team rnd keeps 3.2 MB of the 3.0 MB that one team may keep, of which bo: jobs 1.6 MB: 1 bytes more"
    assert str(limits.quota_refusal("bo", "rnd", 1)).startswith(team)
    assert limits.quota_refusal("bo", "ops", 100_000) is None
    assert "All people together keep 3.2 MB of the 4.0 MB that all may keep: 900 kB" in str(
        limits.quota_refusal("cy", "ops", 900_000)
    )
    store.close()


@pytest.mark.parametrize("percent", [25, 50, 100])
def test_one_member_does_not_use_up_the_quota_of_a_team(tmp_path: Path, percent: int) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'db.sqlite'}")
    environ = {
        "MAKEWAY_STATE_DIR": str(tmp_path),
        "MAKEWAY_MAX_KEPT_PERSON_MB": "0",
        "MAKEWAY_MAX_KEPT_TEAM_MB": "4",
        "MAKEWAY_MAX_KEPT_SHARE_PERCENT": str(percent),
    }
    now, maximum = 0.0, 40_000 * percent
    limits = StorageLimits(store, load(environ=environ), lambda: now)
    arriving = [StorageReservation("ana", "rnd", 100_000) for _ in range(maximum // 100_000)]
    assert all(limits.reserve(item) for item in arriving)
    with pytest.raises(MakewayError) as refused:
        limits.reserve(StorageReservation("ana", "rnd", 1))
    assert refused.value.numbers["limit_bytes"] == maximum
    if percent < 100:
        assert "that one person may keep of the quota of rnd" in refused.value.message
        limits.reserve(StorageReservation("ana", "ops", 100_000))
        for item in arriving:
            limits.release(item)
        store.add_workload(NewWorkload("j0", "job", "rnd", "gpu1", "ana", source="x" * maximum), now=0.0)
        now = 10.0
        assert limits.quota_refusal("ana", "rnd", 1) is not None, "as the database has it"
        limits.reserve(StorageReservation("bo", "rnd", min(maximum, 4_000_000 - maximum) - 10_000))
    store.close()


def test_who_deletes_and_submits_in_turn_has_twice_the_quota_on_the_disk_at_most(tmp_path: Path) -> None:
    """The large files of what was deleted stay for two minutes, for submissions of the same."""
    store, now = open_store(f"sqlite:///{tmp_path / 'db.sqlite'}"), 0.0
    environ = {"MAKEWAY_STATE_DIR": str(tmp_path), "MAKEWAY_MAX_KEPT_PERSON_MB": "2"}
    limits = StorageLimits(store, load(environ=environ), lambda: now)

    def take_turns() -> None:
        for _ in range(10):
            taken = StorageReservation("ana", "rnd", 700_000)
            limits.reserve(taken)
            limits.release(taken)
            limits.note_deleted("ana", 700_000)

    for start in (0.0, 1000.0, -1000.0):  # a clock that is set back holds no one up
        now = start
        with pytest.raises(MakewayError, match="try again in 160 s") as refused:
            take_turns()
        assert (refused.value.code, refused.value.numbers["deleted_bytes"]) == ("deleted_lately", 1_400_000)
        for other in (StorageReservation("bo", "rnd", 700_000), StorageReservation("ana", "rnd", 10_000)):
            assert limits.reserve(other), "another person, and code without large files"
            limits.release(other)
    store.close()


def test_notes_of_deletions_do_not_grow_and_go_with_what_they_tell_of(tmp_path: Path) -> None:
    store, now = open_store(f"sqlite:///{tmp_path / 'db.sqlite'}"), 0.0
    limits = StorageLimits(store, load(environ={"MAKEWAY_STATE_DIR": str(tmp_path)}), lambda: now)
    for at in range(1000):
        now = at / 2
        limits.note_deleted("ana", 1000)
    assert len(limits._deleted_files["ana"]) <= 20
    now += 200
    limits.note_deleted("bo", 1000)
    assert list(limits._deleted_files) == ["bo"]
    store.close()


@pytest.mark.parametrize(("who", "size", "noted"), [("ana", 300_000, 300_000), ("root", 300_000, 0), ("ana", 1000, 0)])
async def test_only_large_files_that_who_deletes_leaves_on_the_disk_count(
    tmp_path: Path, who: str, size: int, noted: int
) -> None:
    async with running(tmp_path) as run:
        ana, storage = run.client("ana"), run.service.services.context.storage
        given = {"team": "rnd", "profile": "gpu8", "workers": 2, "files": [file(1, size)]}
        jobs = [await run.submit("ana", name, **given) for name in ("one", "two")]
        for job in jobs:
            await ana.cancel(job.id)
            await run.job(job.id, "cancelled")
        await run.client(who).delete_job(jobs[0].id)
        assert not storage._deleted_files, "the other job has the content, too"
        await run.client(who).delete_job(jobs[1].id)
        assert sum(bytes for item in storage._deleted_files.values() for _, bytes in item) == noted


def test_what_is_being_written_fills_no_disk_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its large files may be on the disk already, and may be refused."""
    store = open_store(f"sqlite:///{tmp_path / 'db.sqlite'}")
    environ = {"MAKEWAY_STATE_DIR": str(tmp_path), "MAKEWAY_MAX_KEPT_PERSON_MB": "2"}
    limits = StorageLimits(store, load(environ=environ), lambda: 0.0)
    monkeypatch.setattr(limits, "disk_space", lambda: DiskSpace(3_000_000, 1_000_000))
    first = StorageReservation("ana", "rnd", 1_500_000)
    assert limits.reserve(first)
    assert not limits.reserve(StorageReservation("bo", "rnd", 600_000), may_wait=True)
    for size, may_wait in ((600_000, False), (2_100_000, True)):
        with pytest.raises(MakewayError, match=r"The disk of Makeway has 3\.0 MB free"):
            limits.reserve(StorageReservation("bo", "rnd", size), may_wait=may_wait)
    assert limits.quota_refusal("ana", "rnd", 600_000) is None, "a result, which would be lost"
    assert limits.quota_refusal("ana", "rnd", 2_100_000) is not None
    limits.release(first)
    assert limits.reserve(StorageReservation("bo", "rnd", 600_000), may_wait=True)
    store.close()


async def test_an_owner_deletes_an_ended_job(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        ana = run.client("ana")
        job = await run.submit("ana", "one", profile="gpu1", command=IDLE, files=[file(1, 100)])
        await run.job(job.id, "running")
        with pytest.raises(MakewayError) as refused:
            await ana.delete_job(job.id)
        assert (refused.value.code, refused.value.status) == ("not_ended", 409)
        await ana.cancel(job.id)
        await run.job(job.id, "cancelled")
        with pytest.raises(MakewayError) as refused:
            await run.client("bo").delete_job(job.id)
        assert refused.value.status == 404, "bo is in another team"
        assert (await ana.delete_job(job.id)).jobs == 1
        with pytest.raises(MakewayError) as refused:
            await ana.job(job.id)
        assert refused.value.status == 410
        assert (await ana.storage()).mine == 0
        await run.service.retention.sweep()  # at the latest: its folder is removed between two passes, too
        assert not (tmp_path / "jobs" / job.id).exists()
        lines = await run.client("root").decisions()
        assert any(line.verb == "delete" and line.workload == job.id for line in lines)


async def test_members_do_not_pass_the_quota_of_a_team_at_the_same_moment(tmp_path: Path) -> None:
    """Each of them was told of the same free bytes; also where a disk is slow between the check and the write."""
    limits = {"MAKEWAY_MAX_KEPT_TEAM_MB": 2, "MAKEWAY_MAX_KEPT_SHARE_PERCENT": 100}
    async with running(tmp_path, **limits) as run:
        members = ("ana", "lea")
        given = {"team": "rnd", "profile": "gpu8", "workers": 2}
        for name in members:  # their sums are known from now on
            await run.submit(name, "small", **given)
        tries = [run.submit(name, "large", files=[file(at, 1_200_000)], **given) for at, name in enumerate(members)]
        result = await asyncio.gather(*tries, return_exceptions=True)
        [refused] = [item for item in result if isinstance(item, MakewayError)]
        assert (refused.code, refused.status, refused.numbers["limit_bytes"]) == ("storage_quota", 507, 2_000_000)
        assert refused.message.startswith("The team rnd keeps 1.2 MB of the 2.0 MB that one team may keep, of which ")
        assert (await run.client("root").storage()).whole < 2_000_000


async def test_members_who_submit_at_once_write_no_more_than_the_quota_and_one_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large files are on the disk before the rows that tell of them: their bytes count from then on, too."""
    limits = {"MAKEWAY_MAX_KEPT_TEAM_MB": 3, "MAKEWAY_MAX_KEPT_SHARE_PERCENT": 100, "MAKEWAY_MAX_KEPT_PERSON_MB": 0}
    async with running(tmp_path, **limits) as run:
        store, given = run.service.components.store, {"team": "rnd", "profile": "gpu8", "workers": 2}
        keep, wrote = store.contents.keep, list[int]()

        def slowly(files: Sequence[tuple[str, bytes, bool]]) -> None:
            time.sleep(0.02)  # a disk that takes a moment
            keep(files)
            wrote.append(sum(len(data) for _, data, _ in files))

        monkeypatch.setattr(store.contents, "keep", slowly)
        for name in ("ana", "lea"):  # their sums are known from now on
            await run.submit(name, "small", **given)
        tries = [
            run.submit(name, "large", files=[file(10 * at + n, 900_000)], **given)
            for n in range(4)
            for at, name in enumerate(("ana", "lea"))
        ]
        result = await asyncio.gather(*tries, return_exceptions=True)
        refused = [item for item in result if isinstance(item, BaseException)]
        assert {(item.code, item.status) for item in refused} == {("storage_quota", 507)}
        assert len(result) - len(refused) == 3, "as many as fit are taken"
        assert sum(wrote) <= 3_000_000 + 900_000
        assert (await run.client("root").storage()).whole < 3_000_000
        assert not run.service.services.context.storage._reservations


async def test_a_submission_waits_for_the_room_of_one_that_is_refused_or_cancelled(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'db.sqlite'}")
    environ = {"MAKEWAY_STATE_DIR": str(tmp_path), "MAKEWAY_MAX_KEPT_TEAM_MB": "1"}
    limits, entered = StorageLimits(store, load(environ=environ)), asyncio.Semaphore(0)

    async def submit(owner: str, go_on: asyncio.Event) -> str:
        async with limits.room_for(owner, "rnd", 400_000, asyncio.to_thread):
            entered.release()
            await go_on.wait()
        return owner

    stop, ready = asyncio.Event(), asyncio.Event()
    ready.set()
    first = [asyncio.create_task(submit(owner, stop)) for owner in ("ana", "bo")]
    for _ in first:
        await entered.acquire()
    third = asyncio.create_task(submit("cy", ready))
    done, _ = await asyncio.wait([third], timeout=0.1)
    assert not done, "there is room for two"
    first[0].cancel()
    assert await third == "cy"
    stop.set()
    assert await first[1] == "bo"
    late = asyncio.create_task(submit("di", ready))
    await asyncio.sleep(0)  # its thread may run already
    late.cancel()
    await asyncio.wait([late])
    await asyncio.to_thread(lambda: None)
    assert not limits._reservations
    store.close()
