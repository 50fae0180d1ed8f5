"""No two users share a home, no two servers a log, and what earlier releases made is found again."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub import orm
from makeway_spawner.home import earlier_file_name, file_name, home_of, prepare
from makeway_spawner.local import MakewayLocalSpawner, log_name
from spawner.test_ended_starts import local
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

ALPHABET = "a1-.+%=@ /\\é\u0e91ЁÃ©\u0301\x01"
NAMES = ["".join(each) for size in (1, 2, 3) for each in itertools.product(ALPHABET, repeat=size)]


def test_no_two_of_many_names_meet() -> None:
    assert len({file_name(name) for name in NAMES}) == len(NAMES)
    assert len({earlier_file_name(name) for name in NAMES}) < len(NAMES)


def test_no_name_is_what_an_earlier_release_made_of_another() -> None:
    earlier = {earlier_file_name(name): name for name in NAMES}
    for name in NAMES:
        assert earlier.get(file_name(name), name) == name


def test_logs_of_users_and_servers_do_not_meet() -> None:
    servers = [(user, server) for user in NAMES[:400] for server in ("", *NAMES[:60])]
    assert len({log_name(user, server) for user, server in servers}) == len(servers)
    assert log_name("ana", "b") != log_name("ana-b", "")
    assert log_name("ana", "") == "ana.log"


@pytest.mark.parametrize("letter", ["a", "é", "日", "\U0001f600"])
def test_long_names_fit_in_a_file_system_and_do_not_meet(tmp_path: Path, letter: str) -> None:
    names = [letter * count for count in range(1, 256)]
    file_names = {file_name(name) for name in names}
    assert len(file_names) == len(names)
    for path in (*file_names, *(log_name(name, other) for name in names[-3:] for other in names[-3:])):
        (tmp_path / path).touch()
    assert len({log_name(name, other) for name in names[-3:] for other in names[-3:]}) == 9


def test_plain_names_stay_as_they_were() -> None:
    rng = random.Random(7)
    for _ in range(500):
        name = "".join(rng.choices("abcxyz0189-_.", k=rng.randint(1, 30))).lstrip(".") or "x"
        assert file_name(name) == earlier_file_name(name) == name


class Hub:
    """The users of a Hub, in the order in which it made them."""

    def __init__(self, root: Path, *names: str) -> None:
        engine = create_engine("sqlite://")
        orm.Base.metadata.create_all(engine)
        self.db = Session(engine)
        for name in names:
            self.db.add(orm.User(name=name))
            self.db.commit()
        self.root = root
        self.root.mkdir(exist_ok=True)

    def spawner(self, name: str, server: str = "") -> MakewayLocalSpawner:
        user: Any = SimpleNamespace(name=name, db=self.db, orm_user=orm.User.find(self.db, name))
        spawner = MakewayLocalSpawner(user=user, homes=str(self.root), logs=str(self.root))
        spawner.orm_spawner = SimpleNamespace(server=None, name=server, state={}, user_options={})
        return spawner

    def home(self, name: str) -> Path:
        """Return the home of a user's start."""
        spawner = self.spawner(name)
        prepare(spawner.home, spawner._earlier_home())
        assert spawner.home == home_of(self.root, name)
        assert spawner.home.is_dir()
        return spawner.home

    def earlier(self, name: str) -> Path:
        """Make the home of a user as an earlier release did."""
        home = self.root / earlier_file_name(name)
        home.mkdir(exist_ok=True)
        (home / "notes.txt").write_text(name)
        return home


@pytest.mark.parametrize("name", ["ana", "ana@example.org", "é1", ".ana", "a b", "日本"])
def test_a_home_of_an_earlier_release_is_found(tmp_path: Path, name: str) -> None:
    hub = Hub(tmp_path / "homes", "root", name)
    hub.earlier(name)
    for _ in range(2):
        assert (hub.home(name) / "notes.txt").read_text() == name
    assert not (hub.home(name) / "Welcome.ipynb").exists(), "it was made before"


@pytest.mark.parametrize(("first", "second"), [("é1", "\u0e91"), ("\u0e91", "é1"), ("@1", "Ё"), ("Ё", "@1")])
@pytest.mark.parametrize("starts", [(0, 1), (1, 0)])
def test_a_home_in_which_two_users_met_goes_to_the_older_one(
    tmp_path: Path, first: str, second: str, starts: tuple[int, int]
) -> None:
    hub = Hub(tmp_path / "homes", first, second)
    assert hub.earlier(first) == hub.earlier(second)
    homes = {(first, second)[at]: hub.home((first, second)[at]).resolve() for at in starts}
    assert homes[first] != homes[second]
    assert (homes[first] / "notes.txt").exists()
    assert not (homes[second] / "notes.txt").exists()


def test_a_home_is_not_taken_over_twice(tmp_path: Path) -> None:
    """The older user was deleted at the Hub meanwhile: the home is a deleted person's, not that of the next."""
    hub = Hub(tmp_path / "homes", "é1", "\u0e91")
    hub.earlier("é1")
    hub.home("é1")
    hub.db.delete(orm.User.find(hub.db, "é1"))
    hub.db.commit()
    assert hub.home("\u0e91").resolve() != hub.home("é1").resolve()


def test_a_home_whose_folder_was_deleted_is_made_anew(tmp_path: Path) -> None:
    hub = Hub(tmp_path / "homes", "a b")
    hub.earlier("a b")
    link = hub.home("a b")
    (link.resolve() / "notes.txt").unlink()
    link.resolve().rmdir()
    assert not hub.home("a b").is_symlink()


def test_the_log_of_a_server_that_an_earlier_release_started_is_read(tmp_path: Path) -> None:
    spawner = Hub(tmp_path, "ana").spawner("ana", "b")
    spawner.load_state({"pid": 0})
    (tmp_path / "ana-b.log").write_text("its last words\n")
    assert "its last words" in spawner.how_server_ended(1)


def test_the_log_of_a_server_is_found_after_a_restart_of_the_hub(tmp_path: Path) -> None:
    spawner = local(tmp_path, "")
    spawner.orm_spawner.name = "é"
    with spawner._open_log() as log:
        log.write(b"still here\n")
    spawner.pid = 1
    state = spawner.get_state()
    again = local(tmp_path / "again", "")
    again.logs = spawner.logs
    again.load_state(state)
    assert "still here" in again.how_server_ended(1)
