"""Work is filed under the name of the person it belongs to, whatever becomes of names at the Hub."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from makeway_quota.store import Store
from makeway_quota.store.records import Change, NewDecision, NewWorkload, Person, SubmissionKey
from sqlalchemy import Engine, event

NewJob = Callable[..., NewWorkload]
MADE = "2026-01-01T00:00:00.000001Z"
OTHER = "2026-02-02T00:00:00.000002Z"
THIRD = "2026-03-03T00:00:00.000003Z"
LATER = 1_800_000_000.0


def users(**identities: str) -> dict[str, Person]:
    """Users as the Hub lists them."""
    return {name: Person(name, identity, ("rnd",)) for name, identity in identities.items()}


def add(
    store: Store, job: NewJob, id: str, owner: str, *, ended: bool = False, at: float = LATER, **more: object
) -> None:
    """Submit a job with its line in the decision log, and a key; end it if wanted."""
    decision = NewDecision("submit", id, "rnd", owner, "job", f"{owner} submits {id}.")
    store.add_workload(job(id, owner=owner, **more), (), decision, None, SubmissionKey(f"key-{id}", owner, "d"), now=at)
    if ended:
        store.commit([Change(id, {"state": "succeeded"})], now=at)


def owners(store: Store) -> dict[str, str]:
    """Owner of every job, by id."""
    return {row.id: row.owner for row in store.workloads(limit=1000)[0]}


def decided(store: Store, owner: str) -> set[str | None]:
    """The jobs of the lines of the decision log that are an owner's."""
    return {line.workload for line in store.decisions(None, (), 100, None, owner=owner)} - {None}


def test_a_renamed_person_keeps_what_is_theirs(store: Store, job: NewJob) -> None:
    store.people.meet(users(ana=MADE, bo=OTHER), (), LATER)
    add(store, job, "live", "ana")
    add(store, job, "over", "ana", ended=True)
    add(store, job, "bos", "bo")
    heard: list[str] = []
    store.on_change(lambda rows: heard.extend(f"{row.id} {row.owner} {row.version}" for row in rows))
    assert store.people.meet(users(anna=MADE, bo=OTHER), ("ana",), LATER).moves == {"ana": "anna"}
    assert owners(store) == {"live": "anna", "over": "anna", "bos": "bo"}
    assert heard == ["live anna 2"]
    assert decided(store, "anna") == {"live", "over"}
    assert decided(store, "ana") == set()
    assert {event.owner for event in store.events(0, 100)} <= {"anna", "bo", None}
    assert [person.name for person in store.people.all()] == ["anna", "bo"]
    assert store.submitted([SubmissionKey("key-live", "anna", "d")]) is not None
    assert store.submitted([SubmissionKey("key-live", "ana", "d")]) is None


def test_a_new_person_with_a_deleted_persons_name_has_none_of_their_work(store: Store, job: NewJob) -> None:
    store.people.meet(users(ana=MADE), (), LATER)
    add(store, job, "live", "ana")
    add(store, job, "over", "ana", ended=True)
    store.people.meet(users(ana=OTHER), (), LATER)
    assert owners(store) == {"live": "ana/deleted-1", "over": "ana/deleted-1"}
    assert decided(store, "ana") == set()
    assert store.submitted([SubmissionKey("key-live", "ana", "d")]) is None
    add(store, job, "new", "ana")
    store.people.meet(users(ana=THIRD), (), LATER)
    assert owners(store)["new"] == "ana/deleted-2"
    assert owners(store)["live"] == "ana/deleted-1"
    assert {(p.name, p.present) for p in store.people.all()} == {
        ("ana", True),
        ("ana/deleted-1", False),
        ("ana/deleted-2", False),
    }


def test_names_that_are_swapped_take_their_work_along(store: Store, job: NewJob) -> None:
    store.people.meet(users(ana=MADE, bo=OTHER), (), LATER)
    add(store, job, "a", "ana")
    add(store, job, "b", "bo")
    add(store, job, "sa", "ana", kind="session")
    add(store, job, "sb", "bo", kind="session")
    store.people.meet(users(ana=OTHER, bo=MADE), (), LATER)
    assert owners(store) == {"a": "bo", "b": "ana", "sa": "bo", "sb": "ana"}


def test_a_name_taken_over_while_its_person_was_renamed(store: Store, job: NewJob) -> None:
    store.people.meet(users(ana=MADE), (), LATER)
    add(store, job, "a", "ana")
    store.people.meet(users(ana=OTHER, anna=MADE), (), LATER)
    assert owners(store) == {"a": "anna"}


def test_an_identity_that_two_users_share_moves_no_work_to_either(store: Store, job: NewJob) -> None:
    """A Hub's database that keeps whole seconds gives users made together the same time."""
    store.people.meet(users(ana=MADE, bo=MADE), (), LATER)
    add(store, job, "a", "ana")
    assert store.people.meet(users(bo=MADE), ("ana",), LATER).moves == {"ana": "ana/deleted-1"}
    assert owners(store) == {"a": "ana/deleted-1"}


def test_absence_that_is_not_certain_changes_nothing(store: Store, job: NewJob) -> None:
    store.people.meet(users(ana=MADE), (), LATER)
    add(store, job, "a", "ana")
    assert not store.people.meet(users(bo=OTHER), (), LATER).moves
    assert owners(store) == {"a": "ana"}


def test_who_comes_back_with_a_restored_hub_has_their_work_again(store: Store, job: NewJob) -> None:
    store.people.meet(users(ana=MADE), (), LATER)
    add(store, job, "a", "ana", ended=True)
    store.people.meet({}, ("ana",), LATER)
    assert owners(store) == {"a": "ana/deleted-1"}
    store.people.meet(users(ana=MADE), (), LATER)
    assert owners(store) == {"a": "ana"}
    assert [p.name for p in store.people.all()] == ["ana"]


def test_work_of_an_earlier_release_belongs_to_the_user_who_was_there_then(store: Store, job: NewJob) -> None:
    made = Person("ana", OTHER).since
    assert made is not None
    add(store, job, "before", "ana", ended=True, at=made - 3600)
    add(store, job, "live", "ana", at=made - 3600)
    add(store, job, "clocks", "ana", at=made - 30)
    add(store, job, "after", "ana", at=made + 1)
    store.people.meet(users(ana=OTHER), (), LATER)
    retired = "ana/deleted-1"
    assert owners(store) == {"before": retired, "live": retired, "clocks": "ana", "after": "ana"}
    assert decided(store, "ana") == {"clocks", "after"}
    store.people.meet(users(ana=OTHER), (), LATER)
    assert owners(store)["after"] == "ana"


def test_an_administrator_gives_work_back(store: Store, job: NewJob) -> None:
    store.people.meet(users(ana=MADE), (), LATER)
    add(store, job, "a", "ana")
    store.people.meet(users(ana=OTHER), (), LATER)
    assert store.people.give("ana/deleted-1", "ana", "root", LATER) == 1
    assert owners(store) == {"a": "ana"}
    assert [p.name for p in store.people.all()] == ["ana"]


def test_sessions_of_one_server_never_meet_under_one_name(store: Store, job: NewJob) -> None:
    store.people.meet(users(ana=MADE), (), LATER)
    add(store, job, "old", "ana", kind="session")
    add(store, job, "new", "anna", kind="session")
    store.people.meet(users(anna=MADE), ("ana",), LATER)
    assert owners(store) == {"old": "ana", "new": "anna"}


def test_many_users_who_are_deleted_cost_each_table_one_look(store: Store, job: NewJob) -> None:
    names = [f"user-{number}" for number in range(30)]
    everyone = users(**{name: f"2026-01-01T00:00:00.{at:06}Z" for at, name in enumerate(names)})
    store.people.meet(everyone, (), LATER)
    for name in names[:3]:
        add(store, job, f"of-{name}", name, ended=True)
    looks: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE ") and "owner=" in statement.replace(" ", ""):
            looks.append(statement.split()[1])

    event.listen(Engine, "before_cursor_execute", note)
    try:
        moves = store.people.meet({}, names, LATER + 1).moves
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert len(moves) == 30
    assert sorted(looks) == ["decisions", "events", "removals", "workloads"]
    assert owners(store) == {f"of-{name}": f"{name}/deleted-1" for name in names[:3]}


def test_a_chain_of_renames_meets_a_server_of_an_unknown_owner(store: Store, job: NewJob) -> None:
    """A is called B now, B is called C, and there is a session of a C whom the Hub does not tell of."""
    store.people.meet(users(a=MADE, b=OTHER), (), LATER)
    for owner in ("a", "b", "c"):
        add(store, job, f"s-{owner}", owner, kind="session")
        add(store, job, f"j-{owner}", owner)
    assert store.people.meet(users(b=MADE, c=OTHER), ("a",), LATER).moves == {"a": "b", "b": "c"}
    assert owners(store) == {
        "s-a": "b",
        "j-a": "b",
        "s-b": "b/deleted-s-b",
        "j-b": "c",
        "s-c": "c",
        "j-c": "c",
    }


@pytest.mark.parametrize("seed", range(12))
def test_names_that_change_hands_at_random_lose_and_mix_up_nothing(store: Store, job: NewJob, seed: int) -> None:
    """Chains, cycles, deletions and reuse of names at once, each person with a session of the same server name."""
    rng = random.Random(seed)
    names = ["a", "b", "c", "d", "e"]
    identity = {n: f"2026-01-01T00:00:00.{n:06}Z" for n in range(40)}
    at = dict(zip(rng.sample(names, rng.randint(2, 5)), range(5), strict=False))  # name to person
    store.people.meet(users(**{name: identity[person] for name, person in at.items()}), (), LATER)
    mine = list(at.values())
    for name, person in at.items():
        add(store, job, f"s{person}", name, kind="session")
        add(store, job, f"j{person}", name)
        add(store, job, f"e{person}", name, ended=True)
    for name in set(names) - at.keys():  # of an earlier release, whose owner nothing is known of
        if rng.random() < 0.4:
            add(store, job, f"s{name}", name, kind="session")
    fresh = iter(range(10, 40))
    for _ in range(4):
        people = [person for person in at.values() if rng.random() < 0.8]
        people = [*people, *(next(fresh) for _ in range(rng.randint(0, 1)))][: len(names)]
        gone = set(at)
        at = dict(zip(rng.sample(names, len(people)), people, strict=True))
        listed = users(**{name: identity[person] for name, person in at.items()})
        store.people.meet(listed, gone - listed.keys(), LATER)
        owner_of = owners(store)
        where = {person: name for name, person in at.items()}
        for person in mine:
            for id in (f"j{person}", f"e{person}"):
                assert owner_of[id] == where[person] if person in where else "/deleted-" in owner_of[id]
            session = owner_of[f"s{person}"]
            assert session == where.get(person) or session not in at, "no other person's"
