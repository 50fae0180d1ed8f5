"""Fixtures of agents: a service that speaks their protocol, and a machine with the real agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent.machine_service import MachineService, answering
from agent.machines import TestMachine


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
