"""Score nodes by how useful their free GPUs stay for the mix of work that a pool serves.

Every placement takes GPUs that other work could have used. A node is useful to a shape of work as far as its free
devices, CPU and memory could carry more of that shape; a placement costs what it takes off that, summed over the
mix. This is the fragmentation gradient of FGD (USENIX ATC'23) with three changes: costs are exact instead of rounded
scores, CPU and memory that run out before the GPUs do count as lost GPUs, and what is lost to a shape weighs the more,
the fewer GPUs of the pool could ever serve it (so work that may run anywhere avoids rare models). Ties: fewest free
GPUs left on the node, then the first node. Arrays hold one row a node; only rows that changed are scored again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..index.capacity import NodeCapacity
from ..request import Shape
from ..snapshot import GPU

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_TIE = 1e-9
"""Losses of usefulness closer than this, as a part of the whole pool's, are the same."""
_SMALLER = 0.05
"""How much more the smaller of two shapes counts: 1 would be as much more as it is smaller, 0 the same."""
_PLENTY = 1e15
"""Milli-GPUs per unit of CPU or memory, for shapes that need none of it."""
_MAX_CHANGES = 100_000
"""A longer list of changed rows is cleared."""
_MAX_REQUESTS = 512
"""The cache of requests is cleared beyond so many kinds."""
_FEW = 8
"""Up to so many nodes are priced one by one, from the cached prices of nodes in the same state."""
_MAX_PRICES = 5_000
"""The cache of states of each kind of request is cleared beyond so many."""

State = tuple[int, ...]
"""A node as far as prices go: its model, and what is left of CPU, of memory and of each device."""


class Packing:
    """The nodes of one pool as arrays, and the cost of each kind of request on each node."""

    def __init__(self, nodes: Sequence[NodeCapacity], mix: Mapping[Shape, int]) -> None:
        """Initialize with the nodes *empty*: what they could serve then sets the prices. `mix` counts work by shape."""
        width = max((len(node.devices) for node in nodes), default=0)
        self.models = sorted({node.model for node in nodes})
        self.model: Ints = np.array([self.models.index(node.model) for node in nodes], dtype=np.int64)
        self.free: Ints = np.zeros((len(nodes), max(width, 1)), dtype=np.int64)
        self.cpu: Floats = np.zeros(len(nodes))
        self.memory: Floats = np.zeros(len(nodes))
        self.states: list[State] = [(int(model), 0, 0) for model in self.model]
        self.changed: list[int] = []
        self.turn: Ints = np.arange(len(nodes))
        self._requests: dict[Shape, _RequestCosts] = {}
        self.shapes: list[Shape] | None = None
        self.usable: Floats = np.zeros((len(nodes), 0))
        """The milli-GPUs that each shape could use on each node, were it empty."""
        for position, node in enumerate(nodes):
            self.see(position, node)
        self.empty = self.free.copy(), self.cpu.copy(), self.memory.copy()
        self.learn(mix)

    def see(self, position: int, node: NodeCapacity) -> None:
        """Update a node's row; an unchanged node costs nothing."""
        devices, cpu, memory, was = node.devices, node.cpu, node.memory, self.states[position]
        state = (was[0], cpu, memory, *devices)
        if state == was:
            return
        self.states[position] = state
        self.free[position, : len(devices)] = devices
        self.cpu[position], self.memory[position] = cpu, memory
        self.changed.append(position)

    def best(self, shape: Shape, among: Collection[int] | None = None) -> tuple[int, int] | None:
        """Return the cheapest node for a worker, and the device for a share of one; None if it fits nowhere.

        `among`: only the nodes at these positions.
        """
        known = self._requests.get(shape)
        if known is None:
            if len(self._requests) >= _MAX_REQUESTS:
                self._requests.clear()
            known = self._requests[shape] = _RequestCosts(len(self.free))
            outdated = set(range(len(self.free)))
        else:
            outdated = set(self.changed[known.seen :])
        if len(outdated) <= _FEW:
            self._look_up(shape, known, outdated)
        else:
            stale = np.array(sorted(outdated))
            known.loss[stale], known.rest[stale], known.device[stale] = self._cost(shape, stale)
        known.seen = len(self.changed)
        if known.seen > _MAX_CHANGES:
            self._forget()
        position = known.cheapest(self.turn, among)
        return None if position is None else (position, int(known.device[position]))

    def _look_up(self, shape: Shape, known: _RequestCosts, stale: Iterable[int]) -> None:
        """Price a few nodes, most of them from the cache: states recur."""
        if len(known.prices) > _MAX_PRICES:
            known.prices.clear()
        for at in stale:
            state = self.states[at]
            price = known.prices.get(state)
            if price is None:
                loss, rest, device = self._cost(shape, np.array([at]))
                price = known.prices[state] = float(loss[0]), int(rest[0]), int(device[0])
            known.loss[at], known.rest[at], known.device[at] = price

    def _forget(self) -> None:
        """Shorten the list of changes; requests that have not been read for long are scored from scratch."""
        self._requests = {shape: known for shape, known in self._requests.items() if known.seen == len(self.changed)}
        for known in self._requests.values():
            known.seen = 0
        self.changed.clear()

    # Changed, new and removed nodes

    def renew(self, position: int, node: NodeCapacity) -> bool:
        """Update a node's size, given *empty*; False if the arrays are too narrow for it.

        The caller passes what is left on it to `see` afterwards.
        """
        if node.model not in self.models or len(node.devices) > self.free.shape[1]:
            return False
        free, cpu, memory = self.empty
        free[position] = 0
        free[position, : len(node.devices)] = node.devices
        cpu[position], memory[position] = node.cpu, node.memory
        self.model[position] = self.models.index(node.model)
        self.free[position] = 0
        self.states[position] = (int(self.model[position]),)
        self.usable[position] = self._usable_empty(np.array([position]))
        self._set_prices()
        return True

    def insert(self, position: int, node: NodeCapacity) -> bool:
        """Insert a new *empty* node before the one at `position`; False as for `renew`. Ties go by position again."""
        if node.model not in self.models or len(node.devices) > self.free.shape[1]:
            return False
        self._rearrange(lambda rows: np.insert(rows, position, 0, axis=0))
        self.states.insert(position, ())
        return self.renew(position, node)

    def remove(self, position: int) -> None:
        """Remove the node at a position. Ties go by position again."""
        self._rearrange(lambda rows: np.delete(rows, position, axis=0))
        del self.states[position]
        self._set_prices()

    def _rearrange(self, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> None:
        free, cpu, memory = self.empty
        self.empty = change(free), change(cpu), change(memory)
        self.free, self.cpu, self.memory = change(self.free), change(self.cpu), change(self.memory)
        self.model, self.usable = change(self.model), change(self.usable)
        self.turn = np.arange(len(self.free))

    def prefer(self, order: Sequence[int]) -> None:
        """Set the order of nodes that breaks ties (by default: by position)."""
        self.turn = np.array(order, dtype=np.int64)

    # The mix and its prices

    def learn(self, mix: Mapping[Shape, int]) -> None:
        """Set the mix; the price of a shape is its part of the mix over the GPUs that could ever serve it.

        Smaller shapes get a slightly larger part (tuned on the public openb trace).
        """
        shapes = sorted((shape, count) for shape, count in mix.items() if shape.gpus > 0 and count > 0)
        if [shape for shape, _ in shapes] != self.shapes:
            self._shape([shape for shape, _ in shapes])
        counts = np.array([count * (shape.gpus / GPU) ** -_SMALLER for shape, count in shapes], dtype=np.float64)
        self._part: Floats = counts / counts.sum() if len(shapes) else counts
        self._set_prices()

    def _set_prices(self) -> None:
        every = self.usable.sum(axis=0)
        self.price: Floats = np.where(every > 0, self._part / np.where(every > 0, every, 1.0), 0.0)
        self._requests.clear()
        self.changed.clear()

    def _shape(self, shapes: list[Shape]) -> None:
        """Fill the arrays of the shapes' requests and of the empty nodes' use to each."""
        self.shapes = shapes
        gpus = np.array([shape.gpus for shape in shapes], dtype=np.int64)
        self.per_device: Ints = np.minimum(gpus, GPU)
        self.full: Ints = GPU // self.per_device * self.per_device
        self.whole: Bools = gpus >= GPU
        self.blocks: Ints = np.where(self.whole, gpus // GPU, 1)
        self.per_cpu: Floats = _per([shape.cpu for shape in shapes], gpus)
        self.per_memory: Floats = _per([shape.memory for shape in shapes], gpus)
        self.cpu_need: Ints = np.array([shape.cpu for shape in shapes], dtype=np.int64)
        self.memory_need: Ints = np.array([shape.memory for shape in shapes], dtype=np.int64)
        suits = [[not s.models or model in s.models for s in shapes] for model in self.models]
        self.suits: Bools = np.array(suits, dtype=np.bool_).reshape(len(self.models), len(shapes))
        self.usable = self._usable_empty(np.arange(len(self.free)))

    def _usable_empty(self, rows: Ints) -> Floats:
        """Return, for each empty node and shape, the milli-GPUs that work of the shape could use."""
        free, cpu, memory = self.empty
        shared = _at_least(free[rows], self.per_device)
        return self._share(shared, (free[rows] == GPU).sum(axis=1), cpu[rows], memory[rows], rows)

    def _share(self, shared: Floats, whole: Ints, cpu: Floats, memory: Floats, rows: Ints) -> Floats:
        """Return the same from the sums over devices; leading axes may be nodes, or nodes and devices."""
        whole, cpu, memory = whole[..., None], cpu[..., None], memory[..., None]
        gpus = np.where(self.whole, np.where(whole >= self.blocks, GPU * whole, 0), shared)
        fits = (cpu >= self.cpu_need) & (memory >= self.memory_need)
        suits = self.suits[self.model[rows]]
        fits &= suits if whole.ndim == 2 else suits[:, None, :]
        usable = np.minimum(np.minimum(gpus, cpu * self.per_cpu), memory * self.per_memory)
        return np.where(fits, usable, 0.0)

    # The cost of a request

    def _cost(self, shape: Shape, rows: Ints) -> tuple[Floats, Ints, Ints]:
        """Return the loss (infinite where it does not fit), the free milli-GPUs left, and the device, of each row."""
        loss = np.full(len(rows), np.inf)
        rest = np.zeros(len(rows), dtype=np.int64)
        device = np.zeros(len(rows), dtype=np.int64)
        able = np.flatnonzero(self._fits(shape, rows))
        if able.size:
            at = rows[able]
            price = self._shared_cost if 0 < shape.gpus < GPU else self._whole_cost
            loss[able], device[able] = price(shape, at)
            rest[able] = self.free[at].sum(axis=1) - shape.gpus
        return loss, rest, device

    def _fits(self, shape: Shape, rows: Ints) -> Bools:
        free = self.free[rows]
        fits: Bools = (self.cpu[rows] >= shape.cpu) & (self.memory[rows] >= shape.memory)
        if shape.models:
            fits &= np.isin(self.model[rows], [at for at, name in enumerate(self.models) if name in shape.models])
        if shape.gpus >= GPU:
            fits &= (free == GPU).sum(axis=1) >= shape.gpus // GPU
        elif shape.gpus:
            fits &= (free >= shape.gpus).any(axis=1)
        return fits

    def _whole_cost(self, shape: Shape, rows: Ints) -> tuple[Floats, Ints]:
        """Price whole devices (or none): what is left of the others stays as it is."""
        free = self.free[rows]
        shared, whole = _at_least(free, self.per_device), (free == GPU).sum(axis=1)
        cpu, memory = self.cpu[rows], self.memory[rows]
        before = self._share(shared, whole, cpu, memory, rows)
        blocks = shape.gpus // GPU
        after = self._share(shared - blocks * self.full, whole - blocks, cpu - shape.cpu, memory - shape.memory, rows)
        return (before - after) @ self.price, np.zeros(len(rows), dtype=np.int64)

    def _shared_cost(self, shape: Shape, rows: Ints) -> tuple[Floats, Ints]:
        """Price a share of one device on every device of each node; the fullest of the cheapest is taken."""
        free = self.free[rows]
        remaining = free - shape.gpus
        shared, whole = _at_least(free, self.per_device), (free == GPU).sum(axis=1)
        cpu, memory = self.cpu[rows], self.memory[rows]
        before = self._share(shared, whole, cpu, memory, rows)
        here, then = free[:, :, None], remaining[:, :, None]
        moved = then // self.per_device * self.per_device - here // self.per_device * self.per_device
        after = self._share(
            shared[:, None, :] + moved,
            whole[:, None] - (free == GPU),
            np.broadcast_to((cpu - shape.cpu)[:, None], free.shape),
            np.broadcast_to((memory - shape.memory)[:, None], free.shape),
            rows,
        )
        loss = np.where(remaining >= 0, (before[:, None, :] - after) @ self.price, np.inf)
        cheapest = loss.min(axis=1)
        device = np.where(loss <= cheapest[:, None] + _TIE, free, 2 * GPU).argmin(axis=1)
        return cheapest, device


class _RequestCosts:
    """The cost of one kind of request on every node, up to the change number `seen`."""

    __slots__ = ("device", "loss", "prices", "rest", "seen")

    def __init__(self, nodes: int) -> None:
        self.loss: Floats = np.full(nodes, np.inf)
        self.rest: Ints = np.zeros(nodes, dtype=np.int64)
        self.device: Ints = np.zeros(nodes, dtype=np.int64)
        self.seen = 0
        self.prices: dict[State, tuple[float, int, int]] = {}
        """State of a node to its (loss, rest, device)."""

    def cheapest(self, turn: Ints, among: Collection[int] | None = None) -> int | None:
        """Return the node of least loss; of the same loss, the one left with the fewest free GPUs, then the first."""
        loss = self.loss
        if among is not None:
            loss = np.full(len(loss), np.inf)
            loss[list(among)] = self.loss[list(among)]
        if not loss.size:
            return None
        lowest = float(loss[loss.argmin()])
        if lowest == np.inf:
            return None
        same = (loss <= lowest + _TIE).nonzero()[0]
        if len(same) > 1:
            rest = self.rest[same]
            same = same[rest == rest[rest.argmin()]]
        return int(same[turn[same].argmin()]) if len(same) > 1 else int(same[0])


def _at_least(free: Ints, minimum: Ints) -> Floats:
    """Return, for each node and shape, the milli-GPUs that more of the shape could use, summed over the devices."""
    spread = free[:, :, None]
    total: Floats = (spread // minimum * minimum).sum(axis=1).astype(np.float64)
    return total


def _per(needs: Iterable[int], gpus: Ints) -> Floats:
    """Return milli-GPUs per unit of CPU or memory that a shape requests; `_PLENTY` where it requests none."""
    need = np.array(list(needs), dtype=np.float64)
    return np.where(need > 0, gpus / np.where(need > 0, need, 1.0), _PLENTY)


__all__ = ["NodeCapacity", "Packing", "Shape"]
