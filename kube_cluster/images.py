"""Container images without a registry: archives of a few files, which containerd imports.

The image HOST holds only folders and symbolic links. A pod that mounts this machine's `/usr` into it runs what is
installed here, so that no image has to be built. The image EMPTY can run nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .api import GPU, Object

PAUSE = "makeway.test/pause:1"
HOST = "makeway.test/host:1"
EMPTY = "makeway.test/empty:1"
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
FOLDERS = ("dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tmp", "usr", "var")
LINKS = {name: f"usr/{name}" for name in ("bin", "lib", "lib64", "sbin")}
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def pause(program: Path) -> bytes:
    """Return the pause image, whose program holds the namespaces of a pod."""
    return archive(PAUSE, _layer({"pause": program.read_bytes()}), ["/pause"])


def host() -> bytes:
    """Return the image that shows what is installed on this machine, once /usr is mounted."""
    return archive(HOST, _layer({}, FOLDERS, LINKS), ["/bin/sh"])


def empty() -> bytes:
    """Return an image in which no program is."""
    return archive(EMPTY, _layer({}, ("dev", "etc", "makeway", "proc", "sys", "tmp")), ["/none"])


def host_pod(name: str, command: Sequence[str], *, gpus: int = 0, folders: Sequence[Path] = ()) -> Object:
    """Return a pod that runs a command of this machine; `folders` are mounted read-only at their own paths."""
    mounted = ["/usr", *(str(folder) for folder in folders)]
    limits = {GPU: str(gpus)} if gpus else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 5,
            "automountServiceAccountToken": False,
            "nodeSelector": {"makeway.test/real": "true"},
            "containers": [
                {
                    "name": "main",
                    "image": HOST,
                    "imagePullPolicy": "Never",
                    "command": list(command),
                    "resources": {"limits": limits},
                    "volumeMounts": [
                        {"name": f"v{at}", "mountPath": path, "readOnly": True} for at, path in enumerate(mounted)
                    ],
                }
            ],
            "volumes": [{"name": f"v{at}", "hostPath": {"path": path}} for at, path in enumerate(mounted)],
        },
    }


def archive(name: str, layer: bytes, command: Sequence[str]) -> bytes:
    """Return an OCI image of one layer as the archive that `ctr images import` reads."""
    machine = MACHINES.get(platform.machine(), platform.machine())
    blobs: dict[str, bytes] = {}

    def add(content: bytes, kind: str) -> Object:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    layer_entry = add(layer, "layer.v1.tar")
    config: Object = {
        "architecture": machine,
        "os": "linux",
        "config": {"Env": [PATH], "Cmd": list(command)},
        "rootfs": {"type": "layers", "diff_ids": [layer_entry["digest"]]},
    }
    config_entry = add(_json(config), "config.v1+json")
    manifest = {"schemaVersion": 2, "config": config_entry, "layers": [layer_entry]}
    manifest["mediaType"] = "application/vnd.oci.image.manifest.v1+json"
    entry = add(_json(manifest), "manifest.v1+json")
    entry["platform"] = {"os": "linux", "architecture": machine}
    entry["annotations"] = {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": _json({"schemaVersion": 2, "manifests": [entry]}),
        **{f"blobs/sha256/{digest}": content for digest, content in blobs.items()},
    }
    return _layer(files)


def _layer(files: Mapping[str, bytes], folders: Sequence[str] = (), links: Mapping[str, str] | None = None) -> bytes:
    """Return a tar archive that depends on its contents alone."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
            tar.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def _json(value: Object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
