"""Keep the first tokens of workers in Secrets, one for all attempts that start together: each is a request.

A pod names its Secret and the key of its token. The Secret is written once the pods of all its attempts are created,
and goes with the last of them. A token opens nothing but its worker, and only while the attempt lives.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping

from makeway_api.pod_labels import INSTANCE, MANAGED_BY, MANAGER

from ..base import Key
from .client import ApiRefusal, Object
from .manifest import owned, token_key, token_secret_of

MOST_STARTS = 16
"""that share a Secret: it is written when the slowest of them has its pods"""
MOST_TOKENS = 256
"""in a Secret that attempts share, which stays far below the 1 MiB that Kubernetes stores"""

Create = Callable[[Object], Awaitable[Object]]


class TokenSecret:
    """One Secret, and the starts that wait for it."""

    def __init__(self, create: Create, instance: str) -> None:
        self.name = f"makeway-tokens-{secrets.token_hex(8)}"
        self.tokens: dict[str, str] = {}
        self.starts = 0
        self.open = True
        """whether more starts may share it"""
        self._create = create
        self._instance = instance
        self._owners: dict[str, Object] = {}
        self._starting = 0
        self._created = asyncio.Event()
        """no start of it is creating pods"""
        self._writing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Count a start that creates its pods."""
        self.starts += 1
        self._starting += 1
        self._created.clear()

    def end(self, owner: Object | None) -> None:
        """Count a start no more, with a pod of its if they are created; the last one has the Secret written."""
        self.open = False
        if owner is not None:
            self._owners[owner["metadata"]["uid"]] = owner
        self._starting -= 1
        if self._starting:
            return
        self._created.set()
        if self._owners and (self._writing is None or _failed(self._writing)):
            self._writing = asyncio.create_task(self._write())
            self._writing.add_done_callback(_failed)

    async def written(self) -> None:
        """Return when the Secret is there; ApiRefusal or ApiUnreachable where it cannot be written."""
        await self._created.wait()
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def _write(self) -> None:
        await _create_once(
            self._create, token_secret(self.name, self._instance, self.tokens, list(self._owners.values()))
        )


class TokenPart:
    """What one start has to do with its Secret; `leave` it at the end in any case."""

    def __init__(self, secret: TokenSecret) -> None:
        self.secret = secret
        self._ended = False
        secret.begin()

    async def written(self, owner: Object) -> None:
        """Return when the Secret is there, now that the pods are created; it may go with `owner`, one of them."""
        self._ended = True
        self.secret.end(owner)
        await self.secret.written()

    def leave(self) -> None:
        """End the part of a start that did not come that far: the others go on without it."""
        if not self._ended:
            self._ended = True
            self.secret.end(None)


class TokenSecrets:
    """The Secrets of the starts under way, and of those that broke off without an answer."""

    def __init__(self, create: Create, instance: str) -> None:
        self._create = create
        self._instance = instance
        self._open: TokenSecret | None = None
        self._of: dict[Key, TokenSecret] = {}
        """by the attempts whose pods may name it, until it is there"""

    def part(self, key: Key, tokens: list[str]) -> TokenPart:
        """Return the part of a start, in the Secret of an earlier try or in that of the other starts of the moment."""
        found = self._of.get(key) or self._room(len(tokens))
        found.tokens.update({token_key(*key, number): token for number, token in enumerate(tokens)})
        self._of[key] = found
        return TokenPart(found)

    async def write(self, key: Key, tokens: list[str], pod: Object) -> None:
        """Write the Secret that a pod of an earlier process names, unless it is there."""
        by_key = {token_key(*key, number): token for number, token in enumerate(tokens)}
        await _create_once(self._create, token_secret(token_secret_of(pod), self._instance, by_key, [pod]))

    def done(self, key: Key) -> None:
        """Forget an attempt: its Secret is there, or no pod names it."""
        self._of.pop(key, None)

    def _room(self, tokens: int) -> TokenSecret:
        found = self._open
        full = found is None or found.starts >= MOST_STARTS or len(found.tokens) + tokens > MOST_TOKENS
        if found is None or full or not found.open:
            found = self._open = TokenSecret(self._create, self._instance)
        return found


def token_secret(name: str, instance: str, tokens: Mapping[str, str], owners: list[Object]) -> Object:
    """Return a Secret with tokens by their keys; it goes with the last of the pods `owners`."""
    labels = {MANAGED_BY: MANAGER, INSTANCE: instance}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owned(name, labels, owners),
        "stringData": dict(tokens),
    }


async def _create_once(create: Create, manifest: Object) -> None:
    """Create an object that may be there already, as an earlier answer was lost."""
    try:
        await create(manifest)
    except ApiRefusal as refusal:
        if refusal.reason != "AlreadyExists":
            raise


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
