"""The command of the test cluster: `make kube` and `make run-kube`, or `python -m kube_cluster`."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence

from . import helm, image_build, node, portal, programs, stand_in_launchers, teardown
from .cluster import Cluster
from .folder import folders
from .problems import KubeProblem
from .processes import marked
from .progress import duration
from .stand_in_autoscaler import StandInAutoscaler


def up(simulated: int, gpus: int) -> None:
    """Start a cluster, print how to use it, and keep it until Ctrl-C."""
    kubectl = programs.kubectl()
    start = time.monotonic()
    with Cluster.start() as cluster:
        print(f"The control plane is ready after {duration(time.monotonic() - start)}.", flush=True)
        if simulated:
            cluster.add_simulated_nodes(simulated)
            print(f"{simulated} simulated nodes with 8 GPUs each are ready.", flush=True)
        if cluster.why_no_node:
            print(f"There is no real node: {cluster.why_no_node}", flush=True)
        elif gpus:
            there = cluster.add_node(gpus)
            print(f"The real node {there.name} is ready: {gpus} virtual GPUs.", flush=True)
        print(f"\n  export KUBECONFIG={cluster.kubeconfig}\n  alias kubectl={kubectl}\n  kubectl get nodes\n")
        print("Ctrl-C removes the cluster.", flush=True)
        keep(cluster)


def keep(cluster: Cluster) -> None:
    """Wait for Ctrl-C, and say that it was seen: a node's images take a while to remove."""
    try:
        while True:
            time.sleep(1)
            cluster.check()
    except KeyboardInterrupt:
        print("\nRemoving the cluster …", flush=True)
        raise


def run(gpus: int) -> None:
    """Start a cluster, install the portal in it, print where it is and who may log in, and keep it until Ctrl-C."""
    node.check_machine()
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{duration(time.monotonic() - start):>10}  {text}", flush=True)

    say("Images of the portal: built where something has changed, which takes minutes")
    archives = image_build.build(list(portal.IMAGES.values()))
    say(f"Kubernetes and a node with {gpus} virtual GPUs")
    with Cluster.start() as cluster:
        there = cluster.add_node(gpus)
        for image, archive in archives.items():
            say(f"Image {image}, imported into the node")
            there.import_image(archive)
        say("The chart helm/makeway, installed by Helm")
        portal.install(cluster, portal.demo_values(gpus))
        portal.wait_until_ready(cluster, say=say)
        cluster.simulate()
        launchers = stand_in_launchers.running(cluster.kubeconfig, portal.address(cluster.api), portal.JOBS)
        with launchers, StandInAutoscaler(cluster.api, "cloud", portal.GROUPS, boot=8.0, unneeded=5.0):
            print(portal.announcement(cluster), flush=True)
            keep(cluster)


def list_clusters() -> None:
    """Print the clusters of this user and whether their owners still run."""
    for folder in folders():
        state = "running" if folder.owner_lives() else "abandoned"
        print(f"{folder.name}  {state}, {len(marked(folder))} processes, {folder.path}")


def down(names: Sequence[str]) -> None:
    """Remove the clusters of these names; without a name, those whose owners have ended."""
    known = {folder.name: folder for folder in folders()}
    if unknown := [name for name in names if name not in known]:
        raise KubeProblem(f"There is no cluster {', '.join(unknown)}; there are: {', '.join(known) or 'none'}.")
    removed = list(names) or teardown.remove_abandoned()
    for name in names:
        teardown.remove(known[name])
    print(f"Removed: {', '.join(removed)}." if removed else "There was no abandoned cluster.")


def some(text: str) -> int:
    """Return a number of GPUs, at least one."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs: expected 1 or more")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    made = argparse.ArgumentParser(prog="python -m kube_cluster", description="A Kubernetes cluster on this machine.")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    start = verbs.add_parser("up", help="start a cluster and keep it until Ctrl-C")
    start.add_argument("--simulated", type=int, default=0, metavar="N", help="add N simulated nodes of 8 GPUs")
    start.add_argument(
        "--gpus", type=int, default=4, metavar="N", help="virtual GPUs of the real node; 0: no real node"
    )
    whole = verbs.add_parser("run", help="start a cluster with the portal in it, and keep it until Ctrl-C")
    whole.add_argument("--gpus", type=some, default=10, metavar="N", help="virtual GPUs of its node; 10 by default")
    verbs.add_parser("list", help="list the clusters of this user")
    stop = verbs.add_parser("down", help="remove clusters: the abandoned ones, or those named")
    stop.add_argument("names", nargs="*", metavar="NAME")
    verbs.add_parser("build", help="build the programs, if they are not in the cache")
    images = verbs.add_parser("images", help="build the images of helm/images, if they are not in the cache")
    images.add_argument("names", nargs="*", metavar="NAME", help="names of folders in helm/images; all without a name")
    images.add_argument("--base", default="", metavar="IMAGE", help="an image with Python, not a Debian made here")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    wanted = parser().parse_args(arguments)
    # All end as Ctrl-C does, so that the cluster is removed; shells start background commands with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        if wanted.verb == "up":
            up(wanted.simulated, wanted.gpus)
        elif wanted.verb == "run":
            run(wanted.gpus)
        elif wanted.verb == "list":
            list_clusters()
        elif wanted.verb == "down":
            down(wanted.names)
        elif wanted.verb == "images":
            for image, archive in image_build.build(wanted.names or list(image_build.EXTRAS), wanted.base).items():
                print(f"{image_build.name_of(image)}: {archive}")
        else:
            tool = helm.helm()  # first: the build of Kubernetes uses what it compiled, and removes it
            print(f"The programs are in {programs.built()}, Helm is {tool}.")
    except KubeProblem as problem:
        print(f"kube: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kube: stopped.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
