"""The `makeway` command against the real service: its output and its exit codes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from makeway import cli, connection
from makeway_api.client import Client
from makeway_api.models import JobRequest, State
from makeway_quota.services.cluster.offer_engine import OfferEngine
from makeway_quota.services.refusals import busy

from .conftest import Portal


class Said:
    """A command's exit code and output."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def makeway(ana: Client, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Said:
        code = cli.main(words)
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return Said(code, out, err)

    return run


@pytest.fixture
def root(portal: Portal, ana: Client) -> None:
    """Run the following commands as the administrator."""
    connection.connect(portal.url, "root")


def test_a_script_is_submitted_followed_and_listed(makeway, ana: Client) -> None:  # type: ignore[no-untyped-def]
    Path("train.py").write_text("import sys\nprint('args', sys.argv[1:])")
    result = makeway("submit", "--profile", "gpu1", "--name", "from a shell", "--wait", "train.py", "--lr", "0.1")
    assert result.code == 0, result.err
    assert "succeeded" in result.out
    id = ana.jobs(mine=True).jobs[0].id
    assert makeway("logs", id).out == "args ['--lr', '0.1']\n"
    assert "from a shell" in makeway("jobs").out
    assert "from a shell" in makeway("job", id).out
    result = makeway("logs", "-f", "from a shell")
    assert f"job {id} succeeded" in result.out, result.err


def test_a_script_may_follow_its_files(makeway, ana: Client) -> None:  # type: ignore[no-untyped-def]
    Path("train.sh").write_text("#!/bin/sh\ncat a.txt b.txt; echo $LR\n")
    Path("train.sh").chmod(0o755)
    Path("a.txt").write_text("A")
    Path("b.txt").write_text("B")
    result = makeway("submit", "-p", "gpu1", "-f", "a.txt", "-f", "b.txt", "--env", "LR=1", "--wait", "train.sh")
    assert result.code == 0, result.err + result.out
    assert makeway("logs", "train").out == "AB1\n"


@pytest.mark.covers("F30", "N01")
def test_a_user_of_two_teams_chooses_and_a_user_of_none_gets_the_reason(portal: Portal, makeway) -> None:  # type: ignore[no-untyped-def]
    connection.connect(portal.url, "lea")
    result = makeway("submit", "-p", "gpu1", "--", "true")
    assert result.code == 1
    assert "rnd" in result.err
    assert "devops" in result.err
    assert makeway("submit", "-p", "gpu1", "-t", "rnd", "--dry-run", "--", "true").code == 0
    connection.connect(portal.url, "guest")
    result = makeway("submit", "-p", "gpu1", "--", "true")
    assert result.code == 1
    assert "team" in result.err
    print(result.err)


def test_any_command_after_two_dashes(makeway, ana: Client) -> None:  # type: ignore[no-untyped-def]
    result = makeway("submit", "-p", "gpu1", "--wait", "--", "sh", "-c", "exit 3")
    assert result.code == 1
    assert "failed" in result.out
    result = makeway("submit", "-p", "gpu1", "--", "sleep", "60")
    assert result.code == 0
    id = ana.jobs(mine=True).jobs[0].id
    assert makeway("cancel", id).out.startswith(f"{id}: ")
    job = ana.job(id)
    while not job.state.ended:
        job = ana.job(id, wait=5, version=job.version)
    assert job.state is State.CANCELLED
    assert "was cancelled" in makeway("job", id).out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["submit"],
            "makeway: nothing to run was given: makeway submit train.py, or makeway submit -- python -m train.",
        ),
        (["submit", "absent.py"], "makeway: there is no file 'absent.py' here;"),
        (["submit", "-p", "gpu11", "--", "true"], "Did you mean gpu1?"),
        (["submit", "--team", "devops", "--", "true"], "you are not in a team 'devops'."),
        (["job", "nothing"], "makeway: there is no job 'nothing' that you may see."),
        (["policy", "validate", "absent.yaml"], "makeway: absent.yaml cannot be read: No such file or directory."),
        (["policy", "get"], "makeway: "),
    ],
)
def test_mistakes_are_one_sentence(makeway, words: list[str], says: str) -> None:  # type: ignore[no-untyped-def]
    result = makeway(*words)
    assert result.code == 1
    assert says in result.err
    assert result.err.count("\n") == 1


@pytest.mark.covers("F38")
def test_usage_lists_the_teams(makeway) -> None:  # type: ignore[no-untyped-def]
    result = makeway("usage")
    assert "TEAM" in result.out
    assert "rnd" in result.out
    assert "0 of 10 GPUs in use, 10 idle." in result.out
    assert "virtual" in result.out


def test_usage_is_one_request_unless_it_is_asked_what_a_job_could_have(
    makeway,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    do = Client._do

    def counted(self: Client, call: Any) -> Any:
        asked.append(call.path)
        return do(self, call)

    monkeypatch.setattr(Client, "_do", counted)
    assert "\nNow: " not in makeway("usage").out
    assert asked == ["/usage"]
    assert "\nNow: " in makeway("usage", "--now").out
    assert asked == ["/usage", "/usage", "/offers"]


@pytest.mark.usefixtures("root")
def test_the_policy_is_read_checked_and_put_into_force(makeway) -> None:  # type: ignore[no-untyped-def]
    document = makeway("policy", "get").out
    assert "policies:" in document
    Path("policy.yaml").write_text(document)
    result = makeway("policy", "validate", "policy.yaml")
    assert result.out == "policy.yaml is valid. It changes nothing.\n"
    Path("policy.yaml").write_text(document.replace("limit: 9", "limit: 8", 1))
    assert "It would change:" in makeway("policy", "validate", "policy.yaml").out
    assert "would start" in makeway("policy", "preview", "policy.yaml").out
    Path("broken.yaml").write_text("pools: [{name: gpu, size: -3}]\n")
    result = makeway("policy", "validate", "broken.yaml")
    assert result.code == 1
    assert result.err.startswith("broken.yaml")
    assert makeway("policy", "apply", "broken.yaml").code == 1
    result = makeway("policy", "apply", "policy.yaml", "-m", "less for rnd")
    assert "is in force." in result.out
    assert "less for rnd" in makeway("policy", "history").out
    Path("policy.yaml").write_text(document)
    assert makeway("policy", "apply", "policy.yaml", "-m", "back").code == 0


def test_without_a_portal_it_says_what_to_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in os.environ if n.startswith(("MAKEWAY_", "JUPYTERHUB_"))]:
        monkeypatch.delenv(name)
    assert cli.main(["jobs"]) == 1
    assert "MAKEWAY_URL is not set" in capsys.readouterr().err


@pytest.mark.covers("F11")
def test_a_pending_job_is_moved_from_a_shell(makeway, ana: Client) -> None:  # type: ignore[no-untyped-def]
    job = ana.submit(JobRequest(name="waits", profile="gpu8", workers=5, command=["true"]))
    result = makeway("move", job.id, "--profile", "gpu3")
    assert result.code == 0, result.err
    assert result.out == f"{job.id}: waits for rnd/gpu3\n"
    assert ana.job(job.id).profile == "gpu3"
    result = makeway("move", job.id, "--profile", "gpu8", "--json")
    assert [moved["profile"] for moved in json.loads(result.out)] == ["gpu8"]
    result = makeway("move", job.id, "--team", "devops")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("makeway: ana is not in the team “devops”")
    assert "Name the team, the profile or both" in makeway("move", job.id).err
    assert makeway("cancel", job.id).code == 0
    assert "has ended (cancelled)" in makeway("move", job.id, "--profile", "gpu1").err


def test_a_job_is_resumed_and_cloned_from_a_shell(makeway, ana: Client) -> None:  # type: ignore[no-untyped-def]
    Path("train.sh").write_text("#!/bin/sh\necho done\n")
    Path("train.sh").chmod(0o755)
    assert makeway("submit", "-p", "gpu1", "--name", "one", "--wait", "train.sh").code == 0
    job = ana.jobs(mine=True).jobs[0]
    result = makeway("clone", job.id, "-n", "2", "--name", "two", "--json")
    assert result.code == 0, result.err
    clones = json.loads(result.out)
    assert [(clone["clone_of"], clone["name"].startswith("two")) for clone in clones] == [(job.id, True)] * 2
    result = makeway("cancel", *(clone["id"] for clone in clones))
    assert result.code == 0, result.err
    result = makeway("resume", clones[0]["id"])
    assert result.code == 0, result.err
    assert result.out.startswith(f"{clones[0]['id']}: ")


def test_every_answer_about_jobs_and_usage_is_there_as_json(makeway, ana: Client) -> None:  # type: ignore[no-untyped-def]
    Path("train.sh").write_text("#!/bin/sh\nsleep 60\n")
    Path("train.sh").chmod(0o755)
    assert makeway("submit", "-p", "gpu1", "--name", "one", "train.sh").code == 0
    job = ana.jobs(mine=True).jobs[0]
    assert json.loads(makeway("jobs", "--json", "-n", "1").out)[0]["id"] == job.id
    assert json.loads(makeway("job", job.id, "--json").out)["name"] == "one"
    assert json.loads(makeway("usage", "--json").out)["total"] == ana.usage().total
    assert json.loads(makeway("cancel", job.id, "--json").out)[0]["id"] == job.id


def test_a_shell_is_told_commands_of_the_shell(makeway) -> None:  # type: ignore[no-untyped-def]
    assert "makeway submit" in makeway("jobs", "--state", "starting").out
    for message in (makeway("jobs").out, makeway("job", "nothing-like-it").err, makeway("logs", "nothing-like-it").err):
        assert not re.search(r"%[a-z]", message), message  # a magic; `100 %` is the progress of a job
    assert "`makeway jobs` lists yours" in makeway("job", "nothing-like-it").err


def test_what_is_kept_is_shown_in_one_line_and_deleted_by_commands_of_the_shell(makeway, ana: Client) -> None:  # type: ignore[no-untyped-def]
    # The largest are shown: other tests of the same portal have left jobs of hers, too.
    Path("large").write_bytes(os.urandom(2**20))
    asked = ("--profile", "gpu1", "--name", "left", "--files", "large", "--wait")
    assert makeway("submit", *asked, "--", "echo", "left").code == 0
    id = ana.jobs(mine=True).jobs[0].id
    line, *others = makeway("quota").out.splitlines()
    assert line.startswith("You keep ")
    assert " of 10 GB (" in line
    assert "jobs " in line
    assert " of 50 GB, " in line
    assert " of it yours (at most 25 GB); all keep " in line
    assert line.endswith(" of 200 GB.")
    assert any(other.startswith(f"`makeway delete {id}` frees ") and ": left, ended " in other for other in others)
    assert json.loads(makeway("quota", "--json").out)["largest"][0]["id"] in line + "".join(others)
    assert makeway("delete", id, "--attempt", "1").out.startswith("Deleted: the log and the result of attempt 1 of ")
    assert makeway("delete", id).out.startswith(f"Deleted: {id} with ")
    result = makeway("delete", id)
    assert (result.code, "was removed" in result.err) == (1, True)


def test_usage_is_shown_while_the_service_computes_too_many_offers(
    makeway,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def full(*_: object) -> None:
        raise busy("Too many offers are being computed: try again in a moment.", "offers_busy", 503, 2)

    monkeypatch.setattr(OfferEngine, "answers", full)
    result = makeway("usage", "--now")
    assert (result.code, result.err) == (0, "")
    assert "0 of 10 GPUs in use, 10 idle.\nWhat a job could have now is not known at the moment.\n" in result.out
