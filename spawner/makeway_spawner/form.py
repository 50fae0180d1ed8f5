"""Offer the spawn form: the picker with present offers, and the options read back from it.

The base class of `LeaseMixin`: nothing of a lease. The Hub calls it for the spawn page and for a posted form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from makeway_api.client import AsyncClient
from makeway_api.errors import MakewayError
from makeway_api.models import OfferTable
from traitlets import List, Unicode, default
from traitlets.config import LoggingConfigurable

from .options import Choice, check, read_form, read_options, refuse_fractions, without_images
from .picker import Picker
from .refusal import Refused, refusal_of
from .service import LAST_OFFERS, client_for, is_unavailable

if TYPE_CHECKING:
    from jupyterhub.spawner import Spawner as _Spawner
else:
    _Spawner = LoggingConfigurable


class SpawnForm(_Spawner):  # type: ignore[misc]
    """The spawn page of a spawner with leases."""

    whole_gpus_only = False
    """Whether profiles with a fraction of a GPU are refused, because the spawner's platform has whole devices only."""

    offers_images = False
    """Whether notebooks run in containers, so that the picker offers the images of profiles."""

    makeway_api_url = Unicode(
        "http://127.0.0.1:8765/services/makeway",
        help="Where the Hub itself reaches the quota service (not through the proxy).",
    ).tag(config=True)
    makeway_url = Unicode(
        "", help="Where notebooks reach the quota service (their MAKEWAY_URL); empty: `makeway_api_url`."
    ).tag(config=True)
    makeway_token = Unicode("", help="The Hub's own token at the quota service (scope custom:makeway:reserve).").tag(
        config=True
    )
    makeway_public_path = Unicode(
        "/services/makeway/", help="The quota service's path as browsers see it, for live numbers and links."
    ).tag(config=True)
    cpu_profiles = List(
        Unicode(),
        ["cpu"],
        help="Profiles without GPUs, offered even while the quota service does not answer.",
    ).tag(config=True)

    @property
    def quota_client(self) -> AsyncClient:
        """The client of the quota service that all spawners of this Hub share."""
        return client_for(self.makeway_api_url, self.makeway_token)

    @default("options_form")
    def _default_options_form(self) -> Any:
        return self.render_options_form

    @default("options_from_form")
    def _default_options_from_form(self) -> Any:
        return self.parse_options_form

    @default("apply_user_options")
    def _default_apply_user_options(self) -> Any:
        return lambda spawner, options: None  # read and checked in run_pre_spawn_hook, whose refusals have messages

    async def render_options_form(self, spawner: Any) -> str:
        """Return the HTML of the spawn form with the user's present offers."""
        # what a start link preselects, as the Hub's page read it from the query
        link = getattr(getattr(self, "handler", None), "makeway_link", None) or {}
        picker = Picker(
            self.user.name, self._base_url(), self.makeway_public_path, bool(getattr(self.user, "admin", False))
        )
        try:
            table = await self._offers()
        except MakewayError as error:
            self.log.warning("No offers for the spawn page of %s: %s", self.user.name, error.message)
            names = LAST_OFFERS.without_gpus(self.cpu_profiles)
            return picker.without_service(error.message, {name: LAST_OFFERS.profile_title(name) for name in names})
        return picker.render(table, self._last_choice(), link)

    async def parse_options_form(self, form: dict[str, Any]) -> dict[str, Any]:
        """Return the options that the Hub stores for a posted form; raise Refused where they cannot be had."""
        choice = read_form(form)
        try:
            table = await self._offers()
        except MakewayError as error:
            if is_unavailable(error) and LAST_OFFERS.needs_no_gpu(choice.profile, self.cpu_profiles):
                return choice.options()
            raise refusal_of(error) from error
        return check(choice, table).options()

    async def _offers(self) -> OfferTable:
        table = await self.quota_client.offers(user=self.user.name, kind="session")
        LAST_OFFERS.update(table)
        if not self.offers_images:
            table = without_images(table)
        return refuse_fractions(table) if self.whole_gpus_only else table

    def _last_choice(self) -> Choice | None:
        try:
            return read_options((self.orm_spawner and self.orm_spawner.user_options) or {})
        except Refused:
            return None

    def _base_url(self) -> str:
        return str(self.hub.base_url) if self.hub else "/hub/"

    @property
    def makeway_title(self) -> str:
        """What starts, in titles, for the Hub's pages: `1 GPU · R&D · preemptible`; empty if unknown."""
        choice = self._last_choice()
        if choice is None:
            return ""
        profile, team = self._titles(choice)
        return " · ".join(part for part in (profile, team, "preemptible" if choice.preemptible else "") if part)

    def _titles(self, choice: Choice) -> tuple[str, str]:
        return LAST_OFFERS.profile_title(choice.profile), LAST_OFFERS.team_title(choice.team or "")
