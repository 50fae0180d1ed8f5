"""One cluster for all tests of a run, which grows when a test asks for simulated nodes or for a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pods import PODS, wait_until

from kube_cluster import Api, Cluster, NotHere
from kube_cluster.node import Node


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """Return a cluster without nodes; later tests of the run may find some."""
    with Cluster.start() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kwok_cluster(control_plane: Cluster) -> Cluster:
    """Return the cluster with 100 simulated nodes of 8 GPUs."""
    control_plane.add_simulated_nodes(100, gpus=8)
    return control_plane


@pytest.fixture(scope="session")
def real_node(control_plane: Cluster) -> Node:
    """Return a real node with two virtual GPUs; skip where this machine cannot run one."""
    try:
        return control_plane.add_node(gpus=2)
    except NotHere as reason:
        pytest.skip(str(reason))


@pytest.fixture
def api(control_plane: Cluster) -> Iterator[Api]:
    """Return the API as the administrator sees it; afterwards the pods of the test are gone."""
    yield control_plane.api
    control_plane.api.delete(PODS, gracePeriodSeconds="0")
    wait_until(lambda: not control_plane.api.items(PODS), "no pod is left")
