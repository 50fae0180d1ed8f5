"""A user keeps the claim of their home over upgrades of KubeSpawner, refused starts and restarts of the Hub."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from makeway_spawner.kube import MakewayKubeSpawner
from makeway_spawner.refusal import Refused
from spawner.kube_fake import KubeFake, serving, spawner_for
from spawner.quota_fake import URL, QuotaFake

EMAIL = "ana@site.test"
OLD, NEW = "claim-ana-40site-2etest", "claim-ana-site-test---"
"""The names of her claim by KubeSpawner 6, and how that of KubeSpawner 7 begins."""
FROM_6 = {"pod_name": "jupyter-ana-40site-2etest", "namespace": "default", "dns_name": "jupyter-ana-40site-2etest"}
"""What KubeSpawner 6 has stored of a server that was stopped."""
STORED_7: dict[str, Any] = {**FROM_6, "kubespawner_version": "7.1.0"}
"""What an earlier Makeway made of that at a refused start: a version, and no name."""


@pytest.fixture
async def kube(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeFake]:
    async with serving(monkeypatch) as fake:
        yield fake


def claim(name: str, user: str | None = EMAIL) -> dict[str, Any]:
    annotations = {"hub.jupyter.org/username": user} if user else {}
    return {"metadata": {"name": name, "annotations": annotations}}


def spawner_of(state: dict[str, Any], user: str = EMAIL, **traits: Any) -> MakewayKubeSpawner:
    named = {"storage_pvc_ensure": True, "makeway_api_url": URL, "makeway_token": "t", "renew_seconds": 0.1, **traits}
    spawner = spawner_for(user, state, **named)
    spawner.user_options = {"profile": "cpu"}
    return spawner


async def until(true: Callable[[], object]) -> None:
    """Wait until `true` holds, 10 seconds at most."""
    async with asyncio.timeout(10):
        for _ in iter(lambda: bool(true()), True):
            await asyncio.sleep(0.01)


async def refused(spawner: MakewayKubeSpawner) -> dict[str, Any]:
    """Try a start that is refused, and return the state that the Hub stores, as its `User.stop` does."""
    with pytest.raises(Refused):
        await spawner.run_pre_spawn_hook()
    await spawner.run_post_stop_hook()
    spawner.clear_state()
    state: dict[str, Any] = spawner.get_state()
    return state


async def claim_of_a_start(kube: KubeFake, spawner: MakewayKubeSpawner) -> tuple[str, dict[str, Any]]:
    """Start until the pod is created; return the claim that it uses, and the state that is stored by then."""
    await spawner.run_pre_spawn_hook()
    starting = asyncio.ensure_future(spawner.start())
    await until(lambda: kube.objects["pods"] or starting.done())
    if starting.done():
        await starting
    starting.cancel()
    await asyncio.wait([starting])
    await spawner._release()
    for name in list(kube.objects["pods"]):
        kube.remove("pods", name)
    return spawner.pvc_name, spawner.orm_spawner.state


@pytest.mark.parametrize("state", [FROM_6, STORED_7, {"makeway_end": "It ended."} | FROM_6])
@pytest.mark.parametrize("refusals", [0, 1, 2])
async def test_a_home_of_kubespawner_6_is_found_after_refused_starts(
    kube: KubeFake, quota: QuotaFake, state: dict[str, Any], refusals: int
) -> None:
    kube.add("persistentvolumeclaims", claim(OLD))
    quota.refusal = (409, "no_quota", "The team has no GPU left.")
    for _ in range(refusals):
        state = await refused(spawner_of(state))  # a new object: the Hub was restarted in between
    quota.refusal = None
    home, state = await claim_of_a_start(kube, spawner_of(state))
    assert home == OLD
    assert list(kube.objects["persistentvolumeclaims"]) == [OLD], "no second, empty home"
    assert state["pvc_name"] == OLD
    again, _ = await claim_of_a_start(kube, spawner_of(state))
    assert again == OLD


async def test_a_home_is_found_after_a_hub_was_killed_while_the_lease_was_pending(
    kube: KubeFake, quota: QuotaFake
) -> None:
    kube.add("persistentvolumeclaims", claim(OLD))
    quota.steps = [("hold", None)]
    spawner = spawner_of(FROM_6)
    waiting = asyncio.ensure_future(spawner.run_pre_spawn_hook())
    await until(lambda: "makeway" in spawner.orm_spawner.state)
    stored = dict(spawner.orm_spawner.state)  # what a killed Hub leaves
    waiting.cancel()
    await asyncio.wait([waiting])
    quota.steps = []
    home, _ = await claim_of_a_start(kube, spawner_of(stored))
    assert home == OLD


async def test_a_new_user_gets_a_claim_of_the_new_name(kube: KubeFake, quota: QuotaFake) -> None:
    quota.refusal = (409, "no_quota", "The team has no GPU left.")
    state = await refused(spawner_of({}))
    quota.refusal = None
    home, _ = await claim_of_a_start(kube, spawner_of(state))
    assert home.startswith(NEW)
    assert list(kube.objects["persistentvolumeclaims"]) == [home]


async def test_a_claim_of_the_new_name_comes_before_one_of_the_old(kube: KubeFake, quota: QuotaFake) -> None:
    new = spawner_of({}).pvc_name
    kube.add("persistentvolumeclaims", claim(OLD))
    kube.add("persistentvolumeclaims", claim(new))
    home, _ = await claim_of_a_start(kube, spawner_of(STORED_7))
    assert home == new


async def test_the_stored_name_counts_whatever_the_template_says_now(kube: KubeFake, quota: QuotaFake) -> None:
    kube.add("persistentvolumeclaims", claim("volume-of-ana"))
    state = {**STORED_7, "pvc_name": "volume-of-ana"}
    quota.refusal = (409, "no_quota", "The team has no GPU left.")
    state = await refused(spawner_of(state, pvc_name_template="other-{user_server}"))
    quota.refusal = None
    home, _ = await claim_of_a_start(kube, spawner_of(state, pvc_name_template="other-{user_server}"))
    assert home == "volume-of-ana"


@pytest.mark.parametrize("state", [FROM_6, STORED_7])
async def test_an_old_name_that_is_another_users_claim_is_not_taken(
    kube: KubeFake, quota: QuotaFake, state: dict[str, Any]
) -> None:
    """KubeSpawner 6 wrote a-b as a-2db, which KubeSpawner 7 leaves to a user of that very name."""
    kube.add("persistentvolumeclaims", claim("claim-a-2db", "a-2db"))
    home, _ = await claim_of_a_start(kube, spawner_of(dict(state), user="a-b"))
    assert home == "claim-a-b"


async def test_a_claim_that_a_site_made_by_hand_is_taken(kube: KubeFake, quota: QuotaFake) -> None:
    kube.add("persistentvolumeclaims", claim(OLD, None))
    home, _ = await claim_of_a_start(kube, spawner_of(FROM_6))
    assert home == OLD


async def test_a_claim_of_another_user_is_refused_in_words(kube: KubeFake, quota: QuotaFake) -> None:
    kube.add("persistentvolumeclaims", claim("claim-a-2db", "a-b"))  # of KubeSpawner 6
    spawner = spawner_of({}, user="a-2db")
    with pytest.raises(Refused, match=r"claim-a-2db .* belongs to the user a-b"):
        await claim_of_a_start(kube, spawner)
    assert not kube.objects["pods"]
    assert "pvc_name" not in spawner.get_state()


async def test_a_claim_that_users_share_is_taken_by_each(kube: KubeFake, quota: QuotaFake) -> None:
    kube.add("persistentvolumeclaims", claim("homes", "bo"))
    home, _ = await claim_of_a_start(kube, spawner_of({}, pvc_name_template="homes"))
    assert home == "homes"


async def test_an_account_that_may_not_read_claims_makes_no_second_home(kube: KubeFake, quota: QuotaFake) -> None:
    message = 'User "hub" cannot get resource "persistentvolumeclaims" in the namespace "default"'
    kube.refuse = lambda method, path: (403, message) if (method, path) == ("GET", "persistentvolumeclaims") else None
    kube.add("persistentvolumeclaims", claim(OLD))
    with pytest.raises(Refused, match="has to give the Hub's account this right"):
        await claim_of_a_start(kube, spawner_of(FROM_6))
    assert list(kube.objects["persistentvolumeclaims"]) == [OLD]
    home, state = await claim_of_a_start(kube, spawner_of({}, user="bo"))
    again, _ = await claim_of_a_start(kube, spawner_of(state, user="bo"))
    assert home == again == "claim-bo"


async def test_a_claim_that_was_deleted_is_made_anew(kube: KubeFake, quota: QuotaFake) -> None:
    home, state = await claim_of_a_start(kube, spawner_of({}))
    kube.remove("persistentvolumeclaims", home)
    again, _ = await claim_of_a_start(kube, spawner_of(state))
    assert again == home
    assert list(kube.objects["persistentvolumeclaims"]) == [home]


async def test_a_home_of_kubespawner_6_is_found_once_its_empty_successor_is_deleted(
    kube: KubeFake, quota: QuotaFake
) -> None:
    kube.add("persistentvolumeclaims", claim(OLD))
    home, _ = await claim_of_a_start(kube, spawner_of({**STORED_7, "pvc_name": spawner_of({}).pvc_name}))
    assert home == OLD


async def test_the_namespace_and_the_pod_of_kubespawner_6_stay_while_the_pod_runs(kube: KubeFake) -> None:
    spawner = spawner_of({**FROM_6, "namespace": "default"})
    state = spawner.get_state()
    assert (state["pod_name"], state["dns_name"]) == (FROM_6["pod_name"], FROM_6["dns_name"])
    assert state["namespace"] == "default"
