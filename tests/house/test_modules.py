"""Modules are short and begin with a sentence; a newcomer who reads only first lines knows the system."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

PACKAGES = (
    "hub_config/makeway_hub",
    "spawner/makeway_spawner",
    "quota_service/makeway_api",
    "quota_service/makeway_quota",
    "widgets/makeway",
    "device_plugin/makeway_device_plugin",
)
CHECKED = (*PACKAGES, "kube_cluster")
"""The packages of the wheel, and the test cluster, which is used from a checkout alone."""
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
MAX_MODULE = 500
MAX_FUNCTION = 60
REFERENCE = "reference"
"""The folder of the reference engine, whose classes are named like those of the engine that it is compared with."""
TWO_SIDES = {"Workload", "Room"}
"""A workload in the store and in the engine; the room in a pool and the room that a search tries."""


def modules(root: Path) -> Iterator[Path]:
    for package in CHECKED:
        for file in sorted((root / package).rglob("*.py")):
            if "versions" not in file.parts and "__pycache__" not in file.parts:
                yield file


def test_every_module_begins_with_a_sentence(root: Path) -> None:
    wrong = []
    for file in [*modules(root), *(root / "scripts").glob("*.py"), *(root / "benchmarks").glob("*.py")]:
        first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").strip().splitlines()[:1]
        if not first or len(first[0].split()) < 3 or not (first[0][0].isupper() or first[0][0] in "`%"):
            wrong.append(str(file.relative_to(root)))
    assert not wrong


def test_no_module_or_function_is_too_long(root: Path) -> None:
    wrong = []
    for file in modules(root):
        text = file.read_text(encoding="utf-8")
        if len(text.splitlines()) > MAX_MODULE:
            wrong.append(f"{file.relative_to(root)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION:
                    wrong.append(f"{file.relative_to(root)}:{node.lineno} {node.name}: {length} lines")
    assert not wrong


def test_no_module_has_an_empty_name(root: Path) -> None:
    assert not [str(file.relative_to(root)) for file in modules(root) if file.stem in BANNED_NAMES]


@pytest.mark.parametrize("package", CHECKED)
def test_no_package_has_two_classes_of_one_name(root: Path, package: str) -> None:
    result: dict[str, list[str]] = {}
    for file in modules(root):
        if file.is_relative_to(root / package) and REFERENCE not in file.parts:
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    result.setdefault(node.name, []).append(str(file.relative_to(root)))
    assert result
    assert not {name: files for name, files in result.items() if len(files) > 1 and name not in TWO_SIDES}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(root: Path, package: str) -> None:
    assert (root / package / "py.typed").exists()


def test_one_module_writes_the_states_of_workloads(root: Path) -> None:
    package = root / "quota_service/makeway_quota"
    writers = []
    for file in sorted(package.rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        if any(isinstance(call.func, ast.Name) and call.func.id == "Change" for call in calls):
            writers.append(file.relative_to(package).as_posix())
    assert writers == ["control/transitions.py"]


def test_no_module_asks_which_backend_it_has(root: Path) -> None:
    """What only some of them do is in the protocol, with a harmless default, so that another one is no special case."""
    package, asks = root / "quota_service/makeway_quota", list[str]()
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                kinds = {one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name)}
                kinds |= {one.attr for one in ast.walk(node.args[1]) if isinstance(one, ast.Attribute)}
                if any(kind.endswith("Backend") for kind in kinds):
                    asks.append(f"{file.relative_to(package)}:{node.lineno}")
    assert not asks


WAY_OF_A_JOB = ("Submission", "JobRequest", "NewWorkload", "Workload", "StartOrder", "WorkerStart")
"""From `%%train` to the launcher: in the notebook, on the wire, to be stored, stored, for a backend, for a machine"""
BESIDE_THE_WAY = {"Job", "DryRun", "CloneOverrides"}
"""Answers about a job, and the edits that make a `JobRequest` of an earlier job"""


def test_a_job_passes_at_most_six_shapes_from_the_cell_to_its_process(root: Path) -> None:
    """A shape is a class that carries what the job runs: its `command`."""
    shapes = []
    for folder in ("widgets/makeway", "quota_service"):
        for file in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    fields = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
                    if any(isinstance(field, ast.Name) and field.id == "command" for field in fields):
                        shapes.append(node.name)
    assert sorted(shapes) == sorted({*WAY_OF_A_JOB, *BESIDE_THE_WAY})
    assert len(WAY_OF_A_JOB) <= 6


SERVICE = "makeway_quota"
MAX_MODULES = 16
"""Of one folder: more than a reader keeps in view"""
SHORT_MODULE = 60
EACH_CHECK = "the doctor has a module for each thing that it checks"
EACH_ROUTE = "the API has a module for each noun, and the pages one for each page"
SHORT: dict[str, str] = {
    "agent_program": "packs what machines download, as a layer of its own",
    "artifacts.choice": "alone knows both kinds of places, so that only `bucket` imports boto3",
    "autoscale.providers.choice": "alone knows all providers, so that each is imported only where it is named",
    "backends.kubernetes.attempts.creation": "a start may be repeated: this rule is tested alone",
    "backends.kubernetes.attempts.termination_message": "reads what a job's container wrote, which is not trusted",
    "backends.local.machine_loss": "a judgement about the whole machine, tested alone",
    "backends.routing.channels": "which backend reads which report is tested alone",
    "backends.routing.placements": "what is kept of ended attempts, and how much, is tested alone",
    "control.machines.agent_reports": "reads what agents report, which is not trusted",
    "control.hub.membership": "a step of the cycle, as `time_limits`",
    "control.world.checkpoint_failures": "follows the commits, as `active_rows` does",
    "doctor.database": EACH_CHECK,
    "doctor.images": EACH_CHECK,
    "engine.cycle.growth": "a step of the engine's cycle",
    "policy.advice": "unlike `check` it refuses nothing",
    "services.jobs.job_image": "whose image a job gets is one pure choice",
    "snapshot_file.writer": "the other half of `reader`",
    "web.api.people": EACH_ROUTE,
    "web.api.policy": EACH_ROUTE,
    "web.api.retention": EACH_ROUTE,
    "web.openapi": "what the API's description says of its errors",
    "web.pages.decisions": EACH_ROUTE,
    "web.requests.hold_reads": "a middleware, as each module here",
    "web.server.listeners": "which families of addresses a machine has is tested alone",
    "wording.remedies": "all sentences are in `wording`",
}
"""Modules below SHORT_MODULE lines that only one other imports, and why they are not part of it"""


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Every module and package of the service with those of them that it imports; not for its types alone."""
    graph = grimp.build_graph(SERVICE, cache_dir=None, exclude_type_checking_imports=True)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_no_folder_of_the_service_holds_too_many_modules(root: Path) -> None:
    folders = Counter(file.parent for file in modules(root) if file.is_relative_to(root / "quota_service"))
    assert not {str(folder.relative_to(root)): n for folder, n in folders.items() if n > MAX_MODULES}


def test_no_module_of_the_service_imports_itself_by_way_of_others(imports: dict[str, set[str]]) -> None:
    sorter = TopologicalSorter(imports)
    sorter.prepare()  # an error that names the modules of a circle


def test_a_short_module_that_one_other_imports_has_a_reason(root: Path, imports: dict[str, set[str]]) -> None:
    importers = Counter(imported for result in imports.values() for imported in result)
    short = set()
    for file in (root / "quota_service" / SERVICE).rglob("*.py"):
        name = ".".join(file.relative_to(root / "quota_service").with_suffix("").parts)
        if importers[name] == 1 and len(file.read_text(encoding="utf-8").splitlines()) < SHORT_MODULE:
            short.add(name.removeprefix(f"{SERVICE}."))
    assert short == SHORT.keys(), "put a new one into the module that imports it, or write down why not"
