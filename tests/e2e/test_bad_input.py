"""Bad input through every door of a running portal: a clear error with what to do, and nothing half done.

What one part alone refuses is tested beside it: the policy's mistakes one by one (policy/test_issues.py), the spawn
form (hub/test_start_page.py), bodies that are no JSON (web/test_limits.py), magics (widgets/test_magics.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hub.portal import SERVICE, Portal, until
from notebook import Notebook

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
API = f"{SERVICE}/api/v1"
EVIL = 'it\'s "<img src=x onerror=alert(1)>" & co'
ROOT = Path(__file__).parents[2]
SAMPLE = (ROOT / "hub_config" / "policy.yaml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def portal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Portal]:
    portal = Portal(tmp_path_factory.mktemp("portal")).start()
    yield portal
    portal.stop()
    assert tracebacks(portal) == []


def tracebacks(portal: Portal) -> list[str]:
    """What went wrong by mistake; JupyterHub itself logs one for every form that is refused.

    It also logs one where it checks its services at the moment in which it stops them.
    """
    own = ("Failed to spawn single-user server with form", "JupyterHub.check_services_health")
    parts = portal.log.split("Traceback (most recent call last)")
    return [part[-300:] for part in parts[:-1] if not any(item in part[-200:] for item in own)]


def incremental(portal: Portal) -> dict[str, object]:
    """Everything that bad input must not change."""
    with portal.client() as client:
        result: dict[str, object] = {
            "jobs": [job.id for job in client.jobs().jobs],
            "policy": client.policy().version,
            "leases": [session.id for session in client.sessions(all=True) if not session.state.ended],
        }
    for folder in ("jobs", "spool"):
        result[folder] = sorted(path.name for path in (portal.state.root / folder).iterdir())
    users = portal.hub("GET", "/users").json()
    return result | {user["name"]: (user["pending"], user["servers"]) for user in users if user["servers"]}


@pytest.fixture
def untouched(portal: Portal) -> Iterator[Portal]:
    """The portal, which must be afterwards as it was before."""
    before = incremental(portal)
    yield portal
    assert incremental(portal) == before
    assert tracebacks(portal) == []


def ask(portal: Portal, method: str, path: str, who: str = "ana", **more: Any) -> httpx2.Response:
    """Call the API through the proxy as a person."""
    headers = {"Authorization": f"token {portal.user_token(who)}"}
    return httpx2.request(method, portal.url + API + path, headers=headers, timeout=120, **more)


def problem(answer: httpx2.Response) -> str:
    """The sentence of a refusal, which is never a 500 nor a traceback."""
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:500])
    assert answer.headers["content-type"].startswith("application/problem+json")
    result = answer.json()
    assert result["status"] == answer.status_code
    assert result["code"]
    assert "Traceback" not in answer.text
    return str(result["detail"])


# -- the API ---------------------------------------------------------------------------------------------------------

JOBS: list[tuple[str, dict[str, Any], int, str]] = [
    ("unknown profile", {"profile": "gpu99"}, 404, "no profile “gpu99”"),
    ("a profile for notebooks", {"profile": "cpu"}, 409, "is for notebooks, not for training jobs"),
    ("foreign team", {"team": "devops"}, 403, "ana is not in the team “devops” (your teams: rnd)"),
    ("no such team", {"team": EVIL[:60]}, 403, "your teams: rnd"),
    ("empty command", {"command": []}, 422, "`command`"),
    ("blank command", {"command": ["  "]}, 422, "The command is empty: say what to run."),
    ("negative GPUs", {"gpus": -1}, 422, "`gpus`"),
    ("negative workers", {"workers": -1}, 422, "`workers`"),
    ("negative time", {"time_limit": -5}, 422, "`time_limit`"),
    ("too long a name", {"name": EVIL * 10}, 422, "`name`"),
    ("a file outside", {"files": [{"path": "../../etc/passwd", "data": ""}]}, 422, "give a relative path without “..”"),
    ("a file that is no base64", {"files": [{"path": "a", "data": "%"}]}, 422, "“a” is not valid base64"),
    ("a file with markup", {"files": [{"path": f"/{EVIL}", "data": ""}]}, 422, "cannot be a file of a job"),
    ("a variable of ours", {"env": {"CUDA_VISIBLE_DEVICES": "0,1"}}, 422, "is set by Makeway"),
]


@pytest.mark.covers("F04", "F11", "F30")
@pytest.mark.parametrize(("what", "fields", "status", "words"), JOBS, ids=[job[0] for job in JOBS])
def test_a_job_that_cannot_be(untouched: Portal, what: str, fields: dict[str, Any], status: int, words: str) -> None:
    for path, more in (("/jobs", {}), ("/jobs", {"dry_run": True})):
        answer = ask(untouched, "POST", path, json={"profile": "gpu1", "command": ["true"], **fields, **more})
        assert words in problem(answer)
        assert answer.status_code == status


def test_two_hundred_megabytes_of_files(untouched: Portal) -> None:
    def body() -> Iterator[bytes]:
        yield b'{"profile": "gpu1", "command": ["true"], "files": [{"path": "big", "data": "'
        for _ in range(267):
            yield b"A" * 1_000_000
        yield b'"}]}'

    answer = ask(untouched, "POST", "/jobs", content=body())
    assert answer.status_code == 413
    assert "larger than the 75 MiB" in problem(answer), "50 MB of files as base64, and some room"


def test_a_little_more_than_fifty_megabytes_of_files(untouched: Portal) -> None:
    file = {"path": "big", "data": "A" * 66_800_000}
    answer = ask(untouched, "POST", "/jobs", json={"profile": "gpu1", "command": ["true"], "files": [file]})
    assert "larger than 50 MB" in problem(answer)
    assert "submit only code" in problem(answer)


@pytest.mark.covers("N02")
def test_leases_are_not_for_people(untouched: Portal) -> None:
    answer = ask(untouched, "POST", "/sessions", json={"user": "bo", "server": "", "profile": "gpu1", "team": "devops"})
    assert answer.status_code == 403
    assert "custom:makeway:reserve" in problem(answer)


# -- the spawn form --------------------------------------------------------------------------------------------------


@pytest.mark.covers("N02")
@pytest.mark.parametrize(
    "form",
    [
        {"choice": "rnd/gpu1/gpu2"},
        {"choice": EVIL},
        {"choice": "rnd/" + "x" * 100_000},
        {"profile": EVIL, "team": EVIL},
        {"choice": "/gpu99"},
        {"choice": "rnd/-1"},
    ],
    ids=range(6),
)
def test_a_form_that_makes_no_sense(untouched: Portal, form: dict[str, str]) -> None:
    answer = untouched.pick(untouched.browser("ana"), **form)
    assert 400 <= answer.status_code < 500
    assert "spawn-error-msg" in answer.text, "the form again, with what was wrong"
    assert "<img src=x" not in answer.text
    assert "Traceback" not in answer.text


def test_two_hundred_megabytes_of_form(untouched: Portal) -> None:
    ana = untouched.browser("ana")
    page = ana.get("/hub/spawn")
    action = page.text.split('id="spawn_form"')[1].split('action="')[1].split('"')[0].replace("&amp;", "&")
    try:
        answer = ana.post(action, data={"choice": "rnd/gpu1"}, files={"file": b"x" * 200_000_000})
    except httpx2.TransportError:  # refused before all of it was sent
        return
    # JupyterHub hangs up on what is too large for it; its proxy answers then, with a page of its own.
    assert answer.status_code in (400, 413, 503)
    assert untouched.browser("ana").get("/hub/home").status_code == 200


@pytest.mark.covers("N06")
def test_a_server_whose_name_has_quotes_and_markup(untouched: Portal) -> None:
    ana = untouched.browser("ana")
    ana.cookies.set("x", "y")
    page = ana.get("/hub/spawn/ana/" + "it's \"<b>".replace("<", "%3C").replace(">", "%3E").replace('"', "%22"))
    assert page.status_code < 500
    assert "it's \"<b>" not in page.text


# -- magics and commands ---------------------------------------------------------------------------------------------


def environment(portal: Portal, who: str) -> dict[str, str]:
    """What a notebook or a terminal of a person knows of the portal."""
    return {"MAKEWAY_URL": portal.url + SERVICE, "JUPYTERHUB_API_TOKEN": portal.user_token(who)}


@pytest.mark.covers("N08")
def test_a_name_with_quotes_and_markup_is_only_a_name(portal: Portal, tmp_path: Path) -> None:
    notebook = Notebook(tmp_path, **environment(portal, "ana"))
    try:
        notebook.run("%load_ext makeway")
        for option in ("--gpus -1", "--workers -1", "--profile -1"):
            shown = notebook.run(f"%%train {option}\n1")
            assert "Traceback" not in shown.trouble + shown.err
            assert shown.trouble or shown.err, f"{option} is not taken"
        assert notebook.run("%jobs").error is None
        shown = notebook.run("import makeway\nmakeway.submit(['true'])")
        assert "a command goes into command=" in shown.trouble
        shown = notebook.run(f"job = makeway.submit(command=['true'], name={EVIL!r}, profile='gpu1')\njob")
        assert shown.error is None, shown.trouble
        assert "<img" not in shown.html
        assert "<img src=x onerror=alert(1)>" in shown.text, "plain text is plain"
        assert "<img" not in notebook.run("%jobs").html
        id = notebook.run("print(job.id)").out.strip()
    finally:
        notebook.close()
    with portal.client() as client:
        until(lambda: client.job(id).state.ended, "it ended")
        assert client.job(id).name == EVIL
    browser = portal.browser("ana")
    for page in ("/", f"/jobs/{id}", "/decisions"):
        text = browser.get(SERVICE + page).text
        assert "<img src=x" not in text
    with portal.client() as client:
        assert "it's" in "".join(d.message for d in client.decisions())


def command(portal: Portal, who: str, *words: str, module: str = "makeway.cli") -> subprocess.CompletedProcess[str]:
    """Run a command as a user types it in a terminal."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKEWAY_", "JUPYTERHUB_"))}
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        env=env | environment(portal, who),
        capture_output=True,
        text=True,
        timeout=60,
    )


def changed(old: str, new: str) -> str:
    """The sample with every `old` replaced."""
    assert old in SAMPLE
    return SAMPLE.replace(old, new)


BROKEN = SAMPLE.replace("  - name: gpu\n", "  - name: [gpu\n", 1)
TOO_MANY = (
    "12 GPUs are reserved in pool gpu (R&D 6 GPUs, DevOps 6 GPUs), but there are 10 GPUs; reserve less or add GPUs"
)
BOMB = "a: &a [x, x]\n" + "".join(f"{c}: &{c} [*{b}, *{b}, *{b}]\n" for b, c in pairwise("abcdefghijklmnop"))
POLICIES = [
    ("broken YAML", BROKEN, "", "YAML"),
    ("nothing", "", "", "empty"),
    ("no document", "- 1\n- 2\n", "", "expected a table"),
    ("reservations exceed the pool", changed("reserved: 5", "reserved: 6"), "reserved", TOO_MANY),
    ("negative GPUs", changed("gpus: 2\n", "gpus: -2\n"), "profiles[2].gpus", "-2 is too small; the least is 0 GPUs"),
    (
        "unknown pool",
        changed("pools: [gpu]\n", "pools: [gpv]\n"),
        "profiles[0].pools",
        'no pool "gpv"; did you mean "gpu"',
    ),
    ("unknown key", changed("sessions_per_user", "sessions"), "settings.sessions", 'did you mean "sessions_per_user"'),
    ("a name with markup", changed("gpu8", json.dumps(EVIL)), "pools[0].profiles", "small letters, digits"),
    ("a bomb", BOMB, "", ""),
]


@pytest.mark.covers("F08", "N15")
@pytest.mark.parametrize(("what", "text", "where", "words"), POLICIES, ids=[policy[0] for policy in POLICIES])
def test_a_policy_that_cannot_be(
    untouched: Portal, tmp_path: Path, what: str, text: str, where: str, words: str
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text, encoding="utf-8")
    answers = [
        command(untouched, "admin", "policy", "validate", str(file)),
        command(untouched, "admin", "policy", "preview", str(file)),
        command(untouched, "admin", "policy", "apply", str(file)),
        command(untouched, "admin", "policy", "validate", str(file), module="makeway_quota.main"),
    ]
    for done in answers:
        assert done.returncode in (1, 2), done
        assert "Traceback" not in done.stderr
        assert words in done.stderr
        assert where in done.stderr, "which place of the document"
    refused = ask(untouched, "PUT", "/policy", "admin", json={"document": text, "base": 1})
    assert words in problem(refused)
    assert refused.json()["errors"][0]["message"]
    check = ask(untouched, "POST", "/policy/validate", "admin", json={"document": text, "base": 1}).json()
    assert not check["ok"]
    assert all(issue["file"] == "policy.yaml" for issue in check["issues"])
    assert words in check["issues"][0]["message"]


def test_a_policy_is_not_for_everybody(untouched: Portal, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(SAMPLE.replace("limit: 9", "limit: 10"))
    done = command(untouched, "ana", "policy", "apply", str(tmp_path / "policy.yaml"))
    assert done.returncode == 1
    assert "custom:makeway:admin" in done.stderr or "administrator" in done.stderr
    answer = ask(untouched, "PUT", "/policy", "admin", json={"document": SAMPLE, "base": 7})
    assert answer.status_code == 409
    assert "version 1" in problem(answer)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as YAML|not valid YAML|YAML"),
        ("version: 9\n", "version"),
        ("version: 1\nnow: 0\nnodes: [{name: n, pool: p, gpus: -1}]\n", "gpus"),
        ("", "version|empty|mapping"),
    ],
)
def test_a_snapshot_that_cannot_be_planned(portal: Portal, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "world.yaml").write_text(text)
    done = command(portal, "admin", "plan", str(tmp_path / "world.yaml"), module="makeway_quota.main")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert any(word in done.stderr for word in words.split("|"))
    gone = command(portal, "admin", "plan", str(tmp_path / "absent.yaml"), module="makeway_quota.main")
    assert (gone.returncode, gone.stderr.count("\n")) == (2, 1)
    assert "absent.yaml" in gone.stderr


# -- the policy file of a first start --------------------------------------------------------------------------------


@pytest.mark.covers("N22")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BROKEN, "YAML"),
        (changed("    size: 10\n", "").replace("reserved: 5", "reserved: 6"), TOO_MANY),
        (None, "cannot be read: No such file or directory"),
    ],
    ids=["broken YAML", "reservations exceed the pool", "no such file"],
)
def test_a_broken_policy_at_the_first_start_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    portal = Portal(tmp_path, MAKEWAY_POLICY_FILE=str(file))
    process = portal.launch()
    try:
        assert process.wait() == 1
    finally:
        portal.stop()
    assert "Makeway cannot start." in portal.printed
    assert str(file) in portal.printed
    assert words in portal.printed
    assert "Traceback" not in portal.printed
    if text is None:
        return
    assert f"{file}:" in portal.printed, "with its line"
    if text is not BROKEN:
        return  # one start of a whole portal shows that a mended file is read
    file.write_text(SAMPLE, encoding="utf-8")
    portal.start()
    portal.stop()
