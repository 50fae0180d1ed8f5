"""The tables of jobs and of teams: one list of columns for every surface; the risk over quota in one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from makeway import cli, options, submission, teams, view
from makeway.submission import Submission
from makeway.training import Job, Jobs
from makeway_api.bars import KINDS, WHEN_NEEDED
from makeway_api.models import Usage
from makeway_api.tables import Column
from samples import NOW, job, offers, team

ROOT = Path(__file__).resolve().parents[2]


def test_a_new_column_of_jobs_is_on_every_surface(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = view.columns
    monkeypatch.setattr(
        view, "columns", lambda *given: [*before(*given), Column("Image", lambda job: f"image of {job.id}")]
    )
    shown = f"image of {job().id}"
    table = Jobs([Job(job())])
    monkeypatch.setattr(Job, "_newest", lambda job: job.data)
    surfaces = {
        "text": repr(table),
        "HTML": table._repr_html_(),
        **table._repr_mimebundle_(),
        "live text": view.jobs_bundles([job()], NOW)[0]["text/plain"],
        "live HTML": view.jobs_bundles([job()], NOW)[0]["text/html"],
        "%gpus --live": str(teams.live(teams.Picture(usage=Usage.model_validate(usage()), mine=(job(),)))),
    }
    monkeypatch.setattr("makeway.training.jobs", lambda **_: table)
    assert cli.main(["jobs"]) == 0
    surfaces["makeway jobs"] = capsys.readouterr().out
    assert not [name for name, text in surfaces.items() if shown not in text or "image" not in text.lower()]


def usage() -> dict[str, object]:
    return {"used": 1, "total": 10, "free": 9, "virtual": False, "teams": [], "pools": [], "at": NOW}


def test_teams_have_the_same_columns_as_text_and_as_html() -> None:
    table = teams.usage_table([team()])
    gpus = teams.Gpus(offers())
    head = repr(gpus).splitlines()[0].split()
    assert head == [name.upper() for name in table.head if name != "Bar"]
    assert re.findall(r'columnheader"[^>]*><b>(\w+)</b>', gpus._repr_html_())[: len(table.head)] == list(table.head)


@pytest.mark.covers("F44")
def test_every_surface_says_the_risk_over_quota_with_the_same_words() -> None:
    over = submission.risk(Job(job(over_quota=True)), Submission(source="1"))
    texts = [*(kind.meaning for kind in KINDS if kind.name == "borrowed"), over, options.train().epilog or ""]
    assert [WHEN_NEEDED in " ".join(text.split()) for text in texts] == [True, True, True]


@pytest.mark.covers("F44")
def test_the_condition_over_quota_is_written_once_in_the_code() -> None:
    spelled = re.compile(
        r"(owners? needs? (them|it|their)|reserved (them|the GPUs) needs (them|it)|needs? GPUs that (it|they) reserved)"
    )
    folders = ("quota_service", "widgets", "spawner", "hub_config")
    result = [
        str(file.relative_to(ROOT))
        for folder in folders
        for kind in ("*.py", "*.html", "*.js", "*.ts")
        for file in (ROOT / folder).rglob(kind)
        if spelled.search(file.read_text(encoding="utf-8"))
    ]
    assert result == ["quota_service/makeway_api/bars.py"]
