"""Submissions: what is sent, and the message for each mistake."""

from __future__ import annotations

import base64
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import samples
from makeway import options, payload, snapshot
from makeway.problems import Refused
from makeway.submission import Submission, risk, submit
from makeway.training import Job
from makeway_api.errors import MakewayError
from makeway_api.models import JobRequest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/net.py").write_text("depth = 3")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "src/__pycache__").mkdir()
    (tmp_path / "src/__pycache__/net.pyc").write_text("x")
    return tmp_path


def refused(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(Refused) as caught:
        call(*args, **kwargs)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.usefixtures("folder")
def test_files_and_folders_are_sent() -> None:
    files = snapshot.take(["src", "*.sh"])
    assert [(f.path, f.executable) for f in files] == [("run.sh", True), ("src/net.py", False)]
    assert base64.b64decode(files[1].data) == b"depth = 3"


@pytest.mark.usefixtures("folder")
def test_a_pattern_without_matches_is_refused() -> None:
    assert "--files *.csv: no such file in" in refused(snapshot.take, ["*.csv"])


def test_two_hundred_megabytes_are_refused_before_they_are_read(folder: Path) -> None:
    for name, size in (("weights.bin", 150), ("data.bin", 50), ("small.bin", 1)):
        with open(folder / name, "wb") as file:
            file.truncate(size * 1_000_000)
    message = refused(snapshot.take, ["*.bin"])
    assert message == (
        "the files are 201 MB in all, and the limit of a submission is 50 MB. Largest: weights.bin (150 MB), "
        "data.bin (50 MB) and small.bin (1.0 MB). Leave them out of --files and read them from shared storage inside "
        "the job."
    )


def test_files_outside_the_folder_are_refused(folder: Path) -> None:
    (folder / "deep").mkdir()
    os.chdir(folder / "deep")
    assert "lies outside the notebook's folder" in refused(snapshot.take, ["../run.sh"])


def test_makeways_own_folder_cannot_be_overwritten(folder: Path) -> None:
    (folder / ".makeway").mkdir()
    (folder / ".makeway/run.py").write_text("")
    assert ".makeway is reserved for Makeway" in refused(snapshot.take, [".makeway/run.py"])


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("", "the cell is empty; write the training code below the %%train line."),
        ("\n  \n", "the cell is empty"),
        ("# nothing\n", "the cell has only comments"),
        ("x = = 1", "line 1 of the cell is not valid Python: invalid syntax. Nothing was submitted."),
        ("x = 1\n!nvidia-smi", "line 2 of the cell, `!nvidia-smi`, is notebook syntax; a job runs plain Python."),
        ("files = !ls", "line 1 of the cell, `files = !ls`, is notebook syntax"),
        ("%matplotlib inline\n1", "line 1 of the cell, `%matplotlib inline`, is notebook syntax"),
        ("x = '\0'", "is not valid Python"),
    ],
)
def test_a_cell_that_cannot_run_is_refused(cell: str, says: str) -> None:
    assert says in refused(payload.check_cell, cell)


@pytest.mark.parametrize("cell", ["x = 5 \\\n  % 3", "'''\n!not a command\n'''", "await f()", "for i in x:\n    pass"])
def test_a_cell_that_can_run_passes(cell: str) -> None:
    payload.check_cell(cell)


def test_variables_that_are_missing_or_cannot_be_pickled() -> None:
    assert refused(payload.chosen, ["dta"], {"data": 1}) == (
        "--with dta: this notebook has no such variable. Did you mean data?"
    )
    message = refused(payload.pickled, {"lock": threading.Lock()})
    assert message.startswith("--with lock: a lock cannot be pickled (")
    assert message.endswith("Make it inside the cell, or save it to a file and send that with --files.")
    assert "exceeds the limit of 50 MB" in refused(payload.pickled, {"big": bytes(60_000_000)})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--name 'my run", "a quote on this line is not closed"),
        ("--profil gpu1", "'--profil' is not an option. Did you mean --profile?"),
        ("--env LR", "--env LR: write it as NAME=VALUE"),
        ("--with 1x", "--with 1x: that is not the name of a variable"),
        ("--workers -1", "of at least 1"),
        ("--workers many", "'many' is not a whole number of at least 1"),
        ("--retries -1", "'-1' is not a whole number of at least 0"),
        ("--profile", "expected one argument"),
        ("stray", "'stray' is not an option"),
    ],
)
def test_a_line_that_cannot_be_read(line: str, says: str) -> None:
    message = refused(options.train().read, line)
    assert says in message
    assert message.startswith("%%train: ")
    assert message.endswith("`%%train?` shows the options.") or says.startswith("a quote")


def test_no_retries_can_be_asked_for() -> None:
    assert options.train().read("--retries 0").retries == 0


def test_a_line_that_can_be_read() -> None:
    read = options.train().read('-p gpu1 --name "it\'s <b>" --with a,b c --env A=1 B=x=y -e C= --files *.py d -w')
    assert (read.profile, read.name, read.variables) == ("gpu1", "it's <b>", ["a", "b", "c"])
    assert read.env == {"A": "1", "B": "x=y", "C": ""}
    assert (read.files, read.wait, read.local) == (["*.py", "d"], True, False)
    assert options.train().read("").env == {}


def test_every_option_is_explained() -> None:
    for line in (options.train, options.gpus, options.jobs, options.job, options.logs, options.cancel):
        parser = line()
        assert all(action.help for action in parser._actions)
        assert parser.description


@pytest.mark.usefixtures("folder")
def test_the_service_picks_the_team_in_a_notebook_that_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEWAY_TEAM", "")
    assert Submission(source="x").request().team is None
    assert Submission(source="x", team="rnd").request().team == "rnd"


@pytest.mark.usefixtures("folder")
def test_a_submission_carries_files_variables_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEWAY_TEAM", "rnd")
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/ana/mnist.ipynb")
    ask = Submission(source="x", files=["src"], variables={"x": 1}, time_limit="2h", priority="high").request()
    assert [f.path for f in ask.files] == [
        ".makeway/cell.py", ".makeway/run.py", ".makeway/lib.zip", ".makeway/variables.pkl", "src/net.py",
    ]  # fmt: skip
    assert (ask.team, ask.name, ask.time_limit, ask.source) == ("rnd", "mnist", 7200, "x")
    assert ask.command[1:] == ["-u", ".makeway/run.py"]
    assert ask.image is None
    assert ask.server is None, "from outside of a notebook server"
    monkeypatch.setenv("JUPYTERHUB_SERVER_NAME", "")
    assert Submission(source="x").request().server == ""
    assert Submission(source="x", image="torch").request().server is None
    line = options.train().read("--image torch")
    assert Submission(source="x", **options.fields(line)).request().image == "torch"


@pytest.mark.parametrize(
    ("details", "says"),
    [
        ({"priority": "urgent"}, "unknown priority 'urgent'. Valid priorities: low, normal, high."),
        ({"time_limit": "soon"}, "'soon' is not a duration; write it like 90s, 30m, 2h, 1h30m or 1d."),
        ({"time_limit": "0"}, "a time limit of 0 would end the job before it starts"),
        ({"name": "n" * 201}, "the name has 201 characters; the limit is 200."),
    ],
)
def test_invalid_details_are_refused_with_a_sentence(details: dict[str, Any], says: str) -> None:
    assert says in refused(Submission(source="1", **details).request)


def test_submit_from_python_explains_itself() -> None:
    assert refused(submit, "1", profil="x") == "submit() has no argument 'profil'. Did you mean profile?"
    assert "there is nothing to run" in refused(submit)


def test_outside_of_a_makeway_notebook_the_message_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAKEWAY_URL", raising=False)
    message = refused(submit, "1")
    assert message.startswith("this is not a Makeway notebook: MAKEWAY_URL is not set.")
    assert "MAKEWAY_TOKEN" in message
    monkeypatch.setenv("MAKEWAY_URL", "portal")
    assert "must start with http" in refused(submit, "1")


@pytest.mark.covers("F44")
def test_the_risk_over_quota_is_to_begin_anew_where_checkpoints_end_with_their_pod() -> None:
    wanted = Submission(source="from makeway import checkpoint")
    for durable, ends in ((True, "`%job` shows the newest one."), (False, "because checkpoints are not kept here.")):
        over = samples.job(over_quota=True, durable_checkpoints=durable)
        assert " ".join(risk(Job(over), wanted).split()).endswith(ends)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_service_of_an_earlier_release_gets_a_request_that_it_knows(
    monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    """Its fields are checked strictly, and it has none for the notebook."""
    monkeypatch.setenv("JUPYTERHUB_SERVER_NAME", "")
    asked: list[dict[str, Any]] = []

    class Older:
        def submit(self, request: JobRequest) -> Any:
            asked.append(request.model_dump(mode="json", exclude_unset=True))
            if "server" in asked[-1]:
                errors = [{"field": "server", "message": "unknown"}]
                raise MakewayError("The request is not valid.", code="invalid", status=422, errors=errors)
            return samples.job()

        dry_run = submit

    monkeypatch.setattr("makeway.submission.client", Older)
    submit(command=["true"], name="x", dry_run=dry_run)
    assert [request.get("server", "none") for request in asked] == ["", "none"]
    assert {**asked[0], "server": None} == {**asked[1], "server": None}
