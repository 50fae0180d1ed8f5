"""Images that an agent has pulled from a real registry with a real podman, and their end where the disk is full."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from agent.podman import DEFAULT, Podman
from makeway.agent import containers
from makeway.agent.containers import Container

from kube_cluster.images import HOST

pytestmark = pytest.mark.slow

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


class Registry(ThreadingHTTPServer):
    """A registry with one image of each name, all of whose tags are the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(("127.0.0.1", 0), _Handler)

    def image(self, name: str) -> str:
        return f"127.0.0.1:{self.server_port}/{name}:1"

    def add(self, podman: Podman, name: str) -> str:
        """Build an image, keep it here alone, and return what it is called."""
        context = self.folder / "context"
        context.mkdir(exist_ok=True)
        (context / "Dockerfile").write_text(f"FROM {HOST}\nCOPY name /name\n")
        (context / "name").write_text(name)
        podman("build", "--quiet", "--tag", f"makeway.test/{name}:1", str(context))
        podman("push", "--quiet", "--format=v2s2", f"makeway.test/{name}:1", f"dir:{self.folder / name}")
        podman("rmi", f"makeway.test/{name}:1")
        return self.image(name)


class _Handler(BaseHTTPRequestHandler):
    """The part of a registry that is read for a pull."""

    server: Registry

    def log_message(self, *_: Any) -> None:
        """Write nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.strip("/").split("/")  # v2/NAME/manifests/TAG, v2/NAME/blobs/sha256:HEX
        wanted = "manifest.json" if "manifests" in parts else parts[-1].removeprefix("sha256:")
        data = b"{}" if len(parts) < 4 else (self.server.folder / parts[1] / wanted).read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", MANIFEST if wanted == "manifest.json" else "application/octet-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def registry(podman: Podman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """Yield a registry that podman of this process uses without TLS."""
    with Registry(tmp_path) as server:
        (tmp_path / "registries.conf").write_text(
            f'[[registry]]\nlocation = "127.0.0.1:{server.server_port}"\ninsecure = true\n'
        )
        for name, value in {**podman.env, "CONTAINERS_REGISTRIES_CONF": str(tmp_path / "registries.conf")}.items():
            monkeypatch.setenv(name, value)
        thread = threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_images_go_from_a_full_disk_by_their_last_use_and_none_that_is_needed(
    registry: Registry, podman: Podman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    folder = str(state / "workers" / "j-1" / "1" / "0")
    names = ["runs", "old", "again", "new"]
    images = {name: registry.add(podman, name) for name in names}

    def there() -> list[str]:
        held = podman("images", "--format", "{{.Repository}}:{{.Tag}}").split()
        return [name for name in names if images[name] in held]

    def use(name: str) -> None:
        containers.pull(Container("podman", "box", images[name]), folder)

    for name in names:
        use(name)
    assert there() == names
    containers.pull(Container("podman", "box", DEFAULT), folder)  # was there before
    for note, _ in containers._image_notes(str(state)):
        at = names.index(Path(note).read_text().split("/")[1].split(":")[0])
        os.utime(note, (1000 + at, 1000 + at))
    podman("run", "--detach", "--name", "user", "--network=host", images["runs"], "/bin/sleep", "1000")
    monkeypatch.setattr(containers, "KEPT_IMAGES", 1)
    try:
        monkeypatch.setattr(containers, "FULL", 1.01)
        containers.remove_forgotten(str(state))
        assert there() == names, "there is room"
        monkeypatch.setattr(containers, "FULL", 0.0)
        monkeypatch.setattr(containers, "ENOUGH", 0.0)
        use("again")
        use("new")
        containers.remove_forgotten(str(state))
        assert there() == ["runs", "again", "new"], "one has a container, two were used now"
        monkeypatch.setattr(containers, "KEPT_SECONDS", 0.0)
        containers.remove_forgotten(str(state))
        assert there() == ["runs", "new"], "the one used last stays, however full the disk is"
    finally:
        podman("rm", "--force", "--time=0", "user")
    containers.remove_forgotten(str(state))
    assert there() == ["new"]
    assert DEFAULT in podman("images", "--format", "{{.Repository}}:{{.Tag}}").split()
    use("old")
    assert there() == ["old", "new"], "it is pulled again where it is needed again"
    shutil.rmtree(state)
    containers.remove_forgotten(str(state))
    assert there() == ["old", "new"], "what is not known to be the agent's stays"
    podman("rmi", *(images[name] for name in there()))
