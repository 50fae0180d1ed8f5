"""Fixtures of agents: a service that speaks their protocol, and a machine with the real agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent.machine_service import MachineService, answering
from agent.machines import TestMachine
from agent.podman import Podman, needed


@pytest.fixture
def service() -> Iterator[MachineService]:
    """Yield a service that answers."""
    with answering() as server:
        yield server


@pytest.fixture
def machine(tmp_path: Path, service: MachineService) -> Iterator[TestMachine]:
    """Yield a machine on which no agent runs yet."""
    made = TestMachine(tmp_path / "machine", service)
    yield made
    made.close()


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """Yield podman with two images; skip where it cannot be had."""
    needed()
    result = Podman(tmp_path_factory.mktemp("podman"))
    yield result
    result.close()
