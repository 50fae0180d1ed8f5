"""The magics in a real kernel, against the real service with real processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from makeway_api.client import Client
from makeway_api.models import Job, State
from notebook import EngineView, Notebook

from .conftest import Portal, cleaned


@pytest.fixture(scope="module")
def notebook(portal: Portal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "data.txt").write_text("17")
    running = Notebook(
        folder, MAKEWAY_URL=portal.url, JUPYTERHUB_API_TOKEN="ana", JPY_SESSION_NAME=str(folder / "mnist.ipynb")
    )
    assert running.run("%load_ext makeway").error is None
    yield running
    running.close()


@pytest.fixture
def service(portal: Portal) -> Iterator[Client]:
    with cleaned(portal, "ana") as client:
        yield client


def until(service: Client, id: str, good: Callable[[Job], bool], seconds: float = 60) -> Job:
    deadline = time.monotonic() + seconds
    job: Job = service.job(id)
    while not good(job):
        assert time.monotonic() < deadline, job
        job = service.job(id, wait=1, version=job.version)
    return job


def running(
    service: Client, notebook: Notebook, options: str = "--profile gpu1", cell: str = "import time\ntime.sleep(60)"
) -> Job:
    """Submit a cell and return its job once that runs, or has run: a short one may end between two looks."""
    shown = notebook.run(f"%%train {options}\n{cell}")
    assert shown.error is None, shown.trouble
    id = notebook.run("print(_.id)").out.strip()
    return until(service, id, lambda job: job.state is State.RUNNING or job.state.ended)


def says(notebook: Notebook, job: Job, words: str, seconds: float = 60) -> None:
    """Wait until the code of a job has printed the words: it runs long before its first line does."""
    deadline = time.monotonic() + seconds
    while words not in (message := notebook.run(f"%logs {job.id}").out):
        assert time.monotonic() < deadline, message


def sentence(shown: EngineView) -> str:
    """Return the one sentence of a refusal; nothing else may be shown."""
    assert shown.error is not None, shown
    assert shown.out == shown.err == shown.html == ""
    assert "Traceback" not in shown.trouble
    assert "\n" not in shown.trouble
    assert shown.trouble.startswith("Makeway: ")
    return shown.trouble


@pytest.mark.slow
@pytest.mark.covers("F51")
def test_two_lines_are_all_that_a_notebook_needs(portal: Portal, service: Client, tmp_path: Path) -> None:
    """A cell as it was written without Makeway, in a kernel that JupyterHub started: one line loads, one heads it."""
    code = "losses = [1 / step for step in range(1, 4)]\nprint('trained', len(losses), 'steps')\nlosses[-1]"
    before = {job.id for job in service.jobs(mine=True, limit=200).jobs}
    kernel = Notebook(tmp_path, MAKEWAY_URL=portal.url, JUPYTERHUB_API_TOKEN="ana")
    try:
        assert kernel.run("%load_ext makeway").error is None
        shown = kernel.run(f"%%train\n{code}")
        assert shown.error is None, shown.trouble
        (job,) = [job for job in service.jobs(mine=True, limit=200).jobs if job.id not in before]
        done = until(service, job.id, lambda job: job.state.ended)
        assert done.state is State.SUCCEEDED
        assert job.id in kernel.run("%jobs").text
        assert "trained 3 steps" in kernel.run(f"%logs {job.id}").out
    finally:
        kernel.close()


@pytest.mark.covers("N08", "N10", "F51")
def test_a_cell_becomes_a_job_and_its_result_comes_back(notebook: Notebook, service: Client) -> None:
    notebook.run("lr, data = 0.5, [1, 2, 3]")
    shown = notebook.run(
        "%%train --profile gpu1 --name 'lr <b>\"0.5\"</b>' --with data,lr --files data.txt --env K=V\n"
        "import os\nprint('hello from the job', os.environ['K'])\nsum(data) * lr + int(open('data.txt').read())"
    )
    assert shown.error is None, shown.trouble
    assert "Job " in shown.text
    assert "&lt;b&gt;" in shown.html
    assert '<b>"' not in shown.html
    notebook.run("mine = _")
    assert "20.0" in notebook.run("mine.wait().result()").text
    assert "hello from the job V" in notebook.run("%logs").out
    assert "succeeded" in notebook.run("mine").text
    assert (
        notebook.run("print(mine.status, mine.attempt, mine.preemptions, mine.exception())").out
        == "succeeded 1 0 None\n"
    )


def test_submitting_takes_less_than_a_second(notebook: Notebook, service: Client) -> None:
    times = sorted(notebook.run("%%train --profile gpu1 --name quick\n1").seconds for _ in range(7))
    assert times[0] < 1.0, times  # `make bench` measures it on an idle machine


@pytest.mark.covers("N10")
def test_a_failing_cell_gives_its_own_traceback(notebook: Notebook, service: Client) -> None:
    notebook.run("%%train --profile gpu1 --wait\ndef f(x):\n    return 1 / x\n\nf(0)")
    shown = notebook.run("_.result()")
    assert shown.error is not None
    assert shown.error[0] == "JobError"
    assert 'File "cell", line 3, in f' in shown.trouble
    assert "ZeroDivisionError: division by zero" in shown.trouble
    assert "site-packages" not in shown.trouble


@pytest.mark.covers("N10")
def test_a_job_survives_the_kernel(portal: Portal, notebook: Notebook, service: Client, tmp_path: Path) -> None:
    job = running(service, notebook, cell="import time\ntime.sleep(1)\n'still here'")
    other = Notebook(tmp_path, MAKEWAY_URL=portal.url, JUPYTERHUB_API_TOKEN="ana")
    try:
        shown = other.run(f"import makeway\nmakeway.job('{job.id}').result()")
        assert shown.text == "'still here'", shown.trouble
    finally:
        other.close()


@pytest.mark.covers("F52")
def test_local_runs_the_same_cell_here(notebook: Notebook, service: Client) -> None:
    notebook.run("x = 20")
    before = len(service.jobs(mine=True, limit=200).jobs)
    shown = notebook.run(
        "%%train --local --with x --files data.txt\nfrom makeway import checkpoint\n"
        "print(checkpoint.requested())\nx + int(open('data.txt').read())"
    )
    assert (shown.out, shown.text) == ("False\n", "37"), shown.trouble
    assert len(service.jobs(mine=True, limit=200).jobs) == before
    shown = notebook.run("%%train --local\nraise KeyError('no')")
    assert "KeyError: 'no'" in shown.out + shown.trouble
    assert "site-packages" not in shown.trouble


@pytest.mark.covers("F52")
def test_a_dry_run_shows_the_plan_and_submits_nothing(notebook: Notebook, service: Client) -> None:
    before = len(service.jobs(mine=True, limit=200).jobs)
    shown = notebook.run("%%train --profile gpu8 --dry-run\n1")
    assert "Nothing was submitted" in shown.text, shown.trouble
    assert "over quota" in shown.text
    assert "makes way" in shown.text
    assert len(service.jobs(mine=True, limit=200).jobs) == before


@pytest.mark.covers("F44")
def test_going_over_quota_shows_the_risk(notebook: Notebook, service: Client) -> None:
    shown = notebook.run("%%train --profile gpu8\nimport time\ntime.sleep(60)")
    assert "Over quota" in shown.out, shown
    assert "would start from the beginning" in " ".join(shown.out.split()), "in lines of 100 characters"
    id = notebook.run("print(_.id)").out.strip()
    until(service, id, lambda job: job.state is State.RUNNING)
    assert "no checkpoint yet" in notebook.run("%job").text


BAD = [
    ("%%train\n\n", "the cell is empty"),
    ("%%train --profile gpu11\n1", "there is no profile 'gpu11' for you. Did you mean gpu1? Yours: gpu1, gpu2"),
    ("%%train --team devops\n1", "you are not in a team 'devops'. Yours: rnd."),
    ("%%train --files big.bin\n1", "files are 200 MB in all, and the limit of a submission is 50 MB. Largest: big.bin"),
    ("%%train --with lock\n1", "a lock cannot be pickled"),
    ("%%train --with nothing_like_it\n1", "this notebook has no such variable."),
    ("%%train --name 'open\n1", "a quote on this line is not closed"),
    ("%%train --time-limit -5\n1", "'-5' is not a duration"),
    ("%%train --workers 0\n1", "'0' is not a whole number of at least 1"),
    ("%%train\nx ==", "line 2 of the cell is not valid Python"),
    ("%job j-none", "there is no job 'j-none' that you may see."),
    ("%jobs --state sleeping", "unknown state 'sleeping'."),
    ("%jobs --team devops", "devops"),
    ("%logs ../../etc/passwd", "there is no job '../../etc/passwd' that you may see."),
    ("%cancel unknown", "there is no job 'unknown' that you may see."),
]  # fmt: skip


@pytest.mark.parametrize(("cell", "says"), BAD, ids=[cell.splitlines()[0] for cell, _ in BAD])
def test_bad_input_is_one_sentence(notebook: Notebook, service: Client, cell: str, says: str) -> None:
    notebook.run("import threading\nlock = threading.Lock()\nopen('big.bin', 'wb').truncate(200_000_000)")
    before = len(service.jobs(mine=True, limit=200).jobs)
    assert says in sentence(notebook.run(cell))
    assert len(service.jobs(mine=True, limit=200).jobs) == before


@pytest.mark.covers("N09")
def test_gpus_jobs_job_and_cancel(notebook: Notebook, service: Client) -> None:
    # %quota shows the largest: other tests of the same portal have left jobs of hers, too.
    notebook.run("import os\nopen('large', 'wb').write(os.urandom(2**20))")
    job = running(service, notebook, "--profile gpu2 --name sleeper --files large")
    shown = notebook.run("%gpus")
    assert "RESERVED" in shown.text
    assert "virtual" in shown.text
    assert "Now:" in shown.text
    assert 'role="img" aria-label="R&amp;D uses' in shown.html
    shown = notebook.run("%jobs")
    assert job.id in shown.text
    assert "OWNER" not in shown.text
    assert "sleeper" in shown.html
    shown = notebook.run("%jobs --all")
    assert "OWNER" in shown.text
    assert ">ana<" in shown.html
    assert "running" in notebook.run("%job sleeper").text
    notebook.run("import makeway\nmine = makeway.job('sleeper')")
    assert "running" in notebook.run("%job {mine.id}").text
    shown = notebook.run("%cancel sleeper")
    assert shown.error is None, shown.trouble
    assert until(service, job.id, lambda j: j.state.ended).state is State.CANCELLED
    shown = notebook.run("%quota")
    assert "You keep " in shown.text
    assert f"`%delete {job.id}` frees " in shown.text
    assert f"%delete {job.id}" in shown.html
    assert (
        f"Deleted: the log and the result of attempt 1 of {job.id}" in notebook.run(f"%delete {job.id} --attempt 1").out
    )
    assert f"Deleted: {job.id} with " in notebook.run(f"%delete {job.id}").out
    assert "was removed" in notebook.run(f"%job {job.id}").trouble


@pytest.mark.covers("N09")
def test_every_magic_has_help_and_completion(notebook: Notebook, service: Client) -> None:
    for magic in ("%%train", "%gpus", "%jobs", "%job", "%logs", "%cancel", "%quota", "%delete"):
        assert "usage: " in notebook.help(magic), magic
    assert "--time-limit" in notebook.help("%%train")
    assert "--profile" in notebook.complete("%%train --pro")
    assert set(notebook.complete("%%train --profile ")) >= {"gpu1", "gpu8"}
    assert notebook.complete("%%train --profile gpu1 --team r") == ["rnd"]
    job = running(service, notebook)
    assert job.id in notebook.complete("%job ")
    assert job.id in notebook.complete("%cancel ")
    notebook.run("learning_rate = 1")
    assert "learning_rate" in notebook.complete("%%train --with learn")


@pytest.mark.covers("N09")
def test_interrupting_follow_and_wait_leaves_the_job(notebook: Notebook, service: Client) -> None:
    cell = "import time\nfor i in range(3000):\n    print('line', i)\n    time.sleep(0.02)"
    job = running(service, notebook, cell=cell)
    for watch in (f"%logs -f {job.id}", f"import makeway; makeway.job('{job.id}').wait()"):
        notebook.run("import makeway")
        id = notebook.client.execute(watch)
        assert notebook.prints(id), "it watches"
        notebook.interrupt()
        shown = notebook.finish(id, time.monotonic() + 60)
        assert shown.error is not None
        assert f"Job {job.id} continues" in shown.trouble
        assert "Traceback" not in shown.trouble
    assert service.job(job.id).state is State.RUNNING


@pytest.mark.covers("N11", "N12", "N10")
def test_a_test_of_preemption_saves_and_resumes(notebook: Notebook, service: Client) -> None:
    cell = (
        "import time\nfrom makeway import checkpoint\nstart = 0\nif (found := checkpoint.latest()):\n"
        "    start = int((found / 'step').read_text())\n    print('resumed at', start)\n"
        "print('trains from', start, flush=True)\n"
        "for step in range(start, 5000):\n    time.sleep(0.02)\n    if checkpoint.requested():\n"
        "        with checkpoint.saving(step) as folder:\n            (folder / 'step').write_text(str(step))\n"
        "        checkpoint.stop()\n"
    )
    job = running(service, notebook, cell=cell)
    says(notebook, job, "trains from 0")
    shown = notebook.run(f"%job {job.id} --preempt-test")
    assert "Test of preemption" in shown.out, shown.trouble
    assert "It saved step" in shown.out, shown.out
    again = until(service, job.id, lambda j: j.attempt == 2 and j.state is State.RUNNING)
    assert again.preemptions in (0, 1)
    says(notebook, job, "resumed at")
    assert len(notebook.run(f"import makeway; makeway.job('{job.id}').checkpoints()").text) > 10
    assert (
        "for a test of preemption"
        in notebook.run(f"for e in makeway.job('{job.id}').events(): print(e.message)").out.lower()
    )


@pytest.mark.covers("F53", "N10")
def test_clones_are_prepared_then_submitted(notebook: Notebook, service: Client) -> None:
    running(service, notebook, cell="import os\nos.environ.get('LR')")
    notebook.run("clones = _.clone(n=3, env={'LR': '0.1'}, name='trial')")
    assert "not submitted" in notebook.run("clones").text
    shown = notebook.run("found = clones.submit()\n[j.wait(quiet=True).result() for j in found]")
    assert shown.text == "['0.1', '0.1', '0.1']", shown.trouble
    assert sentence(notebook.run("found[0].clone(colour=1)")).startswith("Makeway: a clone cannot change 'colour'.")


@pytest.mark.covers("F11", "N09")
def test_a_pending_job_is_moved_to_another_queue(notebook: Notebook, service: Client) -> None:
    notebook.run("%%train --profile gpu8 --workers 5 --name waits\n1")
    job = service.jobs(mine=True).jobs[0]
    assert job.id in notebook.complete("%move ")
    assert "--profile" in notebook.complete(f"%move {job.id} --")
    shown = notebook.run("%move --profile gpu2")
    assert shown.error is None, shown.trouble
    assert service.job(job.id).profile == "gpu2"
    assert sentence(notebook.run(f"%move {job.id} --team devops")).startswith("Makeway: ana is not in the team")
    notebook.run(f"import makeway; makeway.job('{job.id}').move(profile='gpu8')")
    assert service.job(job.id).profile == "gpu8"
    service.cancel(job.id)


@pytest.mark.covers("N10")
def test_a_cancelled_job_can_be_resumed(notebook: Notebook, service: Client) -> None:
    job = running(service, notebook)
    notebook.run(f"import makeway; mine = makeway.job('{job.id}').cancel()")
    until(service, job.id, lambda j: j.state.ended)
    shown = notebook.run("mine.resume().status")
    assert shown.text.strip("'") in ("pending", "starting", "running"), shown.trouble
    assert until(service, job.id, lambda j: j.state is State.RUNNING).attempt == 2


@pytest.mark.covers("N08")
def test_without_a_portal_local_still_works(tmp_path: Path) -> None:
    alone = Notebook(tmp_path)
    try:
        assert alone.run("%load_ext makeway").error is None
        for magic in ("%gpus", "%jobs", "%%train\n1", "%gpus --live", "%logs x"):
            assert "MAKEWAY_URL is not set" in sentence(alone.run(magic)), magic
        assert alone.run("%%train --local\n6 * 7").text == "42"
        assert "gpu1" not in alone.complete("%%train --profile ")
    finally:
        alone.close()


def test_an_unreachable_service_is_reported(portal: Portal, tmp_path: Path) -> None:
    lost = Notebook(tmp_path, MAKEWAY_URL="http://127.0.0.1:9/services/makeway", JUPYTERHUB_API_TOKEN="x")
    try:
        lost.run("%load_ext makeway")
        assert "does not answer" in sentence(lost.run("%gpus"))
        assert "gpu1" not in lost.complete("%%train --profile ")
        lost.run(f"import makeway\nmakeway.connect('{portal.url}', 'wrong')")
        assert "Restart your server from the Hub" in sentence(lost.run("%jobs"))
    finally:
        lost.close()


def test_waiting_too_long_and_empty_logs_are_sentences(notebook: Notebook, service: Client) -> None:
    job = running(service, notebook)
    shown = notebook.run(f"import makeway\nmakeway.job('{job.id}').wait(0.3, quiet=True)")
    assert shown.trouble == f"Job {job.id} is still running after 0.3 s; it continues."
    assert notebook.run("%logs").out == "The log is empty so far.\n"
    assert sentence(notebook.run("%logs --attempt 7")).endswith("has no attempt 7; it was started 1 time.")
    assert "cancelled" in notebook.run("%cancel").text
    shown = notebook.run(f"import makeway; makeway.job('{job.id}').result()")
    assert shown.trouble.startswith(f"Cancelled: job {job.id} has no result.")
    assert "Traceback" not in shown.trouble
