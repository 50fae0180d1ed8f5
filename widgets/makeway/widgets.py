"""Show live team usage as a widget: GPUs by kind, my jobs, the queue, reclaims on their way."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ipywidgets
from IPython import get_ipython

from .connection import client
from .feed import FEED, Feed
from .teams import Picture, live

LONGEST = 3600.0
"""Seconds without a cell run or a press of the button after which a widget stops by itself: each update counts as
activity of the kernel, so that the Hub's culler would never end an idle server beside a busy cluster"""
STOP = "Stop updating; the last state stays visible"


class TeamUsage(ipywidgets.VBox):  # type: ignore[misc]
    """The live widget; closing the last one ends the event stream behind it.

    It is sent to the browser again only where what it says has changed.
    """

    def __init__(self, feed: Feed = FEED, clock: Callable[[], float] = time.monotonic) -> None:
        self.html = ipywidgets.HTML(value=str(live(feed.picture)))
        self._feed = feed
        self._clock = clock
        self._used = clock()
        self._stop = ipywidgets.Button(description="Stop", tooltip=STOP)
        self._stop.layout = ipywidgets.Layout(width="auto", height="24px", align_self="flex-start")
        self._stop.on_click(self._pressed)
        super().__init__([self.html, self._stop])
        if (shell := get_ipython()) is not None:
            shell.events.register("pre_run_cell", self.used)
        feed.listen(self.show)

    def used(self, *_: object) -> None:
        """Note that a person uses the kernel."""
        self._used = self._clock()

    def show(self, picture: Picture) -> None:
        """Draw a picture, unless it is the one shown; stop where the kernel was not used for long."""
        if self._clock() - self._used > LONGEST:
            self._feed.leave(self.show)
            self._stop.description, self._stop.tooltip = "Resume", "Stopped after an hour without a cell: update again"
            return
        text = str(live(picture))
        if text != self.html.value:
            self.html.value = text

    def close(self) -> None:
        """Stop updating and remove the widget."""
        self._feed.leave(self.show)
        if (shell := get_ipython()) is not None:
            with suppress(ValueError):
                shell.events.unregister("pre_run_cell", self.used)
        super().close()

    def _pressed(self, button: Any) -> None:
        if button.description == "Stop":
            self._feed.leave(self.show)
            button.description, button.tooltip = "Resume", "Update again"
        else:
            self.used()
            button.description, button.tooltip = "Stop", STOP
            self._feed.listen(self.show)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Return the widget, and its content as plain HTML for a saved notebook."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if isinstance(bundle, dict):
            bundle["text/html"] = self.html.value
        return bundle


def usage() -> TeamUsage:
    """Return a live view of my teams' GPUs; raise Refused where no service is configured."""
    client()
    return TeamUsage()
