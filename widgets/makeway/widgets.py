"""Show live team usage as a widget: GPUs by kind, my jobs, the queue, reclaims on their way."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import ipywidgets

from .connection import client
from .feed import FEED, Feed
from .teams import Picture, live


class TeamUsage(ipywidgets.VBox):  # type: ignore[misc]
    """The live widget; closing the last one ends the event stream behind it."""

    def __init__(self, feed: Feed = FEED) -> None:
        self.html = ipywidgets.HTML(value=str(live(feed.picture, datetime.now(UTC))))
        self._feed = feed
        self._stop = ipywidgets.Button(description="Stop", tooltip="Stop updating; the last state stays visible")
        self._stop.layout = ipywidgets.Layout(width="auto", height="24px", align_self="flex-start")
        self._stop.on_click(self._pressed)
        super().__init__([self.html, self._stop])
        feed.listen(self.show)

    def show(self, picture: Picture) -> None:
        """Draw a picture, unless it is the one shown."""
        text = str(live(picture, datetime.now(UTC)))
        if text != self.html.value:
            self.html.value = text

    def close(self) -> None:
        """Stop updating and remove the widget."""
        self._feed.leave(self.show)
        super().close()

    def _pressed(self, button: Any) -> None:
        self._feed.leave(self.show)
        button.disabled = True
        button.description = "Stopped"

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
