"""Profiles offer images: a session and a job get the one that was chosen, or the default one."""

from __future__ import annotations

from pathlib import Path

import pytest
from makeway_api.errors import MakewayError
from makeway_api.models import JobRequest, PolicyRequest
from running import PEOPLE, SAMPLE, running

IMAGES = """\
    images:
      - {name: torch, title: PyTorch, description: With CUDA, image: "site/torch:2"}
      - {name: plain, image: "site/plain:1", default: true}
"""
POLICY = SAMPLE.read_text(encoding="utf-8").replace("  - name: gpu1\n", f"  - name: gpu1\n{IMAGES}")


async def test_a_session_gets_the_image_that_was_chosen_by_name_or_reference(tmp_path: Path) -> None:
    async with running(tmp_path, POLICY) as run:
        result = {}
        for server, image in (("", None), ("two", "torch")):
            asked = await run.session("ana", "gpu1", "rnd", server, image=image)
            result[server] = (await run.granted(asked.id)).image
        assert result == {"": "site/plain:1", "two": "site/torch:2"}
        again = await run.session("ana", "gpu1", "rnd", "two", image="site/torch:2")
        assert again.image == "site/torch:2"
        assert (await run.session("bo", "gpu2", "devops")).image is None, "the profile names none"


async def test_offers_list_the_images_of_each_profile(tmp_path: Path) -> None:
    async with running(tmp_path, POLICY) as run:
        table = await run.client("spawner").offers(user="ana")
        (profile,) = [profile for profile in table.profiles if profile.name == "gpu1"]
        assert [(image.name, image.title, image.default) for image in profile.images] == [
            ("torch", "PyTorch", False),
            ("plain", "plain", True),
        ]
        assert profile.image == "site/plain:1"


@pytest.mark.covers("N02")
async def test_an_image_that_is_not_offered_is_refused_with_those_that_are(tmp_path: Path) -> None:
    async with running(tmp_path, POLICY) as run:
        with pytest.raises(MakewayError, match="1 GPU offers no image “evil”, but torch and plain") as refused:
            await run.session("ana", "gpu1", "rnd", image="evil")
        assert (refused.value.status, refused.value.code) == (422, "unknown_image")
        with pytest.raises(MakewayError, match="offers no choice of images"):
            await run.submit("ana", profile="gpu2", image="torch")
        with pytest.raises(MakewayError, match="offers no image “evil”"):
            await run.submit("ana", profile="gpu1", image="evil", dry_run=True)


async def test_a_job_gets_the_image_of_the_notebook_that_it_is_submitted_from(tmp_path: Path) -> None:
    kubernetes = {"MAKEWAY_BACKEND": "kubernetes", "MAKEWAY_KUBE_IMAGE": "site/base:1"}
    two = IMAGES.replace("site/torch:2", "site/jax:1").replace("torch", "jax")
    policy = POLICY.replace("  - name: gpu2\n", f"  - name: gpu2\n{two}")
    async with running(tmp_path, policy, **kubernetes) as run:
        for server, image in (("", "plain"), ("two", "torch")):
            session = await run.session("ana", "gpu1", "rnd", server, image=image)
            await run.granted(session.id)
        job = await run.submit("ana", profile="gpu1", server="two")
        assert (job.image, job.notes) == (
            "site/torch:2",
            ["The job runs in the image site/torch:2 (that of the notebook)."],
        )
        assert (await run.submit("ana", profile="gpu1", server="")).image == "site/plain:1"
        assert (await run.submit("ana", profile="gpu1", server="two", image="plain")).image == "site/plain:1"
        dry = await run.client("ana").dry_run(JobRequest(command=["x"], profile="gpu2", server="two"))
        assert (dry.image, dry.notes) == (
            "site/plain:1",
            [
                "The job runs in the image site/plain:1 (the default of 2 GPUs; this profile does not offer the "
                "notebook's image site/torch:2)."
            ],
        )
        unnamed = await run.submit("ana", profile="gpu3", server="two")
        assert unnamed.image == "site/torch:2", "the profile names no image"
        outside = await run.submit("ana", profile="gpu3")
        assert (outside.image, outside.notes) == (
            None,
            ["The job runs in the image site/base:1 (the default image of jobs)."],
        )


async def test_the_image_of_another_ones_or_an_ended_session_is_not_taken(tmp_path: Path) -> None:
    async with running(tmp_path, POLICY) as run:
        session = await run.session("ana", "gpu1", "rnd", "two", image="torch")
        await run.granted(session.id)
        assert (await run.submit("lea", profile="gpu1", team="rnd", server="two")).image == "site/plain:1"
        assert (await run.submit("ana", profile="gpu1", server="two")).image == "site/torch:2"
        await run.client("spawner").release(session.id, "stopped")
        job = await run.submit("ana", profile="gpu1", server="two")
        assert (job.image, job.notes) == ("site/plain:1", []), "jobs here are no pods"


async def test_a_job_gets_its_image_and_a_clone_the_same_while_its_profile_offers_it(tmp_path: Path) -> None:
    async with running(tmp_path, POLICY) as run:
        job = await run.submit("ana", profile="gpu1", image="torch")
        assert job.image == "site/torch:2"
        assert (await run.submit("ana", profile="gpu1")).image == "site/plain:1"
        client = run.client("ana")
        assert [one.image for one in await client.clone(job.id)] == ["site/torch:2"]
        assert [one.image for one in await client.clone(job.id, 1, {"image": "plain"})] == ["site/plain:1"]
        assert [one.image for one in await client.clone(job.id, 1, {"profile": "gpu2"})] == [None]
        policies, newer = run.service.services.policies, POLICY.replace("site/torch:2", "site/torch:3")
        current = await policies.current(PEOPLE["root"])
        await policies.apply(PEOPLE["root"], PolicyRequest(document=newer, base=current.version, comment="newer"))
        assert [one.image for one in await client.clone(job.id)] == ["site/plain:1"]


async def test_a_clone_has_as_many_workers_in_the_same_profile(tmp_path: Path) -> None:
    async with running(tmp_path, POLICY) as run:
        client = run.client("ana")
        job = await run.submit("ana", profile="gpu1", workers=2)
        assert [one.workers for one in await client.clone(job.id)] == [2]
        assert [one.workers for one in await client.clone(job.id, 1, {"workers": 1})] == [1]
        assert [one.workers for one in await client.clone(job.id, 1, {"profile": "gpu2"})] == [1]
        usual = await run.submit("ana", profile="gpu1")
        assert [one.workers for one in await client.clone(usual.id)] == [1]
