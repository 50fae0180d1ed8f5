"""Define every route of the API once: its request, and the model of its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import quote
from uuid import uuid4

import httpx2
from pydantic import TypeAdapter, ValidationError

from .errors import MakewayError
from .models import (
    Credential,
    Decision,
    Deployment,
    DeploymentDraft,
    DeploymentRequest,
    DryRun,
    Job,
    JobPage,
    JobRequest,
    JobStorage,
    LogChunk,
    MachineDetail,
    MachineLogEntry,
    MachinePage,
    Me,
    MoveRequest,
    OfferTable,
    PersonWork,
    Policy,
    PolicyCheck,
    PolicyRequest,
    PolicyVersion,
    Pool,
    Preview,
    Problem,
    Profile,
    Resealed,
    Session,
    SessionRequest,
    StorageDelete,
    StorageDeleted,
    StorageGrowth,
    StorageReport,
    Usage,
)

T = TypeVar("T")
J = TypeVar("J")

TIMEOUT = 20.0
"""Seconds for one answer; a long poll adds its own wait."""

MAX_WHY = 1000
"""Characters of the sentence that says why a lease is released."""


class Call(Generic[T]):
    """One request and how to read its answer."""

    def __init__(
        self,
        method: str,
        path: str,
        read: Callable[[httpx2.Response], T],
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        wait: float = 0,
        once: bool = False,
    ) -> None:
        """`once`: send a random Idempotency-Key along, so that the request may be repeated and is carried out once."""
        self.method = method
        self.path = path
        self.read = read
        self.params = {k: v for k, v in (params or {}).items() if v is not None}
        self.content = None if body is None else _dump(body)
        self.timeout = TIMEOUT + wait
        self.headers = {"Idempotency-Key": uuid4().hex} if once else {}


def _dump(body: Any) -> bytes:
    if hasattr(body, "model_dump_json"):
        return body.model_dump_json(exclude_unset=True).encode()  # type: ignore[no-any-return]
    return json.dumps(body).encode()


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _as(kind: Any) -> Callable[[httpx2.Response], Any]:
    def read(response: httpx2.Response) -> Any:
        adapter = _ADAPTERS.get(kind)
        if adapter is None:
            adapter = _ADAPTERS[kind] = TypeAdapter(kind)
        return adapter.validate_json(response.content)

    return read


def _nothing(_: httpx2.Response) -> None:
    return None


def raise_for(response: httpx2.Response) -> None:
    if response.is_success:
        return
    try:
        raise MakewayError.of(Problem.model_validate_json(response.content))
    except ValidationError:
        status = response.status_code
        redirected = 300 <= status < 400  # to a login of the Hub, which answers what the proxy knows no way for
        what = "no reason given"
        if status in (502, 503, 504):
            what = "the service is starting or its proxy cannot reach it"
        elif redirected:
            what = "the proxy was replaced, and does not know the way to it yet; try again in a minute"
        raise MakewayError(
            f"The quota service answered {status} ({what}).",
            code="unreachable" if status >= 502 or redirected else "error",
            status=status,
        ) from None


class Routes(Generic[J]):
    """The routes; the type parameter is what `_do` returns: an answer, or an awaitable of one."""

    def _do(self, call: Call[Any]) -> Any:
        raise NotImplementedError

    def me(self) -> Any:
        """Return the caller → Me."""
        return self._do(Call("GET", "/me", _as(Me)))

    def pools(self) -> Any:
        """Return every pool with its nodes and devices → list[Pool]."""
        return self._do(Call("GET", "/pools", _as(list[Pool])))

    def profiles(self) -> Any:
        """Return the profiles that the caller may use → list[Profile]."""
        return self._do(Call("GET", "/profiles", _as(list[Profile])))

    def policies(self) -> Any:
        """Return the policies of the caller's teams → list[Policy]."""
        return self._do(Call("GET", "/policies", _as(list[Policy])))

    def offers(self, user: str | None = None, kind: str | None = None) -> Any:
        """Return what a user can have now, whose GPUs it would take, and why not → OfferTable."""
        return self._do(Call("GET", "/offers", _as(OfferTable), params={"user": user, "kind": kind}))

    def request_session(self, request: SessionRequest) -> Any:
        """Request a lease → Session (scope `reserve`)."""
        return self._do(Call("POST", "/sessions", _as(Session), body=request, once=True))

    def sessions(self, all: bool = False) -> Any:
        """Return the caller's sessions → list[Session]."""
        return self._do(Call("GET", "/sessions", _as(list[Session]), params={"all": "1" if all else None}))

    def session(self, id: str, wait: float | None = None, version: int | None = None) -> Any:
        """Return a session; with `wait`, as soon as it is newer than `version` → Session."""
        params = {"wait": wait, "version": version}
        return self._do(Call("GET", f"/sessions/{_q(id)}", _as(Session), params=params, wait=wait or 0))

    def session_started(self, id: str) -> Any:
        """Report that the notebook server of a lease is up → Session."""
        return self._do(Call("POST", f"/sessions/{_q(id)}/started", _as(Session)))

    def renew(self, id: str) -> Any:
        """Renew a lease → Session; MakewayError with status 410 if it has ended."""
        return self._do(Call("POST", f"/sessions/{_q(id)}/renew", _as(Session)))

    def release(self, id: str, why: str = "") -> Any:
        """Release a lease, `why` in a sentence; repeating it is harmless."""
        return self._do(Call("DELETE", f"/sessions/{_q(id)}", _nothing, params={"why": why[:MAX_WHY] or None}))

    def submit(self, request: JobRequest) -> Any:
        """Submit a training job → Job; repeated where no answer comes, without submitting it twice."""
        return self._do(Call("POST", "/jobs", _as(Job), body=request, once=True))

    def dry_run(self, request: JobRequest) -> Any:
        """Return what submitting would do → DryRun."""
        return self._do(Call("POST", "/jobs", _as(DryRun), body=request.model_copy(update={"dry_run": True})))

    def jobs(
        self,
        team: str | None = None,
        state: str | None = None,
        mine: bool = False,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Any:
        """Return the jobs that the caller may see, newest first → JobPage."""
        params = {"team": team, "state": state, "mine": "1" if mine else None, "limit": limit, "cursor": cursor}
        return self._do(Call("GET", "/jobs", _as(JobPage), params=params))

    def job(self, id: str, wait: float | None = None, version: int | None = None) -> Any:
        """Return a job; with `wait`, as soon as it is newer than `version` → Job."""
        params = {"wait": wait, "version": version}
        return self._do(Call("GET", f"/jobs/{_q(id)}", _as(Job), params=params, wait=wait or 0))

    def cancel(self, id: str) -> Any:
        """Cancel a job → Job."""
        return self._do(Call("POST", f"/jobs/{_q(id)}/cancel", _as(Job)))

    def resume(self, id: str) -> Any:
        """Requeue an ended job, from its checkpoint → Job."""
        return self._do(Call("POST", f"/jobs/{_q(id)}/resume", _as(Job)))

    def move(self, id: str, team: str | None = None, profile: str | None = None) -> Any:
        """Move a pending job to the queue of another team, another profile, or both → Job."""
        wanted = {name: value for name, value in (("team", team), ("profile", profile)) if value is not None}
        return self._do(Call("POST", f"/jobs/{_q(id)}/move", _as(Job), body=MoveRequest(**wanted)))

    def clone(self, id: str, n: int = 1, overrides: Mapping[str, Any] | None = None) -> Any:
        """Submit n copies, changed by `overrides` → list[Job]."""
        body = {"n": n, "overrides": dict(overrides or {})}
        return self._do(Call("POST", f"/jobs/{_q(id)}/clone", _as(list[Job]), body=body, once=True))

    def delete_job(self, id: str) -> Any:
        """Delete an ended job for good, with its files, log, result and checkpoints."""
        return self._do(Call("POST", f"/jobs/{_q(id)}/delete", _as(StorageDeleted)))

    def job_storage(self, id: str) -> Any:
        """Return what is kept of a job, by kind and attempt → JobStorage."""
        return self._do(Call("GET", f"/jobs/{_q(id)}/storage", _as(JobStorage)))

    def delete_output(self, id: str, attempt: int) -> Any:
        """Delete the log and the result of an attempt that has ended → StorageDeleted."""
        return self._do(Call("POST", f"/jobs/{_q(id)}/attempts/{attempt}/delete", _as(StorageDeleted)))

    def storage(self) -> Any:
        """Return what is kept for the caller, for an administrator of everybody."""
        return self._do(Call("GET", "/storage", _as(StorageReport)))

    def storage_growth(self) -> Any:
        """Return how what is kept grows → StorageGrowth (administrators)."""
        return self._do(Call("GET", "/storage/growth", _as(StorageGrowth)))

    def delete_storage(self, request: StorageDelete) -> Any:
        """Delete the ended jobs of a person for good."""
        return self._do(Call("POST", "/storage/delete", _as(StorageDeleted), body=request))

    def preempt_test(self, id: str) -> Any:
        """Test the preemption of the caller's own job → Job."""
        return self._do(Call("POST", f"/jobs/{_q(id)}/preempt-test", _as(Job)))

    def job_events(self, id: str) -> Any:
        """Return the decisions about a job, oldest first → list[Decision]."""
        return self._do(Call("GET", f"/jobs/{_q(id)}/events", _as(list[Decision])))

    def logs(
        self,
        id: str,
        attempt: int | None = None,
        offset: int | None = None,
        limit: int | None = None,
        wait: float | None = None,
    ) -> Any:
        """Return part of a job's log; a negative offset counts from the end → LogChunk."""
        params = {"attempt": attempt, "offset": offset, "limit": limit, "wait": wait}
        return self._do(Call("GET", f"/jobs/{_q(id)}/logs", _as(LogChunk), params=params, wait=wait or 0))

    def result(self, id: str) -> Any:
        """Return the pickled result of a job → bytes."""
        return self._do(Call("GET", f"/jobs/{_q(id)}/result", lambda r: r.content))

    def error(self, id: str) -> Any:
        """Return the exception that ended a job → dict with type, message, traceback."""
        return self._do(Call("GET", f"/jobs/{_q(id)}/error", lambda r: r.json()))

    def usage(self) -> Any:
        """Return the present usage of the teams → Usage."""
        return self._do(Call("GET", "/usage", _as(Usage)))

    def decisions(
        self,
        workload: str | None = None,
        team: str | None = None,
        limit: int | None = None,
        before: int | None = None,
    ) -> Any:
        """Return the decision log, newest first → list[Decision]."""
        params = {"workload": workload, "team": team, "limit": limit, "before": before}
        return self._do(Call("GET", "/decisions", _as(list[Decision]), params=params))

    def cancel_all_of(self, name: str) -> Any:
        """Cancel every job of a person → PersonWork (administrators)."""
        return self._do(Call("POST", "/people/cancel", _as(PersonWork), body={"name": name}))

    def give_work(self, name: str, to: str) -> Any:
        """File the work of a deleted person under the name of a user → PersonWork (administrators)."""
        return self._do(Call("POST", "/people/give", _as(PersonWork), body={"name": name, "to": to}))

    def policy(self) -> Any:
        """Return the policy document in force → PolicyVersion."""
        return self._do(Call("GET", "/policy", _as(PolicyVersion)))

    def policy_history(self) -> Any:
        """Return every version, newest first → list[PolicyVersion]."""
        return self._do(Call("GET", "/policy/history", _as(list[PolicyVersion])))

    def policy_version(self, version: int) -> Any:
        """Return one version with its document → PolicyVersion."""
        return self._do(Call("GET", f"/policy/versions/{version}", _as(PolicyVersion)))

    def policy_validate(self, document: str) -> Any:
        """Return what is wrong with a document, and what it would change → PolicyCheck."""
        return self._do(Call("POST", "/policy/validate", _as(PolicyCheck), body=PolicyRequest(document=document)))

    def policy_preview(self, document: str) -> Any:
        """Return which workloads would start, be evicted, wait or be refused → Preview."""
        return self._do(Call("POST", "/policy/preview", _as(Preview), body=PolicyRequest(document=document)))

    def policy_apply(self, document: str, comment: str = "", base: int | None = None) -> Any:
        """Apply a document → PolicyVersion."""
        request = PolicyRequest(document=document, comment=comment, base=base)
        return self._do(Call("PUT", "/policy", _as(PolicyVersion), body=request))

    def credentials(self) -> Any:
        """Return the credentials of the caller's teams, to administrators all, without values → list[Credential]."""
        return self._do(Call("GET", "/credentials", _as(list[Credential])))

    def credential_save(self, name: str, kind: str, values: Mapping[str, str], team: str | None = None) -> Any:
        """Keep a credential in place of the one of its team and name; team "": of all teams → Credential."""
        body: dict[str, Any] = {"kind": kind, "values": dict(values)}  # a model shows no secret, not even to JSON
        if team is not None:
            body["team"] = team
        return self._do(Call("PUT", f"/credentials/{_q(name)}", _as(Credential), body=body))

    def credential_delete(self, name: str, team: str | None = None) -> Any:
        """Remove a credential of a team, "" of all teams; without `team` the only one of its name → None."""
        return self._do(Call("DELETE", f"/credentials/{_q(name)}", _nothing, params={"team": team}))

    def credential_enable(self, name: str, team: str) -> Any:
        """Enable a credential that was disabled when its team left the policy → Credential."""
        return self._do(Call("POST", f"/credentials/{_q(name)}/enable", _as(Credential), params={"team": team}))

    def credentials_reseal(self) -> Any:
        """Seal all credentials with the first key of the service → Resealed."""
        return self._do(Call("POST", "/credentials/reseal", _as(Resealed)))

    def deployments(self) -> Any:
        """Return all deployments of machines, without documents → list[Deployment] (administrators)."""
        return self._do(Call("GET", "/deployments", _as(list[Deployment])))

    def deployment(self, name: str) -> Any:
        """Return a deployment with its document → Deployment."""
        return self._do(Call("GET", f"/deployments/{_q(name)}", _as(Deployment)))

    def deployment_validate(self, document: str) -> Any:
        """Return what is wrong with the document of a deployment, and what it would change → PolicyCheck."""
        request = DeploymentRequest(document=document)
        return self._do(Call("POST", "/deployments/validate", _as(PolicyCheck), body=request))

    def deployment_save(self, document: str, version: int | None = None) -> Any:
        """Create a deployment or replace its document → Deployment; `version` is the one that was edited."""
        request = DeploymentRequest(document=document, version=version)
        return self._do(Call("PUT", "/deployments", _as(Deployment), body=request))

    def deployment_pause(self, name: str, version: int | None = None) -> Any:
        """Launch nothing any more, and end what runs → Deployment."""
        return self._do(Call("POST", f"/deployments/{_q(name)}/pause", _as(Deployment), params={"version": version}))

    def deployment_resume(self, name: str, version: int | None = None) -> Any:
        """Launch machines again when work waits → Deployment."""
        return self._do(Call("POST", f"/deployments/{_q(name)}/resume", _as(Deployment), params={"version": version}))

    def deployment_duplicate(self, name: str) -> Any:
        """Return the document of a deployment under a free name → DeploymentDraft."""
        return self._do(Call("GET", f"/deployments/{_q(name)}/duplicate", _as(DeploymentDraft)))

    def deployment_delete(self, name: str, version: int | None = None) -> Any:
        """Begin to delete a deployment, whose machines end first → Deployment."""
        return self._do(Call("DELETE", f"/deployments/{_q(name)}", _as(Deployment), params={"version": version}))

    def deployment_machines(
        self, name: str, state: Sequence[str] | None = None, limit: int | None = None, cursor: str | None = None
    ) -> Any:
        """Return a page of the machines of a deployment, newest first → MachinePage."""
        params = {"state": None if state is None else list(state), "limit": limit, "cursor": cursor}
        return self._do(Call("GET", f"/deployments/{_q(name)}/machines", _as(MachinePage), params=params))

    def deployment_machine(self, name: str, id: str) -> Any:
        """Return a machine with its history and outputs → MachineDetail."""
        return self._do(Call("GET", f"/deployments/{_q(name)}/machines/{_q(id)}", _as(MachineDetail)))

    def deployment_console(self, name: str, id: str) -> Any:
        """Read what the console of a machine says now from its provider → MachineDetail."""
        return self._do(Call("POST", f"/deployments/{_q(name)}/machines/{_q(id)}/console", _as(MachineDetail)))

    def deployment_log(self, name: str, limit: int | None = None, before: int | None = None) -> Any:
        """Return the log of a deployment, newest first → list[MachineLogEntry]."""
        params = {"limit": limit, "before": before}
        return self._do(Call("GET", f"/deployments/{_q(name)}/log", _as(list[MachineLogEntry]), params=params))


def _q(part: str) -> str:
    return quote(str(part), safe="")
