"""Report each pod's address to the process that enforces network policies, before the pod's containers start.

The last plugin of a real node's CNI chain: containerd runs this file for each pod. Standard library only, without the
package's other modules, so that it starts at once.
"""

import json
import os
import socket
import sys

VERSIONS = ["0.3.0", "0.3.1", "0.4.0"]
SECONDS = 60


def main(place: str) -> int:
    """Do what CNI_COMMAND says; `place` is the socket of the process."""
    command = os.environ["CNI_COMMAND"]
    if command == "VERSION":
        print(json.dumps({"cniVersion": VERSIONS[-1], "supportedVersions": VERSIONS}))
        return 0
    config = json.load(sys.stdin)
    try:
        if command in ("ADD", "DEL"):
            ask(place, {"command": command, "container": os.environ["CNI_CONTAINERID"], **pod(config)})
        if command == "ADD":
            print(json.dumps(config["prevResult"]))
    except (OSError, ValueError) as problem:
        message = f"network policies: {problem}"
        print(json.dumps({"cniVersion": config["cniVersion"], "code": 100, "msg": message}))
        return 1
    return 0


def pod(config: dict) -> dict:  # type: ignore[type-arg]
    """Return namespace, name, node and address of the pod; no address when it is removed."""
    words = dict(word.split("=", 1) for word in os.environ.get("CNI_ARGS", "").split(";") if "=" in word)
    addresses = [one["address"].partition("/")[0] for one in (config.get("prevResult") or {}).get("ips", ())]
    return {
        "namespace": words.get("K8S_POD_NAMESPACE", ""),
        "name": words.get("K8S_POD_NAME", ""),
        "node": socket.gethostname(),
        "address": addresses[0] if addresses else "",
    }


def ask(place: str, message: dict) -> None:  # type: ignore[type-arg]
    """Send a message and return when it is carried out; ValueError with what was said otherwise."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(SECONDS)
        asking.connect(place)
        asking.sendall(json.dumps(message).encode() + b"\n")
        with asking.makefile() as answer:
            text = answer.readline().strip()
    if text != "done":
        raise ValueError(text or "no answer")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
