"""Two real nodes of one cluster: each has GPUs of its own, and their pods reach each other and this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from pods import PODS, phase, wait_until

from kube_cluster.cluster import Cluster
from kube_cluster.images import host_pod
from kube_cluster.problems import NotHere

pytestmark = pytest.mark.kube

SERVER = "import socket; s = socket.create_server(('', 8000)); c, _ = s.accept(); c.sendall(b'hello'); c.close()"
CLIENT = "import socket; print(socket.create_connection(('{}', {}), 30).recv(5).decode())"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster.start() as found:
        try:
            for _ in range(2):
                found.add_node(gpus=1)
        except NotHere as reason:
            pytest.skip(str(reason))
        yield found


def test_pods_of_two_nodes_reach_each_other_and_this_machine(cluster: Cluster) -> None:
    api = cluster.api
    api.create(PODS, host_pod("server", ["python3", "-c", SERVER], gpus=1))
    wait_until(lambda: phase(api, "server") == "Running", "the first pod runs")
    address = api.get(f"{PODS}/server")["status"]["podIP"]
    api.create(PODS, host_pod("client", ["python3", "-c", CLIENT.format(address, 8000)], gpus=1))
    wait_until(lambda: phase(api, "client") in ("Succeeded", "Failed"), "the second pod has ended")
    assert api.text(f"{PODS}/client/log") == "hello\n"
    nodes = {pod["spec"]["nodeName"] for pod in api.items(PODS)}
    assert nodes == {"node-0", "node-1"}
    host = api.get("/api/v1/namespaces/default/endpoints/kubernetes")["subsets"][0]["addresses"][0]["ip"]
    with socket.create_server((host, 0)) as listening:
        listening.settimeout(60)
        port = listening.getsockname()[1]
        api.create(PODS, host_pod("caller", ["python3", "-c", CLIENT.format(host, port)]))
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"there")
    wait_until(lambda: phase(api, "caller") == "Succeeded", "the third pod has ended")
    assert api.text(f"{PODS}/caller/log") == "there\n"
