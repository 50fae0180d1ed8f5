"""The Secrets with the workers' first tokens: one for the attempts that start together."""

from __future__ import annotations

import asyncio

import pytest
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, ApiUnreachable, Object
from makeway_quota.backends.kubernetes.pods.token_secrets import MAX_TOKENS, TokenSecrets


class Cluster:
    """The Secrets that were created, and what the API server answers in their place."""

    def __init__(self) -> None:
        self.created: list[Object] = []
        self.answer: Exception | None = None

    async def create(self, body: Object) -> Object:
        await asyncio.sleep(0)
        if self.answer is not None:
            raise self.answer
        self.created.append(body)
        return body

    def tokens(self) -> list[set[str]]:
        return [set(body["stringData"]) for body in self.created]


def pod(job: str) -> Object:
    return {"metadata": {"name": f"makeway-{job}-1-0", "uid": f"u-{job}"}}


def owners(body: Object) -> list[str]:
    """Return the UIDs of the pods that a Secret goes with."""
    return [one["uid"] for one in body["metadata"]["ownerReferences"]]


async def start(secrets: TokenSecrets, job: str, *, created: bool = True, after: asyncio.Event | None = None) -> None:
    """Start a job of one worker, whose pod is created or refused."""
    part = secrets.for_start((job, 1), [f"token of {job}"])
    try:
        await (after.wait() if after is not None else asyncio.sleep(0))
        if created:
            await part.written([pod(job)])
            secrets.done((job, 1))
    finally:
        part.abandon()


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def secrets(cluster: Cluster) -> TokenSecrets:
    return TokenSecrets(cluster.create, "here")


async def test_attempts_that_start_together_share_a_secret_that_goes_with_the_last(
    cluster: Cluster, secrets: TokenSecrets
) -> None:
    await asyncio.gather(*(start(secrets, f"j{number}") for number in range(5)))
    (body,) = cluster.created
    assert body["stringData"] == {f"j{number}.1.0": f"token of j{number}" for number in range(5)}
    assert owners(body) == [f"u-j{number}" for number in range(5)]
    await start(secrets, "later")
    assert cluster.tokens()[1] == {"later.1.0"}
    assert len({body["metadata"]["name"] for body in cluster.created}) == 2


async def test_it_is_written_when_the_slowest_pod_is_there_and_without_those_that_are_refused(
    cluster: Cluster, secrets: TokenSecrets
) -> None:
    slow = asyncio.Event()
    starts = [
        asyncio.create_task(start(secrets, "quick")),
        asyncio.create_task(start(secrets, "refused", created=False)),
        asyncio.create_task(start(secrets, "slow", after=slow)),
    ]
    await asyncio.sleep(0.01)
    assert cluster.created == []
    slow.set()
    await asyncio.gather(*starts)
    (body,) = cluster.created
    assert owners(body) == ["u-quick", "u-slow"]
    assert set(body["stringData"]) == {"quick.1.0", "slow.1.0"}, "a pod that it does not go with never runs"


async def test_a_start_that_is_cancelled_holds_up_no_other(cluster: Cluster, secrets: TokenSecrets) -> None:
    never = asyncio.Event()
    cancelled = asyncio.create_task(start(secrets, "cancelled", after=never))
    other = asyncio.create_task(start(secrets, "other"))
    await asyncio.sleep(0.01)
    cancelled.cancel()
    await other
    assert len(cluster.created) == 1


async def test_after_a_lost_answer_the_same_secret_is_written_for_all_of_them(
    cluster: Cluster, secrets: TokenSecrets
) -> None:
    cluster.answer = ApiUnreachable("no answer")
    result = await asyncio.gather(*(start(secrets, job) for job in ("j1", "j2")), return_exceptions=True)
    assert [type(one) for one in result] == [ApiUnreachable, ApiUnreachable]
    cluster.answer = None
    await start(secrets, "j1")
    cluster.answer = ApiStatusError(409, "AlreadyExists", "it exists")
    await start(secrets, "j2")
    assert cluster.tokens() == [{"j1.1.0", "j2.1.0"}], "the pods of both name it"


async def test_a_secret_goes_with_all_pods_of_a_gang(cluster: Cluster, secrets: TokenSecrets) -> None:
    part = secrets.for_start(("j1", 1), ["token"] * 3)
    await part.written([pod("j1"), pod("j2"), pod("j3")])
    assert owners(cluster.created[0]) == ["u-j1", "u-j2", "u-j3"]


async def test_a_start_that_is_repeated_gets_a_secret_that_can_still_be_written_for_it(
    cluster: Cluster, secrets: TokenSecrets
) -> None:
    await asyncio.gather(start(secrets, "j1"), start(secrets, "j2", created=False))
    first = cluster.created[0]["metadata"]["name"]
    part = secrets.for_start(("j2", 1), ["token"])
    assert part.before == first, "pods that name it are made anew"
    await part.written([pod("j2")])
    assert part.secret.name == cluster.created[1]["metadata"]["name"] != first
    assert [owners(body) for body in cluster.created] == [["u-j1"], ["u-j2"]]

    await start(secrets, "j3", created=False)
    part = secrets.for_start(("j3", 1), ["token"])
    await asyncio.gather(part.written([pod("j3")]))
    assert part.before is None, "it was not written before"
    assert owners(cluster.created[2]) == ["u-j3"]


async def test_what_may_be_written_is_not_changed(cluster: Cluster, secrets: TokenSecrets) -> None:
    cluster.answer = ApiUnreachable("no answer")
    with pytest.raises(ApiUnreachable):
        await start(secrets, "j1")
    other = secrets.for_start(("j2", 1), ["token"])
    part = secrets.for_start(("j1", 1), ["token"])
    assert part.secret is not other.secret
    cluster.answer = None
    await part.written([pod("j1")])
    assert cluster.tokens() == [{"j1.1.0"}]


async def test_a_refusal_is_that_of_every_start(cluster: Cluster, secrets: TokenSecrets) -> None:
    cluster.answer = ApiStatusError(403, "Forbidden", "exceeded quota")
    result = await asyncio.gather(*(start(secrets, job) for job in ("j1", "j2")), return_exceptions=True)
    assert [str(one) for one in result] == [str(cluster.answer)] * 2


async def test_many_tokens_are_several_secrets(cluster: Cluster, secrets: TokenSecrets) -> None:
    async def gang(job: str) -> None:
        part = secrets.for_start((job, 1), ["token"] * MAX_TOKENS)
        await part.written([pod(job)])

    await asyncio.gather(gang("j1"), gang("j2"))
    assert [len(keys) for keys in cluster.tokens()] == [MAX_TOKENS, MAX_TOKENS]
