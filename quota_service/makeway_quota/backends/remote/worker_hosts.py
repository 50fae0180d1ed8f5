"""Summarize the pods or hosts of one attempt, for backends with remote workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerHosts:
    """State of the pods (or hosts) of one attempt, as a remote backend observes it."""

    workers: int
    present: bool = True
    """whether any of them still exists"""
    node_lost: bool = False
    """whether a node is gone, or Kubernetes ended a pod for a reason of its own, which says nothing about the job"""
    waiting_reason: str = ""
    message: str = ""
    """why one of them waits; if not present: how they ended"""
    exit_code: int | None = None
    """if not present: the job's own exit code; None where the job did not end them"""
    timed_out: bool = False
    """if not present: whether Kubernetes ended them as their time was over"""
    storage_failed: bool = False
    """if not present: whether a worker did not start, as no checkpoint could be kept"""
    start_broke_off: bool = False
    """whether their start was interrupted before anything ran"""
    never_ran: bool = False
    """if not present: whether at least one worker did not start, through no fault of the job"""
    refused: bool = False
    """with `never_ran`: whether a node refused that worker for a reason that passes in seconds as a rule"""
    evicted: bool = False
    """with `node_lost`: whether its pod was evicted, as a drain or an autoscaler does before it removes the node"""
    worker: int = 0
    """number of the worker that the message and `node_lost` are about"""
    cpu: int = 0
    """milli-cores that the largest of them requests; 0: not known"""
    memory: int = 0
    """MiB that the largest of its pods requests; 0: not known"""


GONE = WorkerHosts(0, present=False)
"""State of pods that are listed no more"""
