"""Find out how to reach one cluster's API server: from a kubeconfig file, or from the pod that Makeway runs in.

Nothing is global: each cluster has a connection of its own.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder in which a pod finds the token of its service account, the cluster's certificate and its namespace."""
UNSUPPORTED = {
    "exec": "a program that prints credentials (exec)",
    "auth-provider": "an auth provider",
    "username": "a user name and a password",
}


class ConnectionInvalid(ValueError):
    """The way to a cluster is not described, or not in a way that is supported; the sentence says what to do."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The address of an API server and the credentials for it."""

    server: str
    context: ssl.SSLContext = field(repr=False)
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    """read again from time to time: the kubelet replaces the tokens of service accounts"""
    namespace: str = "default"
    renewal: str = "its credentials have expired or were revoked"
    """what to do where the API server knows these credentials no more"""


def connection(
    kubeconfig: Path | None = None, context: str = "", environ: Mapping[str, str] | None = None
) -> Connection:
    """Return the connection of a kubeconfig file; without one, that of `KUBECONFIG`, else of the pod we run in."""
    env = os.environ if environ is None else environ
    if kubeconfig is None and env.get("KUBECONFIG"):
        kubeconfig = Path(env["KUBECONFIG"].split(os.pathsep)[0]).expanduser()
    if kubeconfig is not None:
        return from_kubeconfig(kubeconfig, context)
    return from_pod(env)


def from_pod(environ: Mapping[str, str], folder: Path = IN_CLUSTER) -> Connection:
    """Return the connection that a pod's service account has; ConnectionInvalid outside of a pod."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    token, authority, namespace = folder / "token", folder / "ca.crt", folder / "namespace"
    if not host or not token.exists():
        raise ConnectionInvalid(
            "No Kubernetes cluster is named: this process does not run in a pod with a service account, so name a "
            "kubeconfig file in KUBECONFIG."
        )
    if ":" in host:
        host = f"[{host}]"
    return Connection(
        server=f"https://{host}:{port}",
        context=_context(authority.read_text(encoding="utf-8"), str(authority)),
        token_file=token,
        namespace=namespace.read_text(encoding="utf-8").strip() if namespace.exists() else "default",
        renewal="the token of this pod's service account was revoked, or the account deleted: check that the service "
        "account exists, then restart the pod",
    )


def from_kubeconfig(file: Path, context: str = "") -> Connection:
    """Return the connection of a context of a kubeconfig file, by default of its current one."""
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not YAML"
        raise ConnectionInvalid(f"The kubeconfig {file} cannot be read: {why}.") from None
    if not isinstance(config, dict):
        raise ConnectionInvalid(f"The kubeconfig {file} is empty or no kubeconfig.")
    reader = _Kubeconfig(file, config)
    chosen = reader.named("contexts", context or str(config.get("current-context") or ""), "context")
    cluster = reader.named("clusters", str(chosen.get("cluster") or ""), "cluster")
    user = reader.named("users", str(chosen.get("user") or ""), "user") if chosen.get("user") else {}
    for key, what in UNSUPPORTED.items():
        if user.get(key):
            raise ConnectionInvalid(
                f"The kubeconfig {file} logs in by {what}, which the service does not run: use a client certificate, "
                "or the token of a service account (kubectl create token)."
            )
    if cluster.get("proxy-url"):
        raise ConnectionInvalid(f"The kubeconfig {file} names a proxy (proxy-url), which is not supported.")
    authority = reader.data(cluster, "certificate-authority")
    made = _context(authority, str(file), check=not cluster.get("insecure-skip-tls-verify"))
    _load_certificate(made, reader.data(user, "client-certificate"), reader.data(user, "client-key"), file)
    token_file = user.get("tokenFile")
    return Connection(
        server=str(cluster.get("server") or "").rstrip("/"),
        context=made,
        token=str(user.get("token") or ""),
        token_file=file.parent / token_file if token_file else None,
        namespace=str(chosen.get("namespace") or "default"),
        renewal=_renewal(user),
    )


def _renewal(user: Mapping[str, Any]) -> str:
    """Return what to do where credentials of a kubeconfig have expired."""
    if user.get("tokenFile"):
        return (
            "the token that the kubeconfig names has expired or was revoked: write a new one into its file (tokenFile)"
        )
    if user.get("token"):
        return (
            "the token in the kubeconfig has expired or was revoked: make a new one by `kubectl create token`, put it "
            "there, and restart the service"
        )
    if user.get("client-certificate") or user.get("client-certificate-data"):
        return (
            "the client certificate in the kubeconfig has expired or is not accepted: put a new one there, and restart "
            "the service"
        )
    return "the kubeconfig has no credentials for its context: add a token or a client certificate, and restart"


@dataclass(frozen=True, slots=True)
class _Kubeconfig:
    """A kubeconfig file with its entries by name."""

    file: Path
    config: Mapping[str, Any]

    def named(self, kind: str, name: str, inner: str) -> Mapping[str, Any]:
        """Return an entry of a list by name; ConnectionInvalid names those that there are."""
        entries = [entry for entry in self.config.get(kind) or () if isinstance(entry, dict)]
        for entry in entries:
            if entry.get("name") == name and isinstance(entry.get(inner), dict):
                return entry[inner]  # type: ignore[no-any-return]
        there = ", ".join(str(entry.get("name")) for entry in entries) or "none"
        raise ConnectionInvalid(f"The kubeconfig {self.file} has no {inner} {name!r} in {kind}; there are: {there}.")

    def data(self, entry: Mapping[str, Any], key: str) -> str:
        """Return what an entry holds as `KEY-data` (base64), or in the file that `KEY` names."""
        if entry.get(f"{key}-data"):
            try:
                return base64.b64decode(entry[f"{key}-data"], validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                raise ConnectionInvalid(f"{key}-data in the kubeconfig {self.file} is not base64 text.") from None
        if not entry.get(key):
            return ""
        try:
            return (self.file.parent / str(entry[key])).read_text(encoding="utf-8")
        except OSError as error:
            raise ConnectionInvalid(
                f"The kubeconfig {self.file} names {error.filename} as {key}, which cannot be read: {error.strerror}."
            ) from None


def _context(authority: str, source: str, *, check: bool = True) -> ssl.SSLContext:
    try:
        made = ssl.create_default_context(cadata=authority or None)
    except ssl.SSLError:
        raise ConnectionInvalid(f"The cluster's certificate authority in {source} is no certificate.") from None
    if not check:
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    return made


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str, source: Path) -> None:
    """Use a client certificate, if there is one; Python reads certificates from files only."""
    if not certificate:
        return
    with tempfile.NamedTemporaryFile("w") as file:  # readable by this user alone
        file.write(f"{certificate}\n{key}\n")
        file.flush()
        try:
            context.load_cert_chain(file.name)
        except ssl.SSLError:
            raise ConnectionInvalid(f"The client certificate and key in the kubeconfig {source} do not fit.") from None
