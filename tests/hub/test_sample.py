"""A new demo starts with a pool of machines, and later starts use the backend of the last one."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from makeway_hub.sample import set_samples
from makeway_hub.settings import read
from makeway_quota.store import open_store

CONFIG = Path(__file__).resolve().parents[2] / "hub_config"
PLAIN = ("local", "policy.yaml")
POOL = ("local,machines", "machines/policy.yaml")


def started(root: Path, **env: str) -> tuple[str, str]:
    """Return the backend and the policy file of a start."""
    settings = read({"MAKEWAY_STATE_DIR": str(root), **env})
    settings.state.create()
    set_samples(env, settings)
    policy = Path(env["MAKEWAY_POLICY_FILE"])
    has_deployment = env.get("MAKEWAY_DEPLOYMENT_FILE") == str(CONFIG / "machines/deployment.yaml")
    assert has_deployment == (policy == CONFIG / POOL[1])
    shared = env.get("MAKEWAY_MACHINE_CHECKPOINT_DIR")
    assert shared == (str(root / "checkpoints") if "machines" in env.get("MAKEWAY_BACKEND", "") else None)
    return env.get("MAKEWAY_BACKEND", ""), str(policy.relative_to(CONFIG) if policy.is_relative_to(CONFIG) else policy)


def used(root: Path, *statements: str) -> Path:
    """Make the tables of the service, as its first start does."""
    root.mkdir(parents=True, exist_ok=True)
    open_store(f"sqlite:///{root / 'makeway.sqlite'}").close()
    with closing(sqlite3.connect(root / "makeway.sqlite")) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return root


def test_a_new_demo_has_the_pool_of_machines_and_so_have_its_later_starts(tmp_path: Path) -> None:
    assert started(tmp_path) == POOL
    assert started(tmp_path) == POOL, "an empty file is no database"
    used(tmp_path)
    assert started(tmp_path) == POOL
    assert started(tmp_path, MAKEWAY_BACKEND="", MAKEWAY_POLICY_FILE="/site.yaml") == ("local,machines", "/site.yaml")


def test_a_database_that_never_had_machines_stays_without(tmp_path: Path) -> None:
    assert started(used(tmp_path)) == PLAIN
    seeded = "INSERT INTO deployments VALUES ('mine', 'name: mine', 1, 0, 1.0, 'admin', NULL)"
    assert started(used(tmp_path / "saved", seeded)) == PLAIN, "a deployment that was only saved launches nothing"


def test_a_database_without_a_note_of_its_backend_is_looked_into(tmp_path: Path) -> None:
    seeded = "INSERT INTO deployments VALUES ('demo', 'name: demo', 1, 0, 1.0, 'makeway', NULL)"
    assert started(used(tmp_path / "seeded", seeded)) == POOL
    launched = (
        "INSERT INTO machines (id, deployment, pool, type, zone, market, gpus, requested_at, since, state, version,"
        " term, calls, needed_at, absences, reason)"
        " VALUES ('m-1', 'mine', 'gpu', 'small', '', 'on_demand', 2, 1, 1, 'ended', 1, 1, 1, 1, 0, '')"
    )
    assert started(used(tmp_path / "launched", launched)) == POOL


@pytest.mark.parametrize(
    "name", ["MAKEWAY_POLICY_FILE", "MAKEWAY_DEPLOYMENT_FILE", "MAKEWAY_DB_URL", "MAKEWAY_BACKEND"]
)
def test_a_site_that_begins_with_something_of_its_own_gets_no_machines(tmp_path: Path, name: str) -> None:
    values = {
        "MAKEWAY_POLICY_FILE": "/site.yaml",
        "MAKEWAY_DEPLOYMENT_FILE": "/cloud.yaml",
        "MAKEWAY_DB_URL": f"sqlite:///{tmp_path / 'other.sqlite'}",
        "MAKEWAY_BACKEND": "local",
    }
    backend, policy = started(tmp_path, **{name: values[name]})
    assert backend == "local"
    assert policy == (values[name] if name == "MAKEWAY_POLICY_FILE" else "policy.yaml")
    used(tmp_path)
    assert started(tmp_path) == PLAIN


def test_a_named_backend_decides_and_is_kept(tmp_path: Path) -> None:
    assert started(tmp_path, MAKEWAY_BACKEND="local") == PLAIN
    used(tmp_path)
    assert started(tmp_path) == PLAIN
    assert started(tmp_path, MAKEWAY_BACKEND="local, machines")[1] == POOL[1]
    assert started(tmp_path) == POOL
    assert started(tmp_path, MAKEWAY_BACKEND="local") == PLAIN
    assert started(tmp_path) == PLAIN


def test_a_named_backend_is_kept_where_the_database_is_elsewhere(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'other.sqlite'}"
    assert started(tmp_path, MAKEWAY_DB_URL=url, MAKEWAY_BACKEND="local,machines") == POOL
    assert started(tmp_path, MAKEWAY_DB_URL=url) == POOL


def test_a_backend_that_needs_more_settings_is_not_kept(tmp_path: Path) -> None:
    assert started(used(tmp_path), MAKEWAY_BACKEND="local,kubernetes") == ("local,kubernetes", "policy.yaml")
    assert started(tmp_path) == PLAIN


def test_a_damaged_note_counts_for_nothing(tmp_path: Path) -> None:
    (used(tmp_path) / "backend").write_bytes(b"local,mach\xff")
    assert started(tmp_path) == PLAIN


def test_system_users_mode_gets_no_machines(tmp_path: Path) -> None:
    assert started(tmp_path, MAKEWAY_MODE="system") == ("", "policy.yaml")
