"""Upgrade the databases of one machine before anything listens, each from a copy, and refuse those of a newer version.

The Hub upgrades its own (`JupyterHub.upgrade_db`); the service's is upgraded by its own command, because the Hub gives
a service only seconds to start.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path

import jupyterhub
from makeway_api import installations

from .address import CannotStart
from .state_directory import StateDirectory

_SQLITE = "sqlite:///"
_REVISION = re.compile(r"^revision\s*=\s*['\"](\w+)['\"]", re.MULTILINE)
_MIGRATIONS = Path("store") / "migrations" / "versions"


def revision_of(database: Path) -> str | None:
    """Return the version of the tables in an SQLite file; None where there are none, or the file cannot be read."""
    if not database.is_file() or not database.stat().st_size:
        return None
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.Error:
        return None
    return str(row[0]) if row else None


def check_no_copy(state: StateDirectory) -> None:
    """Raise CannotStart where the service of another portal on this machine has the data of this state directory.

    It is looked at before the Hub starts, which would take the notebooks of the other portal for its own.
    """
    database = state.root / "makeway.sqlite"
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        row = connection.execute("SELECT name FROM installation").fetchone()
        other = installations.running_service(str(row[0])) if row else None
        if other is not None and Path(other.folder) != state.root.resolve():
            raise CannotStart(installations.copy_problem(other, str(state.root)))


def has_used_machines(state: StateDirectory) -> bool:
    """Whether the service has launched machines, or began with a deployment of them, as the demo does."""
    query = "SELECT 1 FROM machines UNION ALL SELECT 1 FROM deployments WHERE updated_by = 'makeway' LIMIT 1"
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{state.root / 'makeway.sqlite'}?mode=ro", uri=True)) as connection,
    ):
        return connection.execute(query).fetchone() is not None
    return False


def known_revisions(folder: Path) -> set[str]:
    """Return the versions to which the migrations in a folder lead."""
    texts = (file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    return {match[1] for text in texts if (match := _REVISION.search(text))}


def check_hub_database(url: str) -> None:
    """Raise CannotStart for an SQLite file that a newer JupyterHub has upgraded: there is no way back."""
    if not url.startswith(_SQLITE):
        return
    database = Path(url.removeprefix(_SQLITE))
    result = revision_of(database)
    if result and result not in known_revisions(Path(jupyterhub.__file__).parent / "alembic" / "versions"):
        raise CannotStart(
            f"The Hub's database {database} is of a newer JupyterHub (its version is {result}), and this is JupyterHub "
            f"{jupyterhub.__version__}: install the newer one again, or put the copy back that was made beside it "
            f"before its upgrade ({database.name}.DATE)."
        )


def upgrade_service(
    state: StateDirectory, report: Callable[[str], object], env: Mapping[str, str] = os.environ
) -> None:
    """Bring the service's database up to date, an SQLite file after a copy of it; CannotStart with the reason else."""
    url = env.get("MAKEWAY_DB_URL", "").strip()
    if not url or url.startswith(_SQLITE):
        database = Path(url.removeprefix(_SQLITE)) if url else state.root / "makeway.sqlite"
        revision = revision_of(database)
        if revision is None or revision == _latest_revision():
            return
        copy = database.with_name(f"{database.name}.{datetime.now():%Y-%m-%d-%H%M%S}")
        report(f"Upgrading the database {database}; a copy of it as it was is {copy.name} …")
        _copy(database, copy)
    process = subprocess.run(
        [sys.executable, "-m", "makeway_quota.main", "--log-level", "warning", "upgrade-db"],
        env={**env, "MAKEWAY_STATE_DIR": str(state.root)},
        cwd=state.root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["it does not say why"]
        raise CannotStart(f"The service's database could not be upgraded: {lines[-1].removeprefix('makeway-quota: ')}")


def _latest_revision() -> str:
    """Return the version of this release's tables, without importing the service."""
    spec = importlib.util.find_spec("makeway_quota")
    if spec is None or not spec.submodule_search_locations:
        raise CannotStart("The package makeway_quota is not installed: run `make setup`.")
    return max(known_revisions(Path(next(iter(spec.submodule_search_locations))) / _MIGRATIONS), default="")


def _copy(database: Path, copy: Path) -> None:
    """Copy an SQLite file with what its journal holds, for this account only."""
    os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
