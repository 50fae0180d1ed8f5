"""Show my teams' GPUs live: by kind, my jobs, the queue, reclaims on their way."""

from __future__ import annotations

from collections.abc import Sequence

from . import teams
from .blocks import Block, bundle
from .connection import client
from .feed import FEED, Feed
from .live import CELLS, Bundle, Cells, LiveOutput
from .teams import Picture

TIMEOUT = 2.0
"""Seconds that the first picture may take; then the output says that nothing is known yet"""
PAUSED = "Paused after an hour without a cell; run any cell to go on."
STOPPED = "Stopped."
STATIC = "This front end cannot update an output."


class LiveUsage:
    """The GPUs of my teams, shown where it is the value of a cell and kept up to date there.

    It changes only where what it says has changed. `stop()` ends that, and so does its cell when it is run again. An
    hour after the last cell it pauses until the next one.
    """

    def __init__(self, feed: Feed = FEED, cells: Cells = CELLS) -> None:
        self._feed = feed
        self._cells = cells
        self._output: LiveOutput | None = None
        self._listening = False
        self._paused = ""

    def show(self, picture: Picture) -> None:
        """Show a picture, unless it is the one shown."""
        if self._cells.idle:
            self._pause(PAUSED)
        elif self._output is not None:
            self._output.update(self._bundles(picture))

    def redraw(self) -> None:
        """Show the newest picture; called before each cell."""
        if self._paused == PAUSED:
            self._listen()
        if self._output is not None:
            self._output.update(self._bundles(self._feed.picture))
            self._output.repeat_missed()

    def stop(self) -> None:
        """Stop updating; the last state stays visible, and says so."""
        self._pause(STOPPED)
        self._cells.drop(self)

    close = stop

    def _listen(self) -> None:
        self._paused = ""
        if not self._listening:
            self._listening = True
            self._feed.listen(self.show)

    def _pause(self, why: str) -> None:
        if self._listening:
            self._listening = False
            self._feed.leave(self.show, wait=False)
        self._paused = why
        if self._output is not None:
            self._output.update(self._bundles(self._feed.picture))

    def _bundles(self, picture: Picture) -> list[Bundle]:
        return [bundle(part) for part in self._parts(picture)]

    def _parts(self, picture: Picture) -> Sequence[list[Block]]:
        return teams.live_parts(picture, self._paused)

    def __repr__(self) -> str:
        return "\n".join(text for part in self._bundles(self._feed.picture) if (text := part["text/plain"]))

    def _ipython_display_(self) -> None:
        """Show it below this cell; where it was shown before, it stays as it is."""
        self._listen()
        picture = self._feed.first(TIMEOUT)
        self._output = None
        if self._cells.publisher() is None:
            self._pause(STATIC)
        else:
            self._cells.keep(self)
        if not self._cells.in_kernel:
            raise NotImplementedError  # a terminal shows its text
        self._output = LiveOutput(self._bundles(picture))


def usage() -> LiveUsage:
    """Return a live view of my teams' GPUs; raise Refused where no service is configured."""
    client()
    return LiveUsage()
