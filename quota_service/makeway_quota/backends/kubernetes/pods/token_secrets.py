"""Keep the first tokens of workers in Secrets, one for all attempts that start together: each Secret costs a
request to the API server.

A pod names its Secret and the key of its token. The Secret is written once the pods of all its attempts are created,
has the tokens of these pods alone, and goes with the last of them: pods that it was not written for never run, and are
made anew. A token opens nothing but its worker, and only while the attempt lives.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence

from makeway_api.pods import INSTANCE, MANAGED_BY, MANAGER

from ...base import Key
from ..api.client import ApiStatusError, Object
from .manifest import owned, token_key

MAX_STARTS = 16
"""that share a Secret: it is written when the slowest of them has its pods"""
MAX_TOKENS = 256
"""in a Secret that attempts share, which stays far below the 1 MiB that Kubernetes stores"""

Create = Callable[[Object], Awaitable[Object]]


class TokenSecret:
    """One Secret, and the starts that wait for it."""

    def __init__(self, create: Create, instance: str) -> None:
        self.name = f"makeway-tokens-{secrets.token_hex(8)}"
        self.starts = 0
        self.workers = 0
        """of these starts"""
        self.open = True
        """whether more starts may share it"""
        self._create = create
        self._instance = instance
        self._tokens: dict[str, str] = {}
        self._owners: dict[Key, Sequence[Object]] = {}
        """the pods that it is for, by attempt"""
        self._starting = 0
        self._created = asyncio.Event()
        """no start of it is creating pods"""
        self._writing: asyncio.Task[None] | None = None

    def serves(self, key: Key) -> bool:
        """Whether the pods of a repeated start may name it: what is written, or may be, is never changed."""
        return self._writing is None or key in self._owners

    def begin(self, workers: int) -> None:
        """Count a start that creates its pods."""
        self.starts += 1
        self.workers += workers
        self._starting += 1
        self._created.clear()

    def end(self, key: Key, tokens: Mapping[str, str], pods: Sequence[Object]) -> None:
        """Count a start no more, with its pods if they are created; the last one has the Secret written."""
        self.open = False
        if pods and self._writing is None:
            self._owners[key] = pods
            self._tokens |= tokens
        self._starting -= 1
        if self._starting:
            return
        self._created.set()
        if self._owners and (self._writing is None or _failed(self._writing)):
            self._writing = asyncio.create_task(self._write())
            self._writing.add_done_callback(_failed)

    async def written(self) -> None:
        """Return when the Secret is there; ApiStatusError or ApiUnreachable where it cannot be written."""
        await self._created.wait()
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def _write(self) -> None:
        owners = [pod for pods in self._owners.values() for pod in pods]
        try:
            await self._create(token_secret(self.name, self._instance, self._tokens, owners))
        except ApiStatusError as refusal:
            if refusal.reason != "AlreadyExists":  # its name is random: an earlier answer was lost
                raise


class StartTokens:
    """The tokens of one start, in a Secret that other starts share; `abandon` them at the end in any case."""

    def __init__(self, secret: TokenSecret, key: Key, tokens: Mapping[str, str], before: str | None) -> None:
        self.secret = secret
        self.before = before
        """the name of the Secret of an earlier try, where that was written without these tokens"""
        self._key = key
        self._tokens = tokens
        self._ended = False
        secret.begin(len(tokens))

    async def written(self, pods: Sequence[Object]) -> None:
        """Return when the Secret is there, now that the pods are created; it goes when they all have."""
        self._ended = True
        self.secret.end(self._key, self._tokens, pods)
        await self.secret.written()

    def abandon(self) -> None:
        """Take out a start that created no pods: the Secret is written without its tokens."""
        if not self._ended:
            self._ended = True
            self.secret.end(self._key, {}, ())


class TokenSecrets:
    """The Secrets of the starts under way, and of those that broke off without an answer."""

    def __init__(self, create: Create, instance: str) -> None:
        self._create = create
        self._instance = instance
        self._open: TokenSecret | None = None
        self._of: dict[Key, TokenSecret] = {}
        """by the attempts whose pods may name it, until it is there"""

    def for_start(self, key: Key, tokens: list[str]) -> StartTokens:
        """Return the tokens of a start, in the Secret of an earlier try, or in that of the other starts now."""
        tried = self._of.get(key)
        result = tried if tried is not None and tried.serves(key) else self._room(len(tokens))
        self._of[key] = result
        by_key = {token_key(*key, number): token for number, token in enumerate(tokens)}
        return StartTokens(result, key, by_key, None if tried is None or tried is result else tried.name)

    def done(self, key: Key) -> None:
        """Forget an attempt: its Secret is there, or no pod names it."""
        self._of.pop(key, None)

    def clear(self) -> None:
        """Forget all: another replica starts attempts now."""
        self._of.clear()

    def _room(self, tokens: int) -> TokenSecret:
        result = self._open
        full = result is None or result.starts >= MAX_STARTS or result.workers + tokens > MAX_TOKENS
        if result is None or full or not result.open:
            result = self._open = TokenSecret(self._create, self._instance)
        return result


def token_secret(name: str, instance: str, tokens: Mapping[str, str], owners: list[Object]) -> Object:
    """Return a Secret with tokens by their keys; it goes with the last of the pods `owners`."""
    labels = {MANAGED_BY: MANAGER, INSTANCE: instance}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owned(name, labels, owners),
        "stringData": dict(tokens),
    }


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
