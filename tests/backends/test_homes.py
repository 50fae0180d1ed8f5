"""The home of a job's owner: which claim it is, whether pods mount it, and what is said where they do not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer
from hypothesis import given
from hypothesis import strategies as st
from kubespawner.slugs import escape_slug, safe_slug
from makeway_quota.backends.choice import make_backend
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, ApiUnreachable, Object
from makeway_quota.backends.kubernetes.pods.homes import (
    KEPT_SECONDS,
    SILENT_SECONDS,
    Homes,
    HomeSetting,
    escaped,
    home_setting,
    slug,
)
from makeway_quota.backends.kubernetes.pods.manifest import WorkerResources, worker_pod
from makeway_quota.backends.kubernetes.pods.volumes import Mount, with_mounts
from makeway_quota.policy import read_policy
from makeway_quota.policy.pod_template import folder_problem, path_problem, template_problems
from makeway_quota.settings import load
from makeway_quota.store.store import open_store
from pod_backend import SETTINGS, Backend, order

CLAIMS = "/api/v1/namespaces/jobs/persistentvolumeclaims"


class Server(ApiServer):
    """An API server with claims, and the pods that it was sent."""

    def __init__(self, **claims: Object) -> None:
        super().__init__()
        self.claims = claims
        self.made: list[Object] = []

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        result = await super().get(path, query)
        if not path.startswith(CLAIMS):
            return result
        name = path.rpartition("/")[2]
        if name not in self.claims:
            raise ApiStatusError(404, "NotFound", f'persistentvolumeclaims "{name}" not found')
        return self.claims[name]

    async def create(self, path: str, body: Object) -> Object:
        if body["kind"] == "Pod":
            self.made.append(body)
        return await super().create(path, body)


def claim(name: str, *modes: str, phase: str = "Bound", **metadata: str) -> Object:
    status = {"phase": phase, "accessModes": list(modes)}
    return {"metadata": {"name": name, **metadata}, "spec": {"accessModes": list(modes)}, "status": status}


@given(st.text(max_size=80) | st.from_regex(r"[a-zA-Z0-9.@_-]{0,80}", fullmatch=True))
def test_names_are_written_as_kubespawner_writes_them(name: str) -> None:
    assert slug(name) == safe_slug(name, max_length=48)
    if not any(character < " " for character in name):
        assert escaped(name) == escape_slug(name)


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_two_names_meet_and_none_leads_out_of_its_folder(one: str, other: str) -> None:
    for write in (slug, escaped):
        assert (write(one) == write(other)) == (one == other)
        assert not {*write(one)} & {"/", ".", "\\", "\0"}


@pytest.mark.parametrize("name", ["../bo", "bo/../ana", "..", "/etc", "Bo", "bo---0f3a91c2"])
def test_a_name_with_a_path_in_it_stays_one_folder(name: str) -> None:
    assert slug(name).count("---") == 1
    assert slug(name) != name


def test_the_setting_is_a_claim_and_a_folder() -> None:
    assert home_setting("", "/home/jovyan") is None
    assert home_setting("home-{user}", "/home/jovyan") == HomeSetting("home-{user}")
    assert home_setting("homes/all/{escaped_user}", "/home/x/") == HomeSetting("homes", "all/{escaped_user}", "/home/x")


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        ("home-{username}", "/home/jovyan", "may have {user} and {escaped_user}"),
        ("Homes", "/home/jovyan", "names no claim"),
        ("homes/../{user}", "/home/jovyan", "names no claim"),
        ("homes//{user}", "/home/jovyan", "names no claim"),
        ("/{user}", "/home/jovyan", "names no claim"),
        ("homes", "home", "MAKEWAY_KUBE_HOME_PATH='home': it is no absolute path"),
        ("homes", "/makeway/job", "/makeway is not for volumes"),
    ],
)
def test_a_wrong_setting_is_refused_at_start(
    text: str, path: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        '{"current-context": "a", "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u"}}], "clusters": '
        '[{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}], "users": [{"name": "u", "user": {}}]}'
    )
    environ = {
        "MAKEWAY_BACKEND": "kubernetes",
        "MAKEWAY_KUBECONFIG": str(kubeconfig),
        "MAKEWAY_KUBE_LAUNCHER_IMAGE": "makeway:1",
        "MAKEWAY_WORKER_URL": "http://10.0.0.1:8765/services/makeway",
        "MAKEWAY_KUBE_HOME_CLAIM": text,
        "MAKEWAY_KUBE_HOME_PATH": path,
    }
    with pytest.raises(ValueError, match="MAKEWAY_KUBE_HOME") as wrong:
        make_backend(load(environ=environ))
    assert says in str(wrong.value)


@pytest.mark.parametrize("path", ["/", "data", "/a/../b", "/a//b", "/a:b", "/proc", "/dev/shm", "/makeway", ""])
def test_paths_that_are_not_for_volumes(path: str) -> None:
    assert path_problem(path)


def test_paths_and_folders_for_volumes() -> None:
    assert not any(path_problem(path) for path in ("/data", "/data/", "/makeways", "/home/jovyan/data", "/.cache"))
    assert not any(folder_problem(folder) for folder in ("", "a", "a/b.c"))
    assert all(folder_problem(folder) for folder in ("/a", "a//b", "../a", "a/./b", "a\nb"))


def test_a_mount_is_added_once_and_the_template_wins() -> None:
    template: dict[str, Any] = {
        "spec": {
            "volumes": [{"name": "mine", "emptyDir": {}}],
            "containers": [{"name": "worker", "volumeMounts": [{"name": "mine", "mountPath": "/data/"}]}],
        }
    }
    pod = worker_pod(SETTINGS, order("j-1"), 0, "p", "tokens", WorkerResources(template=template))
    mounts = [
        Mount("makeway-home", "homes", "/home/jovyan", "ana", home=True),
        Mount("makeway-team-a", "homes", "/models", "models", read_only=True),
        Mount("makeway-team-b", "other", "/data"),
    ]
    result = with_mounts(pod, mounts)
    (worker,) = result["spec"]["containers"]
    assert [one for one in worker["volumeMounts"] if one["name"].startswith("makeway-")] == [
        {"name": "makeway-home", "mountPath": "/home/jovyan", "readOnly": False, "subPath": "ana"},
        {"name": "makeway-home", "mountPath": "/models", "readOnly": True, "subPath": "models"},
    ]
    claims = [one for one in result["spec"]["volumes"] if "persistentVolumeClaim" in one]
    assert claims == [{"name": "makeway-home", "persistentVolumeClaim": {"claimName": "homes"}}]
    assert {"name": "HOME", "value": "/home/jovyan"} in worker["env"]
    assert with_mounts(pod, []) == pod
    assert {"name": "HOME", "value": "/makeway/job"} in pod["spec"]["containers"][0]["env"], "it is not changed"


def test_a_template_has_no_volume_of_makeways_names() -> None:
    template = {"spec": {"volumes": [{"name": "makeway-home", "emptyDir": {}}]}}
    assert list(template_problems(template)) == [
        "spec.volumes[makeway-home] is not for a template: Makeway's own volumes have such names"
    ]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (claim("home-ana", "ReadWriteOnce"), "the claim home-ana is ReadWriteOnce, and only one that is ReadWriteMany"),
        (claim("home-ana", "ReadWriteMany", phase="Lost"), "the volume of the claim home-ana is lost"),
        (claim("home-ana", "ReadWriteMany", deletionTimestamp="now"), "the claim home-ana is being deleted"),
    ],
)
async def test_a_claim_that_cannot_be_mounted_is_told_with_what_to_do(found: Object, says: str) -> None:
    homes = Homes(Server(**{"home-ana": found}), "jobs", HomeSetting("home-{user}"))
    assert await homes.mount("ana") is None
    note = await homes.home_notice("ana", ["/data", "/models"])
    assert note.startswith(f"The job does not see your home folder: {says}")
    assert note.endswith("Send the files that it needs with --files, or use the volumes of your team: /data, /models.")


async def test_a_home_that_is_mounted_or_not_set_up() -> None:
    server = Server(homes=claim("homes", "ReadWriteOnce", "ReadWriteMany"))
    homes = Homes(server, "jobs", HomeSetting("homes", "{user}"))
    assert await homes.mount("ana@lab") == Mount(
        "makeway-home", "homes", "/home/jovyan", f"{safe_slug('ana@lab', max_length=48)}", home=True
    )
    assert await homes.home_notice("ana@lab", ()) == ""
    none = Homes(server, "jobs", None)
    assert await none.mount("ana") is None
    assert await none.home_notice("ana", ()) == "", "a site without homes for jobs says nothing"


async def test_what_is_read_of_a_claim_is_used_for_a_minute() -> None:
    server, now = Server(), [0.0]
    homes = Homes(server, "jobs", HomeSetting("home-{user}"), lambda: now[0])
    assert "there is no claim home-ana in the namespace jobs" in await homes.home_notice("ana", ())
    server.claims["home-ana"] = claim("home-ana", "ReadWriteMany")
    assert await homes.mount("ana") is None
    now[0] = KEPT_SECONDS
    assert await homes.mount("ana") is not None
    assert server.asked == [f"GET {CLAIMS}/home-ana"] * 2


async def test_without_the_right_or_an_answer_a_submission_is_answered_all_the_same() -> None:
    server = Server()
    now = [0.0]
    homes = Homes(server, "jobs", HomeSetting("home-{user}"), lambda: now[0])

    def silent(method: str, path: str) -> None:
        raise ApiUnreachable("no answer")

    server.answer = silent
    for _ in range(3):
        assert "Makeway cannot tell, as the Kubernetes API server does not answer" in await homes.home_notice("ana", ())
    assert len(server.asked) == 1, "other submissions do not wait for it"
    now[0] = SILENT_SECONDS
    with pytest.raises(ApiUnreachable):
        await homes.mount("ana")

    def forbidden(method: str, path: str) -> None:
        raise ApiStatusError(403, "Forbidden", "cannot get persistentvolumeclaims")

    server.answer = forbidden
    assert "Makeway has no right to read the claim home-ana (cannot get" in await homes.home_notice("ana", ())
    assert await homes.mount("ana") is None


VOLUMES = """
version: 1
pools: [{name: gpu}]
profiles: [{name: gpu1, gpus: 1}]
policies:
  - {name: rnd, groups: [rnd], volumes: [{name: data, claim: teams, path: /data, sub_path: rnd, read_only: true}]}
  - {name: devops, groups: [devops]}
"""


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    made = Backend(Server(**{"home-ana": claim("home-ana", "ReadWriteMany")}), store)
    made._homes = Homes(made.server, "jobs", HomeSetting("home-{user}"))
    await made.open()
    await made.nodes()
    yield made
    await made.close(stop_jobs=False)
    store.close()


async def test_the_pods_of_a_job_have_the_home_of_its_owner(backend: Backend) -> None:
    assert await backend.pod_notices("ana", "rnd") == []
    await backend.start(order("j1", workers=2))
    server = backend.server
    assert isinstance(server, Server)
    for pod in server.made:
        source = {"claimName": "home-ana"}
        assert {"name": "makeway-home", "persistentVolumeClaim": source} in pod["spec"]["volumes"]
    assert len(server.made) == 2
    assert len(await backend.pod_notices("bo", "rnd")) == 1


async def test_the_pods_of_a_job_have_the_volumes_of_its_team_and_no_others(backend: Backend) -> None:
    document = read_policy(VOLUMES)
    backend.follow_policy(lambda: document)
    await backend.start(order("j1"))
    await backend.start(replace(order("j2"), team="devops"))
    server = backend.server
    assert isinstance(server, Server)
    mounts = [pod["spec"]["containers"][0]["volumeMounts"] for pod in server.made]
    data = {"name": "makeway-team-data", "mountPath": "/data", "readOnly": True, "subPath": "rnd"}
    assert [data in item for item in mounts] == [True, False]
    source = {"name": "makeway-team-data", "persistentVolumeClaim": {"claimName": "teams"}}
    assert [source in pod["spec"]["volumes"] for pod in server.made] == [True, False]
    (note,) = await backend.pod_notices("bo", "rnd")
    assert note.endswith("or use the volumes of your team: /data.")
