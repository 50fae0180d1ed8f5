"""Credentials in the database: one that cannot be opened, a key that several make at once, and what replaces what."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
from autoscale.fleet import machine
from cryptography.fernet import Fernet
from makeway_quota.autoscale.step import MachineChanges
from makeway_quota.store import Store, open_store
from makeway_quota.store.records import NewDecision
from makeway_quota.store.storage.sealed_secrets import (
    KEY_FILE,
    CredentialInUse,
    CredentialNameTaken,
    PolicyChanged,
    SecretKeys,
    SecretsLocked,
    StoredCredential,
)

from .machine_rows import end, launch, row_of

SAID = NewDecision("credential", None, None, "root", "credential", "root set a credential.", {})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    result = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    yield result
    result.close()


def write(store: Store, keys: SecretKeys, name: str, kind: str = "cloud", team: str = "", value: str = "v") -> None:
    store.secrets.write(StoredCredential(name, kind, team, 1.0, "root"), {"access_key_id": value}, keys, SAID)


def test_a_credential_of_a_lost_key_holds_up_no_other_deployment(store: Store, tmp_path: Path) -> None:
    keys = SecretKeys(tmp_path / "keys", made=True)
    write(store, keys, "old")
    keys.path.write_bytes(Fernet.generate_key())
    write(store, keys, "new")
    assert store.secrets.cloud(keys, "new") == {"access_key_id": "v"}
    assert store.secrets.cloud(keys, "without") == {}
    with pytest.raises(SecretsLocked, match="opens the credential old"):
        store.secrets.cloud(keys, "old")


def test_of_keys_that_are_made_at_once_one_counts_and_all_seal_with_it(tmp_path: Path) -> None:
    for number in range(20):
        folder, begin = tmp_path / str(number), Barrier(4)
        folder.mkdir()

        def seal(folder: Path = folder, begin: Barrier = begin) -> bytes:
            keys = SecretKeys.of(None, folder, shared=False)
            begin.wait()
            return keys.fernet(make=True).encrypt(b"value")

        with ThreadPoolExecutor(4) as threads:
            sealed = [each.result() for each in [threads.submit(seal) for _ in range(4)]]
        opened = SecretKeys.of(None, folder, shared=False).fernet()
        assert [opened.decrypt(token) for token in sealed] == [b"value"] * 4
        assert [path.name for path in folder.iterdir()] == [KEY_FILE]


def test_a_key_that_cannot_be_made_is_a_refusal_in_words(tmp_path: Path) -> None:
    with pytest.raises(SecretsLocked, match=r"cannot be made at .*: No such file or directory"):
        SecretKeys(tmp_path / "missing" / "keys", made=True).fernet(make=True)


def values_of(store: Store, keys: SecretKeys, team: str) -> dict[str, str]:
    """Return what jobs of a team get, by name."""
    return {one.name: values["access_key_id"] for one, values in store.secrets.opened(keys, ("file", "git"), team)}


def test_teams_share_a_name_and_each_gets_its_own_value_before_that_of_all_teams(store: Store, tmp_path: Path) -> None:
    keys = SecretKeys(tmp_path / "keys", made=True)
    write(store, keys, "storage", "file", "rnd", "of rnd")
    write(store, keys, "storage", "git", "sales", "of sales")
    write(store, keys, "storage", "file", "", "of all")
    write(store, keys, "other", "file", "", "other")
    assert values_of(store, keys, "rnd") == {"storage": "of rnd", "other": "other"}
    assert values_of(store, keys, "sales") == {"storage": "of sales", "other": "other"}
    assert values_of(store, keys, "ops") == {"storage": "of all", "other": "other"} == values_of(store, keys, "")
    assert [(one.name, one.team) for one in store.secrets.list()] == [
        ("other", ""),
        ("storage", ""),
        ("storage", "rnd"),
        ("storage", "sales"),
    ]
    assert store.secrets.reseal(keys, 2.0, lambda many: replace(SAID, message=f"{many} were sealed.")) == 4
    assert [line.message for line in store.decisions()][:1] == ["4 were sealed."]
    assert store.secrets.delete("rnd", "storage", 2.0, SAID)
    assert not store.secrets.delete("rnd", "storage", 2.0, SAID)
    assert values_of(store, keys, "rnd") == {"storage": "of all", "other": "other"}
    assert values_of(store, keys, "sales")["storage"] == "of sales"


@pytest.mark.covers("F73")
def test_the_credential_of_a_deployment_stays_while_it_has_machines(store: Store, tmp_path: Path) -> None:
    """Else its provider would log in with those of the service's environment, and find none of them."""
    keys = SecretKeys(tmp_path / "keys", made=True)
    term = launch(store, "m-1", "m-2")
    write(store, keys, "cloud")
    with pytest.raises(CredentialInUse, match="deployment cloud logs in with this credential, and has 2 machines that"):
        store.secrets.delete("", "cloud", 2.0, SAID)
    assert store.secrets.cloud(keys, "cloud") == {"access_key_id": "v"}
    write(store, keys, "cloud", "file", "rnd")
    assert store.secrets.delete("rnd", "cloud", 2.0, SAID), "one of a team is another one"
    end(store, term, "m-1", "m-2")
    assert store.secrets.delete("", "cloud", 2.0, SAID)
    assert store.secrets.cloud(keys, "cloud") == {}


def test_no_machine_is_launched_by_a_credential_that_was_deleted_or_replaced(store: Store, tmp_path: Path) -> None:
    """The leader hears of a change only after it: what it launched by the one before could not be ended."""
    keys = SecretKeys(tmp_path / "keys", made=True)
    term = launch(store, "m-1")

    def commits(id: str, set_at: float | None) -> bool:
        changes = MachineChanges((machine(id=id, term=term),), credential_set_at=set_at)
        return store.machines.commit("cloud", term, changes)

    assert not commits("m-2", 1.0)
    write(store, keys, "cloud")
    assert not commits("m-2", None)
    assert commits("m-2", 1.0)
    changed = replace(row_of(store, "m-2"), state="booting")
    assert store.machines.commit("cloud", term, MachineChanges(changed=(changed,))), "answers hold with any"


def test_a_value_is_replaced_only_under_its_own_kind_and_team(store: Store, tmp_path: Path) -> None:
    """A new value for a team, set without naming the team, would go to the jobs of all teams."""
    keys = SecretKeys(tmp_path / "keys", made=True)
    write(store, keys, "storage", "file", "rnd")
    with pytest.raises(CredentialNameTaken, match="storage of team rnd is of the kind file: name this kind"):
        write(store, keys, "storage", "git", "rnd", "other")
    saved = StoredCredential("storage", "file", "", 1.0, "root")
    with pytest.raises(CredentialNameTaken, match=r"a credential storage of rnd: name the team .* \(--all-teams\)"):
        store.secrets.write(saved, {"access_key_id": "other"}, keys, SAID, alone=True)
    write(store, keys, "storage", "file", "rnd", "new")
    assert values_of(store, keys, "rnd") == {"storage": "new"}
    assert values_of(store, keys, "sales") == {}


def test_of_a_lost_key_only_the_credentials_that_a_team_gets_hold_up_its_jobs(store: Store, tmp_path: Path) -> None:
    keys = SecretKeys(tmp_path / "keys", made=True)
    write(store, keys, "storage", "file", "")
    keys.path.write_bytes(Fernet.generate_key())
    write(store, keys, "storage", "file", "rnd", "new")
    assert values_of(store, keys, "rnd") == {"storage": "new"}
    with pytest.raises(SecretsLocked, match="opens the credential storage:"):
        values_of(store, keys, "sales")


def test_a_cloud_logs_in_with_no_teams_credential_of_the_same_name(store: Store, tmp_path: Path) -> None:
    keys = SecretKeys(tmp_path / "keys", made=True)
    write(store, keys, "cloud", "cloud", "", "of the deployment")
    write(store, keys, "cloud", "file", "rnd", "of rnd")
    assert store.secrets.cloud(keys, "cloud") == {"access_key_id": "of the deployment"}
    assert store.secrets.cloud_times() == {"cloud": 1.0}
    assert values_of(store, keys, "rnd") == {"cloud": "of rnd"}


def add_policy(store: Store, *teams: str) -> int:
    return store.policies.add(f"teams: {teams}", "root", "", None, 2.0, teams=teams).version


def test_credentials_of_a_team_that_leaves_the_policy_are_disabled_until_they_are_enabled_or_set_anew(
    store: Store, tmp_path: Path
) -> None:
    keys = SecretKeys(tmp_path / "keys", made=True)
    for name, team in (("git", "rnd"), ("storage", "rnd"), ("storage", ""), ("storage", "sales")):
        write(store, keys, name, "file", team, f"of {team or 'all'}")
    first = add_policy(store, "rnd", "sales")
    assert values_of(store, keys, "rnd") == {"git": "of rnd", "storage": "of rnd"}
    gone = add_policy(store, "sales")
    assert values_of(store, keys, "rnd") == {"storage": "of all"}
    back = add_policy(store, "rnd", "sales")
    assert values_of(store, keys, "rnd") == {"storage": "of all"}, "the new team gets none of the old one"
    assert values_of(store, keys, "sales") == {"storage": "of sales"}
    assert {(one.name, one.team) for one in store.secrets.list() if one.disabled_at == 2.0} == {
        ("git", "rnd"),
        ("storage", "rnd"),
    }
    told = [one for one in store.decisions() if one.verb == "credential" and "disabled" in one.message]
    expected = f"The credentials git and storage of rnd are disabled: policy version {gone} does not have the team."
    assert [(one.team, one.owner, one.message) for one in told] == [("rnd", "root", expected)]
    with pytest.raises(PolicyChanged, match=f"Policy version {back} came into force meanwhile"):
        store.secrets.enable("rnd", "git", 3.0, SAID, first)
    assert store.secrets.enable("rnd", "git", 3.0, SAID, back)
    assert not store.secrets.enable("rnd", "git", 3.0, SAID, back)
    write(store, keys, "storage", "file", "rnd", "of the new one")
    assert values_of(store, keys, "rnd") == {"git": "of rnd", "storage": "of the new one"}


def test_a_credential_is_not_set_for_a_team_that_just_left_the_policy(store: Store, tmp_path: Path) -> None:
    keys = SecretKeys(tmp_path / "keys", made=True)
    looked_up = add_policy(store, "rnd")
    add_policy(store, "sales")
    saved = StoredCredential("git", "file", "rnd", 1.0, "root")
    with pytest.raises(PolicyChanged):
        store.secrets.write(saved, {"access_key_id": "late"}, keys, SAID, policy=looked_up)
    assert store.secrets.list() == []


def test_a_key_that_is_lost_holds_up_no_job_with_disabled_credentials(store: Store, tmp_path: Path) -> None:
    keys = SecretKeys(tmp_path / "keys", made=True)
    write(store, keys, "git", "file", "rnd")
    add_policy(store, "sales")
    keys.path.unlink()
    assert values_of(store, keys, "rnd") == {}
