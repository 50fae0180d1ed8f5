"""The page “Back up and upgrade” is walked on the cluster: what it backs up is what it restores."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from makeway_api.errors import MakewayError
from makeway_api.models import FileIn, JobRequest
from pods import wait_until
from portals import STARTED, WORKERS, Portal
from walk import ROOT, blocks, section

from kube_cluster.portal import wait_until_ready

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]

PAGE = ROOT / "docs" / "how-to" / "back-up-and-upgrade.md"


@pytest.fixture(autouse=True)
def cleaned(portal: Portal) -> Iterator[None]:
    yield
    portal.clean()


def test_what_is_backed_up_while_the_portal_runs_is_restored(portal: Portal) -> None:
    text = section("On a cluster", PAGE)
    (backup, restore), (pod,) = blocks(text, "sh"), blocks(text, "yaml")
    (portal.walk.folder / "restore.yaml").write_text(pod, encoding="utf-8")
    ana = portal.person("ana")
    large = FileIn(path="large.bin", data="bGFyZ2Ug" * 100_000)
    with ana.client() as client:
        kept = client.submit(JobRequest(name="kept", command=["true"], files=[large]))
        wait_until(lambda: client.job(kept.id).state.ended, "the job has ended")
        portal.walk.run(backup)
        later = client.submit(JobRequest(name="later", command=["sleep", "3600"]))
    token = ana.hub("POST", "/users/ana/tokens", json={"note": "after the backup"}).json()["token"]
    artifacts = portal.volume("makeway-files") / "artifacts"
    (file,) = (one for one in artifacts.rglob("*") if one.is_file() and one.stat().st_size > 256 * 1024)
    content = file.read_bytes()
    file.unlink()
    with portal.renewed():
        portal.walk.run(restore)
    wait_until_ready(portal.cluster)
    assert file.read_bytes() == content
    with portal.person("ana").client() as client:
        assert client.job(kept.id).state.value == "succeeded"
        with pytest.raises(MakewayError, match="There is no job"):
            client.job(later.id)
        wait_until(lambda: not portal.api.items(WORKERS), "its pod is deleted", STARTED)
    headers = {"Authorization": f"token {token}"}
    known = httpx2.get(f"{portal.url}/hub/api/user", headers=headers)
    assert known.status_code == 403, "the Hub knows nothing of a token that was made after the backup"
