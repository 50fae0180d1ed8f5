"""Pods find Services by their names, and the pods behind those without an address; nothing else has a name."""

from __future__ import annotations

import pytest
from pods import PODS, phase, wait_until

from kube_cluster.api import Api
from kube_cluster.dns import KIND, NAME_OF_QUESTION, Names, reply
from kube_cluster.images import host_pod

pytestmark = pytest.mark.kube

SERVICES = "/api/v1/namespaces/default/services"
LOOK = """
import socket, sys, time

def address(name):
    try:
        return socket.gethostbyname(name)
    except OSError as problem:
        return problem.strerror

end = time.monotonic() + 60
while address("worker-0.gang.default.svc") != address(socket.gethostname()) and time.monotonic() < end:
    time.sleep(0.1)
for name in ("kubernetes.default", "kubernetes", "worker-0.gang.default.svc", "gang", "worker-1.gang", "example.com"):
    print(name, address(name))
"""


@pytest.mark.usefixtures("real_node")
def test_a_pod_resolves_services_and_the_pods_behind_them(api: Api) -> None:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"app": "gang"},
        "ports": [{"port": 29500}],
    }
    api.create(SERVICES, {"metadata": {"name": "gang"}, "spec": spec})
    pod = host_pod("looks", ["python3", "-c", LOOK])
    pod["metadata"]["labels"] = {"app": "gang"}
    pod["spec"] |= {"hostname": "worker-0", "subdomain": "gang"}
    api.create(PODS, pod)
    wait_until(lambda: phase(api, "looks") in ("Succeeded", "Failed"), "the pod has ended")
    result = dict(line.split(" ", 1) for line in api.text(f"{PODS}/looks/log").splitlines())
    own = api.get(f"{PODS}/looks")["status"]["podIP"]
    unknown = "Name or service not known"
    assert result == {
        "kubernetes.default": "10.96.0.1",
        "kubernetes": "10.96.0.1",
        "worker-0.gang.default.svc": own,
        "gang": own,
        "worker-1.gang": unknown,
        "example.com": unknown,
    }
    api.delete(f"{SERVICES}/gang")


def test_a_question_for_another_kind_of_address_is_answered_without_one(api: Api) -> None:
    name = b"\x0akubernetes\x07default\x03svc\x07cluster\x05local\x00"
    header = (7).to_bytes(2) + b"\x01\x00\x00\x01" + bytes(6)
    for kind, answers in ((1, 1), (28, 0)):
        answer = reply(Names(api), header + name + KIND.pack(kind, 1))
        assert answer[:2] == (7).to_bytes(2)
        assert answer[3] & 0x0F == 0
        assert int.from_bytes(answer[6:8]) == answers
        assert (NAME_OF_QUESTION.to_bytes(2) in answer) == bool(answers)
