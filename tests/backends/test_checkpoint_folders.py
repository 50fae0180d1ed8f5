"""The checkpoints of removed jobs go from their claims, by pods that may fail, be cut off, or find others' folders."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from api_server import PODS, ApiServer
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, Object
from makeway_quota.backends.kubernetes.attempts.pod_states import project_job_pod
from makeway_quota.backends.kubernetes.cluster.inventory import project_share
from makeway_quota.backends.kubernetes.pods import checkpoint_folders
from makeway_quota.backends.kubernetes.pods.checkpoint_folders import (
    AT_ONCE,
    FIRST_PAUSE,
    NAME,
    VOLUME,
    CheckpointFolders,
)
from pod_backend import SETTINGS

REPORTING = """
import sys
from makeway.launcher.removal import remove_all
sys.exit(remove_all(sys.argv[1], sys.argv[3:], sys.argv[2]))
"""


class Claims(ApiServer):
    """An API server and a kubelet: each pod that is created runs its program on the folder of its claim."""

    def __init__(self, volumes: Path) -> None:
        super().__init__()
        self.volumes = volumes
        self.pods: dict[str, Object] = {}
        self.ran: list[Object] = []
        self.runs = True
        """whether pods get to run"""
        self.status: Object | None = None
        """of pods that do not do their work"""

    async def create(self, path: str, body: Object) -> Object:
        self._hear("POST", path)
        name = f"{path}/{body['metadata']['name']}"
        assert name not in self.pods, "one pod for a claim"
        self.pods[name] = {**body, "status": self.status or {"phase": "Pending"}}
        self.ran.append(body)
        if self.runs and self.status is None:
            self.pods[name]["status"] = await self.run(body["spec"])
        return body

    async def run(self, spec: Object) -> Object:
        (container,) = spec["containers"]
        assert container["command"][:4] == ["python3", "-m", "makeway.launcher.removal", VOLUME]
        claim = spec["volumes"][0]["persistentVolumeClaim"]["claimName"]
        report = self.volumes / "report"
        report.write_text("")
        program = [sys.executable, "-c", REPORTING, str(self.volumes / claim), str(report), *container["command"][4:]]
        process = await asyncio.create_subprocess_exec(*program, stderr=asyncio.subprocess.DEVNULL)
        code = await process.wait()
        ended = {"exitCode": code, "message": report.read_text()}
        return {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": container["name"], "state": {"terminated": ended}}],
        }

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        self._hear("GET", path)
        if path not in self.pods:
            raise ApiStatusError(404, "NotFound", "no such pod")
        return self.pods[path]

    async def delete(self, path: str, *, uid: str = "", grace: int | None = None) -> bool:
        self._hear("DELETE", path)
        return self.pods.pop(path, None) is not None


class Site:
    """The removals of one installation with a clock that the test sets."""

    def __init__(self, volumes: Path, claim: str = "checkpoints-{team}") -> None:
        self.server = Claims(volumes)
        self.now = 1000.0
        self.leads = True
        settings = replace(SETTINGS, checkpoint_claim=claim)
        self.folders = CheckpointFolders(self.server, settings, (), lambda: self.leads, lambda: self.now)

    def make(self, team: str, *jobs: str) -> None:
        for job in jobs:
            folder = self.server.volumes / f"checkpoints-{team}" / job
            folder.mkdir(parents=True)
            (folder / "weights").write_text(job)

    def left(self, team: str) -> list[str]:
        return sorted(one.name for one in (self.server.volumes / f"checkpoints-{team}").iterdir())

    def purge(self, team: str, *jobs: str) -> list[bool]:
        return [self.folders.purge(job, team) for job in jobs]

    async def done(self) -> None:
        """Return when all that began has ended."""
        async with asyncio.timeout(60):
            for claim in self.folders._claims.values():
                if claim.task is not None:
                    await claim.task


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(checkpoint_folders, "POLL", 0.0)
    return Site(tmp_path)


@pytest.mark.covers("N25")
async def test_folders_are_removed_from_the_claim_of_their_team_by_one_pod(site: Site) -> None:
    site.make("rnd", "j-1", "j-2", "j-live")
    site.make("devops", "j-1")
    assert site.purge("R&D", "j-9") == [False]
    assert site.purge("rnd", "j-1", "j-2", "j-never-saved") == [False] * 3
    await site.done()
    assert (site.left("rnd"), site.left("devops")) == (["j-live"], ["j-1"])
    assert site.purge("rnd", "j-1", "j-2", "j-never-saved") == [True] * 3
    assert [len(pod["spec"]["containers"][0]["command"]) - 4 for pod in site.server.ran] == [1, 3]
    assert not site.server.pods, "they are deleted when they have ended"


async def test_thousands_of_folders_take_pods_of_bounded_size_one_after_the_other(site: Site) -> None:
    jobs = [f"j-{number:08x}" for number in range(5 * AT_ONCE // 2)]
    site.make("rnd", *jobs)
    site.purge("rnd", *jobs)
    await site.done()
    assert site.left("rnd") == []
    assert [len(pod["spec"]["containers"][0]["command"]) - 4 for pod in site.server.ran] == [AT_ONCE, AT_ONCE, 50]


async def test_without_a_claim_nothing_is_left_to_remove(tmp_path: Path) -> None:
    site = Site(tmp_path, claim="")
    assert site.purge("rnd", "j-1") == [True]
    assert site.server.asked == []


async def test_a_pod_that_fails_is_tried_again_at_growing_intervals_and_said_once(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.make("rnd", "j-1", "j-2")
    unbound = {
        "type": "PodScheduled",
        "status": "False",
        "message": 'persistentvolumeclaim "checkpoints-rnd" not found',
    }
    site.server.status = {"phase": "Failed", "conditions": [unbound]}
    tries: list[float] = []
    for _ in range(60):
        assert site.purge("rnd", "j-1", "j-2") == [False, False]
        await site.done()
        if len(site.server.ran) > len(tries):
            tries.append(site.now)
        site.now += 600.0
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert pauses == [600.0, 600.0, 1200.0, 2400.0, 4800.0, 9600.0]
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "2 removed jobs (j-1, j-2) are still on the claim checkpoints-rnd" in message
    assert message.endswith('did not run to its end: persistentvolumeclaim "checkpoints-rnd" not found')
    site.server.status, site.now = None, site.now + 86_400.0
    site.purge("rnd", "j-1", "j-2")
    await site.done()
    assert (site.left("rnd"), site.purge("rnd", "j-1", "j-2")) == ([], [True, True])


@pytest.mark.parametrize("first", [True, False])
async def test_a_sidecar_that_runs_on_holds_up_no_removal(
    site: Site, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Its pod is over once its own container is; that of a mesh ends when it is told to."""
    site.make("rnd", "j-1", "j-2")
    run = site.server.run
    failed = iter([True, False])

    async def beside(spec: Object) -> Object:
        (own,) = (await run(spec))["containerStatuses"]
        if next(failed):
            own["state"]["terminated"] = {
                "exitCode": 1,
                "message": json.dumps({"why": "busy", "left": {"0": ["j-2"]}}),
            }
        sidecar = {"name": "istio-proxy", "state": {"running": {}}}
        return {"phase": "Running", "containerStatuses": [sidecar, own] if first else [own, sidecar]}

    monkeypatch.setattr(site.server, "run", beside)
    site.purge("rnd", "j-1", "j-2")
    await site.done()
    assert site.purge("rnd", "j-1", "j-2") == [True, False]
    site.now += FIRST_PAUSE
    site.purge("rnd", "j-2")
    await site.done()
    assert site.purge("rnd", "j-2") == [True]
    assert not site.server.pods, "no pod is left with its sidecar"


async def test_a_folder_that_is_left_hinders_no_other_and_is_tried_as_its_owner(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site.make("rnd", "j-1", "j-2", "j-3")
    run = site.server.run

    async def as_user(spec: Object) -> Object:
        user, command = spec["securityContext"]["runAsUser"], spec["containers"][0]["command"]
        owners = {"j-2": 1234, "j-3": 0}
        remaining = {str(owners[job]): [job] for job in command[4:] if owners.get(job, user) != user}
        command[:] = [word for word in command if owners.get(word, user) == user]
        result = await run(spec) if command[4:] else {"phase": "Failed"}
        if not remaining:
            return result
        report = json.dumps({"why": "j-3: Permission denied", "left": remaining})
        return {
            "phase": "Failed",
            "containerStatuses": [{"name": NAME, "state": {"terminated": {"exitCode": 1, "message": report}}}],
        }

    monkeypatch.setattr(site.server, "run", as_user)
    site.purge("rnd", "j-1", "j-2", "j-3")
    await site.done()
    assert [pod["spec"]["securityContext"]["runAsUser"] for pod in site.server.ran] == [1000, 1234]
    assert site.left("rnd") == ["j-3"], "no pod runs as root"
    assert site.purge("rnd", "j-1", "j-2", "j-3") == [True, True, False]
    assert "1 removed job (j-3) are still on the claim checkpoints-rnd" in caplog.text
    site.make("rnd", "j-4")
    site.purge("rnd", "j-3", "j-4")
    await site.done()
    assert site.server.ran[-1]["spec"]["containers"][0]["command"][4:] == ["j-4"], "the other one waits"
    site.now += FIRST_PAUSE
    site.purge("rnd", "j-3")
    await site.done()
    assert len(site.server.ran) == 4


async def test_the_next_leader_deletes_the_pod_that_an_earlier_one_left(site: Site, tmp_path: Path) -> None:
    site.make("rnd", "j-1")
    site.server.runs = False
    site.purge("rnd", "j-1")
    async with asyncio.timeout(60):
        while not site.server.pods:  # noqa: ASYNC110 - a matter of time
            await asyncio.sleep(0)
    site.leads = False
    await site.done()
    assert (site.left("rnd"), len(site.server.pods)) == (["j-1"], 1), "it touches nothing any more"
    later = Site(tmp_path)
    later.server.pods = site.server.pods
    later.purge("rnd", "j-1")
    await later.done()
    assert (later.left("rnd"), later.server.pods) == ([], {})
    await site.folders.close()


async def test_the_pod_is_of_no_job_counts_on_its_node_and_has_no_rights(site: Site) -> None:
    site.purge("rnd", "j-1")
    await site.done()
    (pod,) = site.server.ran
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    listed: Object = {**pod, "metadata": {**pod["metadata"], "uid": "u"}, "spec": {**spec, "nodeName": "n0"}}
    assert project_job_pod(listed) is None
    held = project_share(listed, SETTINGS.instance)
    assert held is not None, "a plan that fills its node without it would be refused by the scheduler"
    assert (held.workload, held.requests) == ("", (("cpu", 10), ("memory", 32)))
    assert (spec["automountServiceAccountToken"], spec["restartPolicy"]) == (False, "Never")
    assert not [name for name in container["resources"]["requests"] if "/" in name], "no GPU"
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert all(f"POST {PODS}" == asked or f"{PODS}/makeway-removal-" in asked for asked in site.server.asked)
