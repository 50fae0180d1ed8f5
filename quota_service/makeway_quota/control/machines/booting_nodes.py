"""Show a machine that boots to the engine as a node, for the service and for simulations alike."""

from __future__ import annotations

from ...autoscale.deployment import MachineType
from ...autoscale.machine import Machine
from ...engine.snapshot import Node


def booting_node(machine: Machine, machine_type: MachineType, ready_at: float, *, sessions: bool = False) -> Node:
    """Return a machine as the node that it will be, with the size of its type; `sessions`: whether notebooks run on it.

    It is named like its machine, as the node of an agent is.
    """
    return Node(
        machine.id,
        machine.pool,
        0 if machine_type.cpu_only else machine.gpus,
        machine_type.cpu,
        machine_type.memory,
        ready=False,
        model=machine_type.model,
        sessions=sessions,
        ready_at=ready_at,
    )
