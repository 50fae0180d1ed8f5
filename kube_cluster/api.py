"""Requests to the cluster's API server, in plain dictionaries; for the cluster itself and for tests."""

from __future__ import annotations

import base64
import json
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

TIMEOUT_SECONDS = 90.0
"""Longest wait for the API server: one that shares the machine with many tests answers late"""
Object = dict[str, Any]

GPU = "nvidia.com/gpu"
"""The extended resource that nodes offer and pods request, one per GPU."""


class ApiProblem(Exception):
    """The API server refused a request; `status` is its HTTP status, `reason` its one-word reason."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


class Api:
    """The API server as one user sees it."""

    def __init__(self, kubeconfig: Path, token: str | None = None) -> None:
        config = json.loads(kubeconfig.read_text(encoding="utf-8"))
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context(cadata=_decoded(cluster["certificate-authority-data"]))
        if token is None:
            with tempfile.NamedTemporaryFile("w") as file:  # Python reads certificates from files only
                file.write(_decoded(user["client-certificate-data"]) + _decoded(user["client-key-data"]))
                file.flush()
                context.load_cert_chain(file.name)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._kubeconfig = kubeconfig
        self._others: list[Api] = []
        self._client = httpx2.Client(
            base_url=cluster["server"], verify=context, headers=headers, timeout=TIMEOUT_SECONDS, trust_env=False
        )

    def with_token(self, token: str) -> Api:
        """Return the same API server as the owner of a token sees it; it is closed with this one."""
        self._others.append(Api(self._kubeconfig, token))
        return self._others[-1]

    def ready(self) -> bool:
        """Whether the API server answers and says that it is ready."""
        try:
            return self._client.get("/readyz").status_code == 200
        except httpx2.HTTPError:
            return False

    def get(self, path: str, **query: str) -> Object:
        """Return an object, or a list of them."""
        return self._send("GET", path, None, query)

    def items(self, path: str, **query: str) -> list[Object]:
        """Return the objects of a list."""
        return list(self.get(path, **query)["items"])

    def text(self, path: str, **query: str) -> str:
        """Return an answer that is no JSON, such as a log."""
        return self._answer("GET", path, None, query).text

    def watch(self, path: str, seconds: int, **query: str) -> Iterator[Object]:
        """Yield what is in a list, then its changes, as events with a type and an object; it ends after a while."""
        query |= {"watch": "true", "timeoutSeconds": str(seconds)}
        with self._client.stream("GET", path, params=query, timeout=seconds + 10) as answer:
            if answer.status_code >= 400:
                answer.read()
                raise _problem(answer)
            for line in answer.iter_lines():
                yield json.loads(line)

    def create(self, path: str, body: Object, **query: str) -> Object:
        """Create an object in a list's path and return it as it was stored; with dryRun="All", as it would be."""
        return self._send("POST", path, body, query)

    def merge(self, path: str, change: Object) -> Object:
        """Change the given fields of an object and return it."""
        return self._send("PATCH", path, change, {})

    def delete(self, path: str, **query: str) -> Object:
        """Delete an object, or all objects of a list that the selectors match."""
        return self._send("DELETE", path, None, query)

    def close(self) -> None:
        """Close the connections."""
        while self._others:
            self._others.pop().close()
        self._client.close()

    def _send(self, method: str, path: str, body: Object | None, query: dict[str, str]) -> Object:
        result: Object = self._answer(method, path, body, query).json()
        return result

    def _answer(self, method: str, path: str, body: Object | None, query: dict[str, str]) -> httpx2.Response:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        content = None if body is None else json.dumps(body)
        answer = self._client.request(method, path, content=content, params=query, headers={"Content-Type": kind})
        if answer.status_code >= 400:
            raise _problem(answer)
        return answer


def _problem(answer: httpx2.Response) -> ApiProblem:
    try:
        message = answer.json()
        return ApiProblem(answer.status_code, message.get("reason", ""), message.get("message", ""))
    except ValueError:
        return ApiProblem(answer.status_code, answer.reason_phrase, answer.text[:500])


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()
