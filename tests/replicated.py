"""The tests' portal with two replicas of the service, which share a PostgreSQL of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import yaml
from charts import NAMESPACE, Object
from pods import wait_until
from portals import STARTED, VALUES, Portal
from postgres import network_database, postgres_server
from releases import SECRETS
from walk import file_of

from kube_cluster.portal import wait_until_ready

DATABASE = "makeway-postgres"
TWO = {"database": {"existingSecret": DATABASE}}
"""The values of two replicas."""
PROFILE = {"name": "probe", "gpus": 0, "cpu": 0.1, "memory": "128Mi", "pools": ["gpu"], "kinds": ["job"]}
POLICIES = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


def address_of(portal: Portal) -> str:
    """Return the address of this machine that pods reach."""
    endpoints = portal.api.get("/api/v1/namespaces/default/endpoints/kubernetes")
    return str(endpoints["subsets"][0]["addresses"][0]["ip"])


@contextmanager
def two_replicas(portal: Portal) -> Iterator[None]:
    """Upgrade the portal to two replicas, each of which this machine reaches; their database is there in the block."""
    host = address_of(portal)
    policy = yaml.safe_load(file_of(5, "policy.yaml"))
    policy["profiles"].append(PROFILE)
    service = {"matchLabels": {"app.kubernetes.io/component": "service"}}
    tested = {"ingress": [{"from": [{"ipBlock": {"cidr": f"{host}/32"}}]}], "podSelector": service}
    wait_until(portal.answers, "the Hub and the service answer through the proxy", STARTED, pause=0.5)
    portal.clean()
    with postgres_server(host, "10.0.0.0/8") as folder:
        url = network_database(folder, "makeway")
        secrets_path = SECRETS.format(NAMESPACE)
        portal.api.create(secrets_path, {"metadata": {"name": DATABASE}, "stringData": {"url": url}})
        portal.api.create(POLICIES, {"metadata": {"name": "tested"}, "spec": tested})
        (portal.walk.folder / "policy.yaml").write_text(yaml.safe_dump(policy), encoding="utf-8")
        upgrade(portal, VALUES | TWO)
        wait_until(lambda: len(portal.pods("service")) == 2, "there are two replicas")
        wait_until_ready(portal.cluster)
        yield


def upgrade(portal: Portal, values: Object) -> None:
    """Upgrade the release to these values, by the command of the page."""
    portal.walk.write_values(values)
    portal.walk.step(10)


def endpoints(portal: Portal) -> set[str]:
    """Return the addresses that requests to the service are sent to."""
    slices = portal.api.items(SLICES, labelSelector="kubernetes.io/service-name=makeway-service")
    result = [one for item in slices for one in item.get("endpoints") or ()]
    return {address for one in result if one["conditions"].get("ready") for address in one["addresses"]}
