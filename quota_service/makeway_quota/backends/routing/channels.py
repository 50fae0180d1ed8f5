"""Split the channel of the service, so that each of several backends reads the reports of its own workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..base import Key
from ..remote.channel import Channel
from ..remote.workers import WorkerStatus

IsOwn = Callable[[Key], bool]
"""Whether an attempt belongs to a backend."""


class SplitChannel:
    """The channel, and which changes each backend has not read yet."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._unread: list[set[Key]] = []

    def part(self, is_own: IsOwn) -> Channel:
        """Return the channel of the attempts for which `is_own` holds."""
        self._unread.append(set())
        return _ChannelPart(self, len(self._unread) - 1, is_own)

    def changed(self, number: int, is_own: IsOwn) -> set[Key]:
        """Return what changed for one backend since it read last; the others still get what is theirs."""
        changed = self.channel.changed()
        for unread in self._unread:
            unread |= changed
        mine, self._unread[number] = self._unread[number], set()
        return {key for key in mine if is_own(key)}


class _ChannelPart:
    """What one backend sees of the channel; see `Channel` for what each method guarantees."""

    def __init__(self, split: SplitChannel, number: int, is_own: IsOwn) -> None:
        self._split, self._number, self._is_own = split, number, is_own
        whole = split.channel
        self.on_change, self.refresh, self.forget = whole.on_change, whole.refresh, whole.forget
        self.record_final_reports, self.credentials = whole.record_final_reports, whole.credentials
        self.log, self.log_gap, self.output = whole.log, whole.log_gap, whole.output

    def worker_statuses(self) -> Mapping[Key, Mapping[int, WorkerStatus]]:
        statuses = self._split.channel.worker_statuses()
        return {key: workers for key, workers in statuses.items() if self._is_own(key)}

    def changed(self) -> set[Key]:
        return self._split.changed(self._number, self._is_own)

    def silent(self, seconds: float) -> Mapping[Key, int]:
        return {key: worker for key, worker in self._split.channel.silent(seconds).items() if self._is_own(key)}
