"""The control plane is a real one: it authenticates, it authorizes, and its files are the user's own."""

from __future__ import annotations

import json

import pytest
from pods import PODS

from kube_cluster.api import Api, ApiProblem
from kube_cluster.cluster import Cluster

pytestmark = pytest.mark.kube

ACCOUNTS = "/api/v1/namespaces/default/serviceaccounts"
ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"


def token_of(api: Api, name: str) -> str:
    """Make a service account and return a token of it."""
    api.create(ACCOUNTS, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    return str(api.create(f"{ACCOUNTS}/{name}/token", request)["status"]["token"])


def test_it_is_ready_and_says_its_version(api: Api) -> None:
    assert api.ready()
    assert api.get("/version")["gitVersion"] == "v1.37.2"


def test_a_token_without_roles_may_do_nothing(api: Api) -> None:
    user = api.with_token(token_of(api, "nothing"))
    for refused in (lambda: user.get(PODS), lambda: user.get("/api/v1/nodes"), lambda: user.delete(PODS)):
        with pytest.raises(ApiProblem) as problem:
            refused()
        assert problem.value.status == 403


def test_a_role_gives_exactly_what_it_names(api: Api) -> None:
    user = api.with_token(token_of(api, "reader"))
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    api.create(f"{ROLES}/roles", {"metadata": {"name": "read-pods"}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "reader", "namespace": "default"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "read-pods"}
    api.create(f"{ROLES}/rolebindings", {"metadata": {"name": "reader"}, "subjects": [subject], "roleRef": role})
    assert user.items(PODS) == []
    with pytest.raises(ApiProblem, match="cannot create resource"):
        user.create(PODS, {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "c", "image": "i"}]}})
    with pytest.raises(ApiProblem, match="cannot list resource"):
        user.get("/api/v1/namespaces/kube-system/pods")


def test_an_unknown_token_is_no_user(api: Api) -> None:
    with pytest.raises(ApiProblem) as problem:
        api.with_token("made-up").get(PODS)
    assert problem.value.status == 401


def test_only_the_user_may_read_keys_and_kubeconfig(control_plane: Cluster) -> None:
    assert control_plane.folder.path.stat().st_mode & 0o077 == 0
    keys = [*control_plane.folder.path.glob("pki/*.key"), control_plane.kubeconfig]
    assert len(keys) > 5
    assert not [file.name for file in keys if file.stat().st_mode & 0o077]
    assert json.loads(control_plane.kubeconfig.read_text())["users"][0]["user"]["client-key-data"]
