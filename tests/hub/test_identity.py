"""What becomes of work when people come and go, on a real Hub: the table of docs/explanation/security.md."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hub.portal import Portal, until
from makeway_api.errors import MakewayError
from makeway_api.models import Job, JobRequest
from makeway_spawner.home import home_of

pytestmark = pytest.mark.e2e
POLICY = """\
version: 1
pools:
  - {name: work, size: 12, nodes: {local: {gpus: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}}}
  - {name: lent, size: 8, nodes: {local: {gpus: [12, 13, 14, 15, 16, 17, 18, 19]}}}
profiles:
  - {name: cpu, gpus: 0, kinds: [session]}
  - {name: run1, gpus: 1, pools: [work], grace: 30}
  - {name: all12, gpus: 12, pools: [work], grace: 30}
  - {name: lent1, gpus: 1, pools: [lent], grace: 30}
  - {name: own8, gpus: 8, pools: [lent], grace: 30}
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [work], reserved: 6}]}
  - {name: ops, groups: [ops], users: [E.Mail@Example.org], quotas: [{pools: [work], reserved: 6}]}
  - {name: owners, users: [boss], quotas: [{pools: [lent], reserved: 8}]}
  - {name: capitals, users: [TWIN]}
"""
SAVES = """
mkdir -p "$MAKEWAY_CHECKPOINT_DIR/step-000001"; echo saved > "$MAKEWAY_CHECKPOINT_DIR/step-000001/state"
trap 'exit 75' TERM; echo "the words of a job"; while :; do sleep 0.1; done
"""
MAIL = "e.mail@example.org"
TEAMS = {"lou": "rnd", "joe": "rnd", "rena": "rnd", "dele": "rnd", "ruth": "rnd", "twin": "rnd", "TWIN": "capitals"} | {
    MAIL: "ops"
}


@dataclass(slots=True)
class Story:
    """The jobs of each person before anything changed, and the portal after it."""

    portal: Portal
    jobs: dict[str, dict[str, str]] = field(default_factory=dict)
    """person, as they were called then, to the kind of a job to its id"""
    tokens: dict[str, str] = field(default_factory=dict)

    def job(self, person: str, kind: str) -> Job:
        with self.portal.client() as admin:
            result: Job = admin.job(self.jobs[person][kind])
            return result

    def code(self, person: str, kind: str) -> str:
        """Return the state of a job, or the code of its reason while it waits."""
        job = self.job(person, kind)
        return job.reason.code if job.state.value == "pending" and job.reason is not None else job.state.value

    def log(self, person: str, kind: str, token: str | None = None) -> str:
        with self.portal.client(token) as client:
            return str(client.logs(self.jobs[person][kind], attempt=1).text)

    def submit(self, person: str, kind: str, **ask: Any) -> None:
        with self.portal.client(self.tokens[person]) as client:
            job = client.submit(JobRequest(name=f"{kind} of {person}", **ask))
        self.jobs.setdefault(person, {})[kind] = job.id


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    root: Path = tmp_path_factory.mktemp("identity")
    (root / "policy.yaml").write_text(POLICY)
    env = {"MAKEWAY_POLICY_FILE": str(root / "policy.yaml"), "MAKEWAY_VIRTUAL_GPUS": "20"}
    portal = Portal(root, **env).start()
    try:
        made = Story(portal)
        begin(made)
        change(made)
        yield made
    finally:
        portal.stop()


def begin(story: Story) -> None:
    """Submit, for each person, a job that runs, one that waits, one that is preempted, and one that ends."""
    portal = story.portal
    for name in (*TEAMS, "boss"):
        story.tokens[name] = portal.user_token(name)
    portal.hub("POST", "/groups/ops")
    members = [name for name, team in TEAMS.items() if team == "rnd"]
    portal.hub("POST", "/groups/rnd/users", json={"users": members}).raise_for_status()
    portal.hub("POST", "/groups/ops/users", json={"users": ["twin"]}).raise_for_status()

    def submit(name: str) -> None:
        team, saves = TEAMS[name], ["sh", "-c", SAVES]
        story.submit(name, "ended", team=team, profile="run1", command=["sh", "-c", f"echo secret of {name}"])
        story.submit(name, "preempted", team=team, profile="lent1", command=saves)
        story.submit(name, "running", team=team, profile="run1", command=saves)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(submit, TEAMS))
    kinds = {"ended": "succeeded", "preempted": "running", "running": "running"}
    until(lambda: all(story.code(name, kind) == state for name in TEAMS for kind, state in kinds.items()), "all is set")
    for name, team in TEAMS.items():
        story.submit(name, "pending", team=team, profile="all12", command=["true"])
    story.submit("twin", "of ops", team="ops", profile="all12", command=["true"])
    story.submit("boss", "claim", team="owners", profile="own8", command=["sleep", "600"])
    until(lambda: story.code("boss", "claim") == "running", "the owner has its GPUs")
    until(lambda: all(story.job(name, "preempted").preemptions == 1 for name in TEAMS), "all made way")


def change(story: Story) -> None:
    """Have all people change at once, and wait until the portal has heard of it."""
    hub = story.portal.hub
    hub("DELETE", "/groups/rnd/users", json={"users": ["lou", "joe"]}).raise_for_status()
    hub("DELETE", "/groups/ops/users", json={"users": ["twin"]}).raise_for_status()
    hub("PATCH", "/users/rena", json={"name": "Renata"}).raise_for_status()
    hub("DELETE", "/users/dele").raise_for_status()
    hub("DELETE", "/users/ruth").raise_for_status()
    story.tokens["new ruth"] = story.portal.user_token("ruth")
    hub("POST", "/groups/rnd/users", json={"users": ["ruth"]}).raise_for_status()
    held = [(name, kind) for name in ("lou", "joe", "dele", "ruth") for kind in ("pending", "preempted")]
    held.append(("twin", "of ops"))
    until(lambda: all(story.code(*item) == "not_member" for item in held), "what is to be held is held")
    until(lambda: story.job("rena", "running").owner == "renata", "the renamed person is known")
    hub("POST", "/groups/rnd/users", json={"users": ["joe"]}).raise_for_status()
    until(lambda: story.code("joe", "pending") != "not_member", "who came back is released")


NOW = {"rena": "renata", "dele": "dele/deleted-1", "ruth": "ruth/deleted-1"}
"""Under which name the work of each person is filed, where that is another one than theirs was."""
HELD = {("lou", "pending"), ("lou", "preempted"), ("twin", "of ops")} | {
    (name, kind) for name in ("dele", "ruth") for kind in ("pending", "preempted")
}


@pytest.mark.parametrize("name", TEAMS)
@pytest.mark.parametrize("kind", ["running", "pending", "preempted", "ended"])
def test_work_is_filed_under_the_name_of_its_person(story: Story, name: str, kind: str) -> None:
    assert story.job(name, kind).owner == NOW.get(name, name)


@pytest.mark.parametrize("name", TEAMS)
def test_what_runs_goes_on(story: Story, name: str) -> None:
    job = story.job(name, "running")
    assert (job.state.value, job.attempt, job.preemptions) == ("running", 1, 0)


@pytest.mark.parametrize("name", TEAMS)
@pytest.mark.parametrize("kind", ["pending", "preempted"])
def test_what_waits_is_held_only_where_its_person_is_not_in_its_team(story: Story, name: str, kind: str) -> None:
    job = story.job(name, kind)
    assert job.state.value == "pending"
    assert (story.code(name, kind) == "not_member") == ((name, kind) in HELD)
    if kind == "preempted":
        assert job.preemptions == 1


def test_of_two_teams_only_the_work_of_the_one_that_was_left_is_held(story: Story) -> None:
    assert story.code("twin", "of ops") == "not_member"
    assert story.code("twin", "pending") != "not_member"


@pytest.mark.parametrize("name", TEAMS)
def test_logs_and_checkpoints_stay(story: Story, name: str) -> None:
    assert story.log(name, "ended") == f"secret of {name}\n"
    for kind in ("running", "preempted"):
        folder = story.portal.state.root / "jobs" / story.jobs[name][kind] / "checkpoints" / "step-000001"
        assert (folder / "state").read_text() == "saved\n"


@pytest.mark.parametrize("name", ["lou", "joe", "rena", "twin", "TWIN", MAIL])
def test_who_is_there_reads_what_is_theirs(story: Story, name: str) -> None:
    assert story.log(name, "ended", story.tokens[name]) == f"secret of {name}\n"


def test_a_new_person_of_a_deleted_persons_name_reads_and_has_nothing_of_theirs(story: Story) -> None:
    with story.portal.client(story.tokens["new ruth"]) as ruth:
        assert ruth.me().name == "ruth"
        assert not [job for job in ruth.jobs(limit=1000).jobs if job.owner == "ruth"]
        for call in (ruth.logs, ruth.result, ruth.cancel):
            with pytest.raises(MakewayError) as refused:
                call(story.jobs["ruth"]["ended"])
            assert refused.value.status in (403, 404)
    with pytest.raises(MakewayError) as gone:
        story.log("ruth", "ended", story.tokens["ruth"])
    assert gone.value.status == 401


def test_names_with_capitals_are_members_as_the_hub_writes_them(story: Story) -> None:
    with story.portal.client(story.tokens[MAIL]) as mail:
        assert (mail.me().name, mail.me().teams) == (MAIL, ["ops"])
    assert story.portal.hub("GET", "/users/renata").is_success, "as which the Hub has written Renata"


def test_names_that_differ_in_capitals_only_are_two_people(story: Story) -> None:
    """The Hub makes a user as the API names them, and has both: neither has teams, work or bytes of the other."""
    assert {story.portal.hub("GET", f"/users/{name}").json()["name"] for name in ("twin", "TWIN")} == {"twin", "TWIN"}
    for name, other, teams in (("twin", "TWIN", ["rnd"]), ("TWIN", "twin", ["capitals"])):
        with story.portal.client(story.tokens[name]) as client:
            assert (client.me().name, client.me().teams) == (name, teams)
            assert {job.id for job in client.jobs(mine=True, limit=1000).jobs} == set(story.jobs[name].values())
            assert client.storage().mine == sum(account.bytes for account in client.storage().accounts) > 0
            with pytest.raises(MakewayError) as refused:
                client.cancel(story.jobs[other]["pending"])
            assert refused.value.status in (403, 404)
        with pytest.raises(MakewayError) as refused:
            story.log(other, "ended", story.tokens[name])
        assert refused.value.status in (403, 404)
    with story.portal.client() as admin:
        assert {"twin", "TWIN"} <= {account.owner for account in admin.storage().accounts}


def test_homes_are_found_by_name(story: Story) -> None:
    """A person who was renamed has a new one, the old one stays; a start without options needs no profile."""
    portal, homes = story.portal, story.portal.state.homes
    people = ("renata", "twin", "TWIN", MAIL)
    for name in people:
        assert portal.start_server(name, wait=False).is_success
    for name in people:
        until(lambda name=name: (portal.server(name) or {}).get("ready"), f"the server of {name} is ready")
        assert (home_of(homes, name) / "Welcome.ipynb").is_file()
    assert sorted(path.name for path in homes.iterdir()) == ["TWIN", "e.mail=40example.org", "renata", "twin"]


def test_an_administrator_gives_the_work_of_a_deleted_person_to_a_user(story: Story) -> None:
    with story.portal.client() as admin:
        with pytest.raises(MakewayError, match="The Hub has no user unknown"):
            admin.give_work("dele/deleted-1", "unknown")
        admin.give_work("dele/deleted-1", "Renata")
    until(lambda: story.code("dele", "pending") != "not_member", "it is released")
    assert story.job("dele", "running").owner == "renata"
    assert story.log("dele", "ended", story.tokens["rena"]) == "secret of dele\n"
