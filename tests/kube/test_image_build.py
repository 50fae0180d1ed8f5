"""Images are built of what the repository says; a machine that cannot build them says so in one line."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from kube_cluster import image_build
from kube_cluster.problems import KubeProblem, NotHere


@pytest.mark.parametrize("image", sorted(image_build.EXTRAS))
def test_a_dockerfile_takes_its_base_as_an_argument_and_ends_as_an_ordinary_user(image: str) -> None:
    text = (image_build.DOCKERFILES / image / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^FROM (.+)$", text, re.MULTILINE) == ["${BASE}"]
    (user,) = re.findall(r"^USER (\d+):\1$", text, re.MULTILINE)
    assert (int(user) >= 1000) == (image != "device-plugin"), "only the kubelet's folder needs root"
    declared = set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    assert declared == {"BASE", *image_build.PIP_SETTINGS}


def test_every_dockerfile_is_an_image() -> None:
    assert {file.parent.name for file in image_build.DOCKERFILES.glob("*/Dockerfile")} == {*image_build.EXTRAS}


def test_an_image_that_there_is_not_is_refused() -> None:
    with pytest.raises(KubeProblem, match=r"^There is no image ingress; there are: hub, quota-service, "):
        image_build.build(["hub", "ingress"])


def test_building_without_root_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotHere, match=r"^Building images needs root[^\n]*$"):
        image_build.build(["hub"])


def test_building_without_the_packages_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotHere, match=r"^Building images needs these packages[^\n]*: buildah, debootstrap[^\n]*$"):
        image_build.build(["hub"])


def test_archives_that_another_checkout_uses_stay(tmp_path: Path) -> None:
    for number, hours in enumerate((0.5, 2)):
        archive = tmp_path / f"hub-{number}.tar"
        archive.touch()
        used = time.time() - hours * 3600
        os.utime(archive, (used, used))
    image_build.remove_unused(tmp_path, "hub")
    assert [file.name for file in tmp_path.iterdir()] == ["hub-0.tar"]


def test_buildah_keeps_its_networks_in_its_own_folder_and_no_container_of_a_build_that_was_killed(
    tmp_path: Path,
) -> None:
    try:
        image_build.check_machine()
    except NotHere as problem:
        pytest.skip(str(problem))
    buildah = image_build.Buildah(tmp_path)
    try:
        buildah.run("from", "scratch")
        assert (tmp_path / "networks/cni.lock").exists()  # elsewhere it is in /etc/cni/net.d, on every machine
        assert buildah.run("containers", "--quiet")
        assert not image_build.Buildah(tmp_path).run("containers", "--quiet")
    finally:
        buildah.run("rm", "--all")
