"""Summarize the pods or hosts of one attempt, for backends with remote workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of one attempt as a subclass sees them."""

    workers: int
    present: bool = True
    """False: none of them is there any more"""
    node_lost: bool = False
    """the node is gone, or Kubernetes ends a machine for a reason of its own, so that it says nothing about the job"""
    waiting_reason: str = ""
    message: str = ""
    """why it waits; with absence: what became of the machines"""
    exit_code: int | None = None
    """with absence: it was the job that made its machine end, with this exit code"""
    unfinished: bool = False
    """their start broke off before anything ran"""
    never_ran: bool = False
    """with absence: at least one worker did not start, and the job is not to blame"""
    worker: int = 0
    """the one that the message and `node_lost` are about"""


GONE = Machines(0, present=False)
"""Machines that are in no list any more"""
