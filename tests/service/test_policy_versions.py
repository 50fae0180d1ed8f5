"""A policy document is stored, logged and in force, or none of it: whatever fails, and whatever differs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from makeway_api.errors import MakewayError
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control.world import pool_assignment
from makeway_quota.history.accounting import Accounting
from makeway_quota.policy import Document
from makeway_quota.services import policies
from makeway_quota.store import writes
from makeway_quota.store.records import Workload
from running import SAMPLE, Running, running

TEXT = SAMPLE.read_text(encoding="utf-8")
BETTER = TEXT.replace("limit: 9", "limit: 10")
PAIRS = int(os.environ.get("POLICY_PAIRS", "400"))


class Injected(Exception):
    """What the tests raise."""


def fail(*_: Any, **__: Any) -> Any:
    raise Injected


async def told(run: Running) -> tuple[int, str, list[str]]:
    """Return the version that is stored and in force, its text, and what the log says of policies."""
    client, world = run.client("root"), run.service.components.world
    current = await client.policy()
    decisions = await asyncio.to_thread(run.service.components.store.decisions)
    assert world.policy_version == current.version
    return current.version, current.document or "", [d.message for d in decisions if d.verb == "policy"]


@pytest.mark.covers("F12")
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (policies, "read_policy"),
        (policies, "policy_diff"),
        (policies, "NewDecision"),
        (writes, "add_policy"),
        (writes, "_event"),
        (writes, "_decision_ids"),
        (writes.ADD_DECISIONS, "run"),
    ],
)
async def test_a_document_that_was_refused_is_never_in_force(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as run:
        before = await told(run)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises((Injected, MakewayError)):
                await run.client("root").policy_apply(BETTER, "more", before[0])
        assert await told(run) == before
    async with running(tmp_path) as again:
        assert await told(again) == before
        await again.client("root").policy_apply(BETTER, "more", before[0])
        version, text, log = await told(again)
        assert (version, text, len(log)) == (before[0] + 1, BETTER, len(before[2]) + 1)


@pytest.mark.covers("F12", "F77")
async def test_a_new_team_gets_no_credential_of_an_earlier_one_of_its_name(tmp_path: Path) -> None:
    """A team that is left out by mistake loses none: an administrator enables them."""
    whole = yaml.safe_load(TEXT)
    for profile in whole["profiles"]:
        profile.pop("policies", None)
    text = yaml.safe_dump(whole)
    without = yaml.safe_dump({**whole, "policies": [team for team in whole["policies"] if team["name"] != "rnd"]})
    async with running(tmp_path, text) as run:
        root, ana = run.client("root"), run.client("ana")
        credentials = run.service.services.credentials
        for name in ("storage", "git"):
            await root.credential_save(name, "file", {"content": f"{name} of rnd"}, team="rnd")
        await root.credential_save("storage", "file", {"content": "of all"}, team="")
        [told] = [one.message for one in (await root.policy_validate(without)).warnings if "credential" in one.message]
        assert told.startswith("The team rnd is not in this document, which disables its credentials git and storage.")
        assert not [one for one in (await root.policy_validate(text)).warnings if "credential" in one.message]
        await root.policy_apply(without, "less")
        assert await credentials.files("rnd") == {"storage": "of all"}
        gone = [one.disabled_at is not None for one in await root.credentials() if one.team == "rnd"]
        assert gone == [True, True], "administrators see them"
        with pytest.raises(MakewayError, match="no team rnd: add it to the policy first") as refused:
            await root.credential_enable("git", "rnd")
        assert refused.value.status == 409
    async with running(tmp_path, text) as run:  # a start while the team is gone, with a file that has it
        root, ana = run.client("root"), run.client("ana")
        credentials = run.service.services.credentials
        await root.policy_apply(text, "again")
        assert await credentials.files("rnd") == {"storage": "of all"}
        assert await ana.credentials() == [], "members learn nothing of those of the earlier team"
        with pytest.raises(MakewayError) as forbidden:
            await ana.credential_enable("git", "rnd")
        assert forbidden.value.status == 403
        assert (await root.credential_enable("git", "rnd")).disabled_at is None
        with pytest.raises(MakewayError, match="no credential other of rnd"):
            await root.credential_enable("other", "rnd")
        assert await credentials.files("rnd") == {"storage": "of all", "git": "git of rnd"}
        await root.credential_save("storage", "file", {"content": "new"}, team="rnd")
        assert await credentials.files("rnd") == {"storage": "new", "git": "git of rnd"}
        await root.policy_apply(without, "less")
        await root.credential_delete("storage", "rnd")
        assert [(one.name, one.team) for one in await root.credentials()] == [("git", "rnd"), ("storage", "")]


@pytest.mark.covers("F12")
async def test_a_document_that_is_in_force_already_makes_no_version(tmp_path: Path) -> None:
    """As of a script that applies the same file every minute, for months."""
    async with running(tmp_path) as run:
        root = run.client("root")
        version = (await root.policy_apply(BETTER, "more")).version
        before = await told(run)
        for base in (None, version):
            again = await root.policy_apply(BETTER, "once more", base)
            assert (again.version, again.comment) == (version, "more")
        with pytest.raises(MakewayError, match="meanwhile"):
            await root.policy_apply(BETTER, "", version - 1)
        assert await told(run) == before
        assert (await root.policy_apply(TEXT, "back", version)).version == version + 1


@pytest.mark.covers("F12")
@pytest.mark.parametrize("part", ["node", "workload"])
async def test_a_stored_document_is_in_force_whatever_cannot_be_counted_by_it(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TEXT.replace("settings:\n", "settings:\n  history_half_life: 3600\n", 1)
    backend = MemoryBackend(
        [NodeStatus(f"n{at}", "gpu", tuple(range(5)), cpu=64000, memory=256_000) for at in (1, 2, 3)]
    )
    bad = {"n1"} if part == "node" else set[str]()
    parts, follow = pool_assignment._parts, Accounting.follow

    def divided(seen: NodeStatus, document: Document) -> Any:
        return fail() if seen.name in bad else parts(seen, document)

    def followed(accounting: Accounting, rows: Iterable[Workload]) -> None:
        follow(accounting, [fail() if row.id in bad else row for row in rows])

    monkeypatch.setattr(pool_assignment, "_parts", divided)
    monkeypatch.setattr(Accounting, "follow", followed)
    async with running(tmp_path, text, backend=backend) as run:
        job = await run.job((await run.submit("ana", "runs", profile="gpu1")).id, "running")
        version = (await told(run))[0]
        if part == "workload":
            bad.add(job.id)
        for limit in (10, 11):
            change = text.replace("limit: 9", f"limit: {limit}")
            version = (await run.client("root").policy_apply(change, "more", version)).version
            assert (await told(run))[:2] == (version, change)
            assert run.service.components.world.document.policies[0].quotas[0].limit == limit * 1000
            if part == "node":
                await run.client("root").policy_preview(text)
        assert run.service.components.world.quarantine.all(part)


def edited(tree: dict[str, Any], random: Random) -> dict[str, Any]:
    """Return a document with quota lines that are new, removed and changed, and other changes of administrators."""
    tree = yaml.safe_load(yaml.safe_dump(tree))
    pools = [pool["name"] for pool in tree["pools"]]
    for _ in range(random.randint(1, 4)):
        team = random.choice(tree["policies"])
        lines = team.setdefault("quotas", [])
        match random.randrange(8):
            case 0:
                line: dict[str, Any] = {"pools": random.sample(pools, random.randint(1, len(pools)))}
                for key in random.sample(["reserved", "limit", "lend"], random.randint(0, 3)):
                    line[key] = {"reserved": 1, "limit": random.choice([1, 4, 12.5]), "lend": 0}[key]
                lines.insert(random.randint(0, len(lines)), line if random.random() < 0.7 else {"reserved": 0})
            case 1 if lines:
                lines.pop(random.randrange(len(lines)))
            case 2 if lines:
                random.choice(lines).pop(random.choice(["limit", "lend", "pools", "reserved"]), None)
            case 3:
                name = f"pool{len(tree['pools'])}"
                tree["pools"].append(
                    {"name": name, "resource": f"example.com/{name}", "nodes": {"labels": {"a": name}}}
                )
                pools.append(name)
            case 4 if len(pools) > 1:
                gone = pools.pop()
                tree["pools"] = [pool for pool in tree["pools"] if pool["name"] != gone]
                for owner in [
                    *tree["profiles"],
                    *(line for one in tree["policies"] for line in one.get("quotas") or ()),
                ]:
                    if gone in (owner.get("pools") or ()):
                        owner["pools"] = [name for name in owner["pools"] if name != gone] or pools[:1]
            case 5:
                team["title"] = random.choice(["none", "", "R&D", "on", "1 h", "<b>'\"", "→"])
            case 6:
                tree["settings"][random.choice(["grace", "starvation_after"])] = random.choice([30, 30.5, "1h", "1d"])
            case _:
                profile = random.choice(tree["profiles"])
                profile[random.choice(["time_limit", "reclaim_after", "min_runtime"])] = random.choice([1, 59.9, "2d"])
    return tree


async def rolled(run: Running, text: str, applied: dict[int, str]) -> None:
    """Validate, preview and apply a document as a person would; a mistake in it is answered in words."""
    client = run.client("root")
    check = await client.policy_validate(text)
    current = await client.policy()
    if not check.ok:
        assert check.issues
        with pytest.raises(MakewayError) as refused:
            await client.policy_apply(text, "", current.version)
        assert refused.value.status == 422
        return
    await client.policy_preview(text)
    version = await client.policy_apply(text, "", current.version)
    applied[version.version] = text
    assert (await told(run))[:2] == (version.version, text)


async def lived(path: Path, pairs: int, seed: int) -> None:
    random, applied = Random(seed), dict[int, str]()
    backend = MemoryBackend([NodeStatus(f"n{at}", "gpu", tuple(range(5)), cpu=64000, memory=256_000) for at in (1, 2)])
    async with running(path, backend=backend) as run:
        for person, profile in (("ana", "gpu2"), ("bo", "gpu3"), ("ana", "gpu8")):
            await run.submit(person, profile, profile=profile)
        tree = yaml.safe_load(TEXT)
        while pairs > 0:
            text = yaml.safe_dump(edited(tree, random), sort_keys=False)
            await rolled(run, text, applied)
            pairs -= 1
            if text in applied.values():
                tree = yaml.safe_load(text)
            if applied and random.random() < 0.3:  # back to any version
                tree = yaml.safe_load(text := applied[random.choice([*applied])])
                await rolled(run, text, applied)
                pairs -= 1
        assert len(applied) > 5


@pytest.mark.covers("F12")
async def test_documents_are_validated_previewed_applied_and_rolled_back(tmp_path: Path) -> None:
    await lived(tmp_path, 40, 1)


@pytest.mark.slow
@pytest.mark.covers("F12")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
async def test_many_documents_are_validated_previewed_applied_and_rolled_back(part: int, tmp_path: Path) -> None:
    await lived(tmp_path, PAIRS // 4, 100 + part)
