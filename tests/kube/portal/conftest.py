"""One portal, installed by Helm on the real node, for all tests of this folder.

The tests of test_uninstalled.py, which pytest collects last, end it; those before them leave it with two replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from portals import Portal, installed
from replicated import two_replicas

from kube_cluster.cluster import Cluster


@pytest.fixture(scope="package")
def portal(
    control_plane: Cluster, images: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Portal]:
    """Return the portal that Helm installed, once all its pods are ready."""
    with installed(control_plane, tmp_path_factory.mktemp("helm")) as result:
        yield result


@pytest.fixture(scope="package")
def replicated(portal: Portal) -> Iterator[Portal]:
    """Return the portal with two replicas of the service, which it has from then on."""
    with two_replicas(portal):
        yield portal
