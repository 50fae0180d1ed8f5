"""Check a cell before it is submitted: what a job would miss hours later is said now.

Called for every cell that becomes a job or runs with `--local`. What certainly fails is refused with the option that
helps; what may work, because the job's image may have it, is a note.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import symtable
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from makeway_api.quantities import listed

from .problems import Refused

NOTEBOOK_ONLY = re.compile(r"^\s*(?:[!%?]|\w[\w, ]*=\s*[!%]|.*[^?]\?\??\s*$)")
KEYBOARD = {"input": "a job has no keyboard", "breakpoint": "a job has no keyboard"}
TASKS = {"asyncio.create_task", "asyncio.ensure_future"}
SHELLS = {"os.system", "os.popen"}
PROGRAMS = {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output", "Popen", "getoutput")}
READERS = re.compile(r"(?:\w+\.)*(?:open|read_\w+|load|loadtxt|genfromtxt|imread)")
OWN_NAMES = re.compile(r"_+|_i+|_i?\d+|__\w+__|In|Out")
"""Names that IPython and Python define in every notebook"""
ASKS_FOR_NAMES = re.compile(r"\b(globals|locals|vars|dir)\(|\bTYPE_CHECKING\b")
NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar
WORKERS = {"threading.Thread", "Thread", "multiprocessing.Process", "Process", "mp.Process", "ctx.Process"}


def check_cell(source: str, first_line: int = 1) -> ast.Module:
    """Return the tree of a cell; raise Refused with its line in the notebook if it cannot run as plain Python."""
    if not source.strip():
        raise Refused("the cell is empty; write the training code below the %%train line.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shown where the cell runs
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            compile(source, "cell", "exec", flags, dont_inherit=True)
            tree = ast.parse(source, "cell")
    except (SyntaxError, ValueError) as error:
        raise _invalid(source, error, first_line) from None
    if not tree.body:
        raise Refused("the cell has only comments; write the training code below the %%train line.")
    return tree


def _invalid(source: str, error: SyntaxError | ValueError, first_line: int) -> Refused:
    line = error.lineno if isinstance(error, SyntaxError) else None
    magic = _first_magic(source)
    if magic is not None and (line is None or magic <= line):
        text = source.splitlines()[magic - 1].strip()[:60]
        return Refused(
            f"line {magic + first_line - 1} of the cell, `{text}`, is notebook syntax; a job runs plain Python. "
            "Run it in a cell of its own, or call subprocess.run([...])."
        )
    where = f"line {line + first_line - 1} of the cell" if line else "the cell"
    what = error.msg if isinstance(error, SyntaxError) else str(error)
    return Refused(f"{where} is not valid Python: {what}. Nothing was submitted.")


def _first_magic(source: str) -> int | None:
    """Return the line of the first magic, shell command or `?` of a cell, as IPython finds it; None without any."""
    try:
        from IPython.core.inputtransformer2 import TransformerManager, make_tokens_by_line
    except ImportError:
        return next((n for n, line in enumerate(source.splitlines(), 1) if NOTEBOOK_ONLY.match(line)), None)
    tokens = make_tokens_by_line(source.splitlines(keepends=True))
    manager: Any = TransformerManager()  # type: ignore[no-untyped-call]
    magics = [kind.find(tokens) for kind in manager.token_transformers]
    return min((one.start_line + 1 for one in magics if one is not None), default=None)


class CellCheck:
    """The checks of one cell; `sent` are the paths of its files, `given` the names that `--with` brings."""

    def __init__(
        self,
        source: str,
        *,
        sent: Collection[str] = (),
        given: Collection[str] = (),
        namespace: Mapping[str, Any] | None = None,
        first_line: int = 1,
        image: str | None = None,
    ) -> None:
        self.tree = check_cell(source, first_line)
        self.source, self.sent, self.given = source, frozenset(sent), frozenset(given)
        self.namespace = namespace or {}
        self.first_line, self.image = first_line, image
        self.notes: list[str] = []
        """What may fail in the job"""
        self._tried, self._conditional = _tried(self.tree)
        self._bound = _bound_names(source)

    def run(self) -> list[str]:
        """Return the notes; raise Refused for what fails in a job."""
        checks: tuple[Callable[[], None], ...] = (
            self._names, self._imports, self._shell, self._keyboard, self._tasks, self._programs, self._files,
            self._workers,
        )  # fmt: skip
        for check in checks:
            check()
        return self.notes

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the notes about a command; raise Refused for a program that is not sent."""
        self.check_program(command[0])
        return self.notes

    def _names(self) -> None:
        """Refuse variables of the notebook that the cell uses but is not given."""
        missing = [name for name in self._free_names() if name in self.namespace and name not in self.given]
        modules = [name for name in missing if isinstance(self.namespace[name], types.ModuleType)]
        if modules:
            imports = listed(f"`{_import(name, self.namespace[name])}`" for name in modules)
            raise Refused(
                f"the cell uses {listed(modules)}, imported in the notebook; a job sees only its cell. "
                f"Write {imports} into the cell."
            )
        if missing:
            raise Refused(
                f"the cell uses {listed(missing)} of the notebook; a job sees only its cell and what is given to it. "
                f"Add --with {','.join(missing)}, or define {'it' if len(missing) == 1 else 'them'} in the cell."
            )

    def _free_names(self) -> list[str]:
        """Return the global names that the cell reads and has not defined before, in their order."""
        if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(self.tree)):
            return []
        result: list[str] = []
        bound: set[str] = set()
        for statement in self.tree.body:
            names = _own_names(statement)
            changed = _augmented(_own_nodes(statement))
            stored = {n.id for n in names if isinstance(n.ctx, ast.Store) and n not in changed}
            simple = isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr)
            reads = [n for n in names if isinstance(n.ctx, ast.Load) or n in changed]
            defined = _defined_by(statement)
            own = bound | defined if simple else bound | defined | stored
            result += [n.id for n in reads if n.id not in own and self._runs(n)]
            bound |= stored | defined
        changed = _augmented(ast.walk(self.tree))
        assigned = self._bound - {name.id for name in changed if name.id not in bound}
        avoided = {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and not self._runs(n)}
        inner = [*_global_reads(self.source), *(n.id for n in changed if n.id in self._bound)]
        result += [name for name in inner if name not in assigned | avoided]
        return [name for name in dict.fromkeys(result) if not OWN_NAMES.fullmatch(name)]

    def _runs(self, node: ast.AST) -> bool:
        """Whether nothing in the cell expects that this fails."""
        return node not in self._tried

    def _imports(self) -> None:
        """Refuse modules that lie beside the notebook and are not sent; note those that are missing here."""
        for module in dict.fromkeys(self._imported()):
            self.check_module(module, "the cell imports")

    def check_module(self, module: str, user: str) -> None:
        """Refuse a module that is only in a place of this notebook; note one that is missing."""
        root = module.partition(".")[0]
        if root in sys.builtin_module_names or root in ("__main__", "makeway"):
            return
        place = _place(root)
        if place is None:
            known = root in sys.stdlib_module_names or any(_provides(path, root) for path in self.sent)
            if not known and self.image is None:
                self.notes.append(
                    f"{user[0].upper()}{user[1:]} {root}, which is not installed here: the job needs an image that has "
                    "it (--image)."
                )
            return
        if _installed(place) or any(_provides(path, root) for path in self.sent):
            return
        shown = _relative(place)
        if shown in self.sent or any(path.startswith(f"{shown}/") for path in self.sent):
            return
        if os.path.realpath(_fresh_place(root)) == os.path.realpath(place):
            return
        if shown.startswith("..") or os.path.isabs(shown):
            raise Refused(
                f"{user} {root} from {place}, which only this notebook finds; a job does not. Install it, or copy it "
                f"beside the notebook and add --files {Path(place).name}."
            )
        raise Refused(
            f"{user} {root}, which lies beside the notebook as {shown}; a job gets only the files that are sent. "
            f"Add --files {shlex.quote(shown)}."
        )

    def _imported(self) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if not self._runs(node):
                continue
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module

    def _shell(self) -> None:
        """Refuse IPython's shell, which only a notebook has."""
        own = self._bound - _imported_from(self.tree, "IPython")
        for node in self._calls("get_ipython"):
            if "get_ipython" not in own and "get_ipython" not in self.given:
                raise Refused(
                    f"line {self._line(node)} of the cell calls get_ipython(), which only a notebook has; a job runs "
                    "plain Python. Do that in a cell of its own, or call subprocess.run([...])."
                )

    def _keyboard(self) -> None:
        """Refuse what waits for a keyboard."""
        for name, why in KEYBOARD.items():
            for node in self._calls(name):
                if name not in self._bound and name not in self.given:
                    raise Refused(
                        f"line {self._line(node)} of the cell calls {name}(), and {why}. Give values with --with or "
                        "--env."
                    )

    def _tasks(self) -> None:
        """Refuse tasks of the notebook's event loop that the cell does not await."""
        if any(isinstance(n, ast.Await | ast.AsyncFor | ast.AsyncWith) for n in _own_nodes(self.tree)):
            return
        for node in _own_nodes(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in TASKS and self._runs(node):
                raise Refused(
                    f"line {self._line(node)} of the cell starts a task for the notebook's event loop, and a job has "
                    "none after its cell. Await the task in the cell."
                )

    def _programs(self) -> None:
        """Note programs that are missing here; refuse those that lie beside the notebook and are not sent."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and node.args and self._runs(node):
                name = _dotted(node.func)
                if name in PROGRAMS | SHELLS and (program := _program(node, name in SHELLS)):
                    self.check_program(program)

    def check_program(self, program: str) -> None:
        """Refuse a program beside the notebook that is not sent; note one that is missing here."""
        path = os.path.normpath(program)
        if path in self.sent or (shutil.which(program) and not ("/" in program and not os.path.isabs(program))):
            return
        if "/" in program and not os.path.isabs(program) and os.path.isfile(path):
            raise Refused(
                f"the program {program} lies beside the notebook; a job gets only the files that are sent. Add --files "
                f"{shlex.quote(path)}."
            )
        if self.image is None:
            self.notes.append(f"The program {program} is not found here: the job needs an image that has it (--image).")

    def _files(self) -> None:
        """Note files beside the notebook that the cell reads and that are not sent."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and node.args and READERS.fullmatch(_dotted(node.func)):
                path = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
                if not isinstance(path, str) or os.path.isabs(path) or _writes(node):
                    continue
                path = os.path.normpath(path)
                if os.path.isfile(path) and path not in self.sent:
                    self.notes.append(
                        f"The cell reads {path}, which lies beside the notebook and is not sent: add --files "
                        f"{shlex.quote(path)}."
                    )

    def _workers(self) -> None:
        """Note threads and processes that nothing waits for."""
        names = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and _dotted(node.func) in WORKERS]
        daemons = [n for n in names if any(k.arg == "daemon" and ast.unparse(k.value) == "True" for k in n.keywords)]
        if len(names) > len(daemons) and ".join(" not in self.source:
            self.notes.append(
                "The cell joins none of its threads or processes: those that still run a minute after its end are "
                "ended with the job."
            )

    def _calls(self, name: str) -> Iterator[ast.Call]:
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Call) or not self._runs(node) or node in self._conditional:
                continue
            if isinstance(node.func, ast.Name) and node.func.id == name:
                yield node

    def _line(self, node: ast.expr) -> int:
        return node.lineno + self.first_line - 1


def _tried(tree: ast.Module) -> tuple[frozenset[ast.AST], frozenset[ast.AST]]:
    """Return the nodes whose failure is expected (a `try` with handlers, types only), and those under any `if`."""
    tried: set[ast.AST] = set()
    conditional: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and node.handlers:
            tried.update(inner for statement in node.body for inner in ast.walk(statement))
        elif isinstance(node, ast.If | ast.IfExp):
            parts = [*node.body, *node.orelse] if isinstance(node, ast.If) else [node.body, node.orelse]
            inside = [inner for part in parts for inner in ast.walk(part)]
            conditional.update(inside)
            if ASKS_FOR_NAMES.search(ast.unparse(node.test)):
                tried.update(inside)
    return frozenset(tried), frozenset(conditional)


def _augmented(nodes: Iterable[ast.AST]) -> set[ast.Name]:
    """Return the names that `+=` and its like read and change."""
    return {node.target for node in nodes if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)}


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the cell runs, not those of functions, classes and comprehensions."""
    ahead: list[ast.AST] = [tree]
    while ahead:
        node = ahead.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            ahead = [*node.decorator_list, *ahead]
            continue
        if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            continue
        yield node
        ahead = [*ast.iter_child_nodes(node), *ahead]


def _own_names(statement: ast.AST) -> list[ast.Name]:
    return [node for node in _own_nodes(statement) if isinstance(node, ast.Name)]


def _defined_by(statement: ast.AST) -> set[str]:
    """Return the names that imports, definitions and handlers of a statement define."""
    result: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Import | ast.ImportFrom):
            result |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, NAMED) and node.name:
            result.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            result.add(node.rest)
        elif isinstance(node, ast.Global):
            changed = _augmented(ast.walk(statement))
            names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and n not in changed}
            result |= set(node.names) & names
        elif isinstance(node, ast.NamedExpr) and isinstance(node.target, ast.Name):
            result.add(node.target.id)
    return result


def _tables(source: str) -> Iterator[symtable.SymbolTable]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ahead = [symtable.symtable(source, "cell", "exec")]
        except SyntaxError:  # this Python does not know an `await` of a notebook here
            return
    while ahead:
        yield (table := ahead.pop(0))
        ahead += table.get_children()


def _bound_names(source: str) -> frozenset[str]:
    """Return the global names that the cell defines somewhere."""
    result: set[str] = set()
    for depth, table in enumerate(_tables(source)):
        for symbol in table.get_symbols():
            binds = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
            if binds and (depth == 0 or symbol.is_declared_global()):
                result.add(symbol.get_name())
    return frozenset(result)


def _global_reads(source: str) -> list[str]:
    """Return the global names that the cell and its functions, classes and comprehensions read."""
    return [
        symbol.get_name()
        for table in _tables(source)
        for symbol in table.get_symbols()
        if symbol.is_global() and symbol.is_referenced()
    ]


def _imported_from(tree: ast.Module, package: str) -> set[str]:
    """Return the names that the cell imports from a package."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package
        for alias in node.names
    }


def _import(name: str, module: types.ModuleType) -> str:
    return f"import {module.__name__}" if name == module.__name__ else f"import {module.__name__} as {name}"


def _place(root: str) -> str | None:
    """Return the file or folder from which this notebook imports a module; None if it has none."""
    try:
        spec = getattr(sys.modules.get(root), "__spec__", None) or importlib.util.find_spec(root)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return str(next(iter(spec.submodule_search_locations)))
    return spec.origin if spec.has_location else ""


def _relative(place: str) -> str:
    """Return a path as seen from the notebook's folder; as it is where that was deleted."""
    try:
        return os.path.relpath(place)
    except FileNotFoundError:
        return place


@lru_cache(maxsize=64)
def _fresh_place(root: str) -> str:
    """Return from where a Python without this notebook's paths imports a module, as with an editable install."""
    code = "import importlib.util, sys\nspec = importlib.util.find_spec(sys.argv[1])\n"
    code += "print(spec and next(iter(spec.submodule_search_locations or [spec.origin])) or '')"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, root], cwd=os.sep, env=env, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


@lru_cache(maxsize=1)
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({os.path.realpath(paths[name]) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _installed(place: str) -> bool:
    return not place or os.path.realpath(place).startswith(_libraries())


def _provides(path: str, root: str) -> bool:
    """Whether a file that is sent makes `import root` work in the job's folder."""
    return path == f"{root}.py" or path.startswith(f"{root}/")


def _program(node: ast.Call, shell: bool) -> str:
    """Return the program that a call runs, where it is written out; empty where that is not known."""
    first = node.args[0]
    shell = shell or any(k.arg == "shell" for k in node.keywords) or _dotted(node.func).endswith("getoutput")
    if isinstance(first, ast.List | ast.Tuple) and first.elts:
        first = first.elts[0]
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str) or not first.value:
        return ""
    if not shell:
        return first.value
    word = first.value.split()[0] if first.value.split() else ""
    return word if re.fullmatch(r"[\w./+-]+", word) and word not in SHELL_WORDS else ""


SHELL_WORDS = frozenset(
    [
        "cd",
        "export",
        "set",
        "unset",
        "if",
        "for",
        "while",
        "case",
        "test",
        "true",
        "false",
        "exit",
        "echo",
        "source",
        "eval",
        "exec",
        "ulimit",
    ]
)


def _dotted(function: ast.expr) -> str:
    return ast.unparse(function) if isinstance(function, ast.Name | ast.Attribute) else ""


def _writes(node: ast.Call) -> bool:
    """Whether a call of `open` writes."""
    mode = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "mode")]
    return any(isinstance(m, ast.Constant) and isinstance(m.value, str) and set(m.value) & set("wax") for m in mode)
