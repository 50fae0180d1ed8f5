"""What jobs get of Makeway loads nothing of others, and the frameworks of the tests can be set up without CUDA."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import set_up
import set_up_frameworks
from makeway import payload

IMPORTS = """
import sys, zipfile
sys.path[:0] = [sys.argv[1], sys.argv[2]]
names = [name[:-3].replace("/", ".") for name in zipfile.ZipFile(sys.argv[1]).namelist() if name.startswith("makeway/")]
for name in names:
    __import__(name.removesuffix(".__init__"))
import launcher.run
found = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"makeway", "launcher"}
print(sorted(name for name in found if not name.startswith("__")), len(names))
"""


def test_the_library_of_jobs_and_the_launcher_load_nothing_of_others(root: Path, tmp_path: Path) -> None:
    library = tmp_path / "lib.zip"
    library.write_bytes(payload._library())
    command = [sys.executable, "-I", "-S", "-c", IMPORTS, str(library), str(root / "widgets" / "makeway")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded, _, number = done.stdout.strip().rpartition(" ")
    assert loaded == "[]"
    assert int(number) >= 14, "with all adapters"


def test_every_adapter_is_reached_by_the_library_of_jobs(tmp_path: Path) -> None:
    from makeway import checkpoint

    for name, module in checkpoint._ADAPTERS.items():
        source = (Path(checkpoint.__file__).parent / "frameworks" / f"{module}.py").read_text(encoding="utf-8")
        assert f"\ndef {name}(" in source
        assert callable(getattr(checkpoint, name))


LISTED = """
 0x0000000000000001 (NEEDED)             Shared library: [libcublas.so.13]
 0x0000000000000001 (NEEDED)             Shared library: [libcudart.so.13]
 0x0000000000000001 (NEEDED)             Shared library: [libnccl.so.2]
 0x0000000000000001 (NEEDED)             Shared library: [libz.so.1]
    12: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND cublasCreate_v2@libcublas.so.13 (5)
    13: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND cudaMalloc@libcudart.so.13 (6)
    14: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND ncclSend
    15: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND deflate@ZLIB_1.2 (9)
    16: 0000000000001000     0 FUNC    GLOBAL DEFAULT   14 cudnnOfItsOwn
"""


def test_only_libraries_of_cuda_are_stubbed_and_the_real_runtime_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up_frameworks, "answer", lambda *command: LISTED)
    assert set_up_frameworks.needed([]) == {"libcublas.so.13", "libnccl.so.2"}
    symbols = set_up_frameworks.undefined([])
    assert symbols == {("cublasCreate_v2", "libcublas.so.13"), ("ncclSend", "")}
    assert list(set_up_frameworks.nodes(symbols)) == ["libcublas.so.13 { global: cublasCreate_v2; };\n"]


@pytest.mark.parametrize(("options", "status"), [([], 1), (["--if-possible"], 0)])
def test_a_machine_that_cannot_have_the_frameworks_goes_on_without(
    options: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def install(self: set_up_frameworks.Frameworks) -> None:
        raise set_up.SetUpProblem("the disk is too full")

    monkeypatch.setattr(set_up_frameworks.Frameworks, "install", install)
    assert set_up_frameworks.main(options) == status
    assert "the disk is too full" in capsys.readouterr().err


def test_the_lock_file_of_the_frameworks_has_none_of_cuda_but_its_runtime(root: Path) -> None:
    lock = (root / set_up_frameworks.PROJECT / "uv.lock").read_text(encoding="utf-8")
    named = [line.split('"')[1] for line in lock.splitlines() if line.startswith("name = ")]
    assert "torch" in named
    assert [name for name in named if name.startswith(("nvidia", "cuda", "triton"))] == ["nvidia-cuda-runtime"]


WITH_ALL_NOTICES = {
    *("test_a_plain_loop", "test_a_loop_over_epochs", "test_lightning", "test_lightning_on_two_processes"),
    *("test_transformers", "test_accelerate", "test_torchrun", "test_a_gang_of_two"),
}


def plans(root: Path) -> tuple[dict[str, str], Callable[[str, str], list[str]]]:
    """Return the moments of each training with all notices, and what draws them."""
    path = root / "tests" / "frameworks" / "test_trainings.py"
    functions = {
        node.name: node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    names: dict[str, object] = {}
    drawing = ast.Module([*ast.parse("import os, random").body, functions["plan"]], [])
    exec(compile(drawing, str(path), "exec", dont_inherit=True), names)
    full = {
        name: ast.literal_eval(line.value)
        for name, node in functions.items()
        for line in node.body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "full"
    }
    return full, names["plan"]  # type: ignore[return-value]


def test_each_training_makes_way_ten_times_at_the_moments_that_are_traps(root: Path) -> None:
    full, _ = plans(root)
    assert full.keys() >= WITH_ALL_NOTICES
    for name in sorted(WITH_ALL_NOTICES):
        moments = full[name].split(", ")
        assert len(moments) >= 10, name
        assert {"import", "load", "save", "end"} <= set(moments), name
        assert sum(moment.startswith("step ") for moment in moments) >= 4, name


def test_the_moments_of_notices_are_drawn_by_a_seed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, plan = plans(root)
    monkeypatch.setitem(os.environ, "NOTICES", "all")
    drawn = []
    for seed in ("1", "1", "2", "3"):
        monkeypatch.setitem(os.environ, "SEED", seed)
        drawn.append([plan("end", moments) for moments in full.values()])
    assert drawn[0] == drawn[1]
    assert len({str(item) for item in drawn}) == 3
    monkeypatch.delitem(os.environ, "NOTICES")
    assert {tuple(plan("end", moments)) for moments in full.values()} == {("end",)}
