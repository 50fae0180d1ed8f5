"""What an empty database is seeded with: the policy, and a deployment of machines where one is named."""

from __future__ import annotations

from dataclasses import replace
from difflib import ndiff
from pathlib import Path

import pytest
from makeway_quota.application import current_policy
from makeway_quota.autoscale.document import read_deployment
from makeway_quota.policy import Document, read_policy
from makeway_quota.settings import load
from makeway_quota.store import Store, open_store
from makeway_quota.store.records import NewDecision
from makeway_quota.store.storage.sealed_secrets import SecretKeys, StoredCredential

CONFIG = Path(__file__).resolve().parents[2] / "hub_config"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")


def seeded(store: Store, deployment: Path | None) -> Document:
    settings = load(environ={"MAKEWAY_POLICY_FILE": str(CONFIG / "machines/policy.yaml")})
    settings = replace(settings, deployment_file=deployment)
    return current_policy(store, settings, 1.0, lambda document: {"gpu": 10})[0]


def test_the_demo_with_machines_has_the_sample_policy_and_a_pool_that_its_deployment_fills() -> None:
    texts = [(CONFIG / name).read_text(encoding="utf-8") for name in ("policy.yaml", "machines/policy.yaml")]
    changed = [line for line in ndiff(*(text.splitlines() for text in texts)) if line[0] in "-?"]
    assert not changed, "the demo's policy has all lines of the sample, with their comments"
    sample, demo = (read_policy(text, "policy.yaml") for text in texts)
    assert demo.pools[:-1] == sample.pools
    assert (demo.pools[-1].name, demo.pools[-1].kind) == ("cloud", "autoscaled")
    assert [item for item in demo.profiles if "cloud" not in item.pools] == list(sample.profiles)
    assert demo.policies == sample.policies, "one more line would add to the limit that %gpus and the panel show"
    text = (CONFIG / "machines/deployment.yaml").read_text(encoding="utf-8")
    deployment = read_deployment(text, pools=[pool.name for pool in demo.pools])
    assert len(deployment.types) == 2
    assert {machine_type.idle_timeout for machine_type in deployment.types} == {30.0}


def test_an_empty_database_gets_the_deployment_once(store: Store) -> None:
    seeded(store, CONFIG / "machines/deployment.yaml")
    seeded(store, CONFIG / "machines/deployment.yaml")
    [one] = store.deployments.list()
    assert (one.name, one.version, one.updated_by) == ("demo", 1, "makeway")


def test_a_database_with_a_policy_gets_none(store: Store) -> None:
    seeded(store, None)
    seeded(store, CONFIG / "machines/deployment.yaml")
    assert store.deployments.list() == []


@pytest.mark.parametrize("text", [None, "version: 1\nname: demo\nprovider: moon\n", "a: [\n"])
def test_a_faulty_file_is_told_and_nothing_is_seeded(store: Store, tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"(?s)mine\.yaml that Makeway starts with cannot be used: .*DEPLOYMENT_FILE"):
        seeded(store, file)
    assert store.policies.current() is None


@pytest.mark.parametrize("first", [True, False], ids=["a first start", "a later start"])
def test_a_start_disables_credentials_of_teams_that_the_policy_does_not_have_and_goes_on(
    store: Store, tmp_path: Path, first: bool
) -> None:
    """An earlier release kept those of removed teams enabled; a later team of the name must not get them."""
    keys = SecretKeys.of(None, tmp_path, shared=False)
    if not first:
        seeded(store, None)
    said = NewDecision("credential", None, None, "root", "credential", "is set", {})
    for team in ("rnd", "gone", ""):
        store.secrets.write(StoredCredential("git", "file", team, 1.0, "root"), {"content": team}, keys, said)
    assert seeded(store, None).teams >= {"rnd"}
    assert {one.team: one.disabled_at for one in store.secrets.list()} == {"": None, "rnd": None, "gone": 1.0}
    lines = len(store.decisions())
    seeded(store, None)
    assert len(store.decisions()) == lines, "the next start writes nothing"
