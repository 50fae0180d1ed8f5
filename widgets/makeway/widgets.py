"""Live team usage in a notebook: own, in quota, borrowed, lent and free GPUs, my jobs, the queue, who makes way."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import ipywidgets

from .connection import client
from .feed import FEED, Feed
from .teams import Picture, live


class TeamUsage(ipywidgets.VBox):  # type: ignore[misc]
    """The live widget; `close()` ends it, and the last one closed ends the stream behind it."""

    def __init__(self, feed: Feed = FEED) -> None:
        self.html = ipywidgets.HTML(value=live(feed.picture, datetime.now(UTC)))
        self._feed = feed
        self._stop = ipywidgets.Button(description="Stop", tooltip="Stop following; the last picture stays")
        self._stop.layout = ipywidgets.Layout(width="auto", height="24px", align_self="flex-start")
        self._stop.on_click(self._pressed)
        super().__init__([self.html, self._stop])
        feed.listen(self.show)

    def show(self, picture: Picture) -> None:
        """Draw a picture, if it differs from what is there."""
        text = live(picture, datetime.now(UTC))
        if text != self.html.value:
            self.html.value = text

    def close(self) -> None:
        """Stop following and remove the widget."""
        self._feed.leave(self.show)
        super().close()

    def _pressed(self, button: Any) -> None:
        self._feed.leave(self.show)
        button.disabled = True
        button.description = "Stopped"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and its content as plain HTML for a saved notebook."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if isinstance(bundle, dict):
            bundle["text/html"] = self.html.value
        return bundle


def usage() -> TeamUsage:
    """A live view of my teams' GPUs; Refused with one sentence where there is no service to ask."""
    client()
    return TeamUsage()
