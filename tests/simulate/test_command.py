"""The command: from files to a report."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest
from makeway_quota.main import main
from makeway_quota.simulate import TraceInvalid, read_trace, simulate_command

HEAD = "submit_s,team,num_gpu,duration_s\n"
POLICY = """
version: 1
pools:
  - {name: gpus}
profiles:
  - {name: one, gpus: 1, pools: [gpus]}
policies:
  - {name: rnd, groups: [rnd], quotas: [{reserved: 8}]}
  - {name: ops, groups: [ops], quotas: [{reserved: 8}]}
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "jobs.csv.gz"
    lines = "".join(f"{at * 600},{'rnd' if at % 3 else 'ops'},{1 + 7 * (at % 2)},7200\n" for at in range(40))
    with gzip.open(file, "wt") as text:
        text.write(HEAD + lines)
    return file


@pytest.mark.covers("N23")
def test_report_as_text_json_and_page(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, page, numbers = tmp_path / "<b>.yaml", tmp_path / "out.html", tmp_path / "out.json"
    policy.write_text(POLICY)
    asked = ["simulate", "--policy", str(policy), "--trace", str(trace), "--html", str(page), "--json", str(numbers)]
    assert main([*asked, "--compare", "static", "--compare", "fifo"]) == 0
    assert "static partition" in capsys.readouterr().out
    result = json.loads(numbers.read_text())["simulated"]
    assert [one["name"] for one in result] == ["<b>", "static partition", "one FIFO"]
    assert {one["jobs"] for one in result} == {40}
    assert result[0]["delay_mean_h"] < result[1]["delay_mean_h"]
    html = page.read_text()
    assert html.count("<svg") >= 7
    assert "<b>" not in html
    assert "&lt;b&gt;" in html
    assert "http" not in html, "nothing is fetched"


def test_progress_is_drawn(tmp_path: Path, trace: Path) -> None:
    policy, shown = tmp_path / "policy.yaml", io.StringIO()
    policy.write_text(POLICY)
    assert simulate_command([str(policy)], str(trace), io.StringIO(), progress=shown) == 0
    assert "100 %" in shown.getvalue()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("submit_s,team\n1,a\n", "1: the header line lacks num_gpu, duration_s"),
        (HEAD, "no jobs"),
        (HEAD + "1,a,one,5\n", ":2: num_gpu must be a number, not 'one'"),
        (HEAD + "1,a,0,5\n", ":2: num_gpu must be above 0"),
        (HEAD + "1,a,1,5\n1,,1,5\n", ":3: team is empty"),
        ("id," + HEAD + "x,1,a,1,5\nx,1,a,1,5\n", "names a job twice"),
    ],
)
def test_a_mistake_in_a_trace_is_named(tmp_path: Path, body: str, says: str) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text(body)
    with pytest.raises(TraceInvalid, match=says):
        read_trace(file)


def test_a_missing_trace_and_a_cluster_without_size(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    assert main(["simulate", "--policy", str(policy), "--trace", str(tmp_path / "no.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["simulate", "--policy", str(policy), "--trace", str(trace), "--gpus", "4"]) == 2
    assert "--gpus" in capsys.readouterr().err
