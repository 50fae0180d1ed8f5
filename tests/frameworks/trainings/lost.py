"""A training on two processes of which rank 1 is lost in the first attempt, while rank 0 waits for it in a collective.

`LOST` says how: "kill" (as for want of memory), "error", or "leave" (it exits with 0); `WHEN` says when: "early"
(without a notice), "notice" (after it), or "save" (in the save that it causes).
"""

from __future__ import annotations

import os
import signal
import sys

import data
import moments
import torch
import torch.distributed as dist
from makeway import checkpoint
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

WHEN, LOST = os.environ["WHEN"], os.environ["LOST"]


def lose() -> None:
    """Lose rank 1; rank 0 goes on to its next collective."""
    if dist.get_rank() != 1 or moments.ATTEMPT > 1:
        return
    if LOST == "error":
        raise RuntimeError("a bad batch")
    if LOST == "leave":
        sys.exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


class Lost(data.Noted):
    """A part of the training at whose state rank 1 is lost."""

    def state_dict(self) -> dict[str, int]:
        if WHEN == "save" and moments.STOP_FILE.exists():
            lose()
        return super().state_dict()


def main() -> None:
    dist.init_process_group("gloo")
    data.seed()
    model = DistributedDataParallel(data.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = data.Augmented()
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    state = checkpoint.torch_state(model=model, optimizer=optimizer, lost=Lost(), every=2)
    for _ in state.epochs(3):
        for inputs, labels in state.batches(loader):
            if state.step == 3:
                if WHEN != "early":
                    moments.reach("notice")
                if WHEN != "save":
                    lose()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
