"""Imitations of platforms by admission policies: OpenShift's security context constraints, a mesh with sidecars.

They rule the two namespaces of the chart, and are gone after the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from charts import JOBS, NAMESPACE, Object
from pods import wait_until
from releases import safe_pod

from kube_cluster.api import Api, ApiProblem
from kube_cluster.policies import DNS_PODS, DNS_SERVICE

NAME = "kubernetes.io/metadata.name"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
RANGES = {NAMESPACE: 1_000_680_000, JOBS: 1_000_690_000}
"""The first user of each namespace's range."""
SIZE = 10_000
RANGE = "openshift.io/sa.scc.uid-range"
"""The annotation of a namespace that has its range."""
FIRST = f"int(namespaceObject.metadata.annotations['{RANGE}'].split('/')[0])"
SECURITY = "object.spec.?securityContext"
CONTAINERS = "(object.spec.containers + object.spec.?initContainers.orValue([]))"
SIDECAR = "mesh-proxy"
LEFT_ALONE = "sidecar.istio.io/inject"
"""The label of a pod that gets no sidecar where it is `false`."""
RUNS_ON = "trap 'sleep 2; exit 0' TERM; sleep infinity & wait"
"""What the sidecar does: like a proxy, it ends only when it is told to, and then not at once."""


def _rule(*resources: str) -> Object:
    return {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": list(resources)}


def mutating(name: str, expression: str, *conditions: str, resource: str = "pods", patch: bool = False) -> Object:
    """Return a policy that changes what is created where all conditions hold; `patch`: by a JSON patch."""
    kind = "JSONPatch" if patch else "ApplyConfiguration"
    change = {"patchType": kind, "jsonPatch" if patch else "applyConfiguration": {"expression": expression}}
    return {
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "matchConstraints": {"resourceRules": [_rule(resource)]},
            "matchConditions": [{"name": f"c{at}", "expression": one} for at, one in enumerate(conditions)],
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "mutations": [change],
        },
    }


def validating(name: str, validations: Object) -> Object:
    """Return a policy that refuses pods of which an expression is not true, in the words that follow it."""
    return {
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "matchConstraints": {"resourceRules": [_rule("pods")]},
            "failurePolicy": "Fail",
            "validations": [{"expression": one, "messageExpression": message} for one, message in validations.items()],
        },
    }


def _in_range(expression: str) -> str:
    return f"({expression} >= {FIRST} && {expression} < {FIRST} + {SIZE})"


def _refused(field: str) -> str:
    words = "'unable to validate against any security context constraint: [provider restricted-v2: "
    return f"{words}{field}: Invalid value: must be in the ranges: [' + string({FIRST}) + ']]'"


OPENSHIFT = [
    mutating(
        "openshift-ranges",
        "Object{metadata: Object.metadata{annotations: "
        f"{{'{RANGE}': object.metadata.name == '{JOBS}' ? '{RANGES[JOBS]}/{SIZE}' : '{RANGES[NAMESPACE]}/{SIZE}'}}}}}}",
        f"object.metadata.name in ['{NAMESPACE}', '{JOBS}']",
        resource="namespaces",
    ),
    mutating(
        "openshift-users",
        f"Object{{spec: Object.spec{{securityContext: Object.spec.securityContext{{runAsUser: {FIRST}}}}}}}",
        f"!{SECURITY}.runAsUser.hasValue()",
    ),
    mutating(
        "openshift-groups",
        f"Object{{spec: Object.spec{{securityContext: Object.spec.securityContext{{fsGroup: {FIRST}}}}}}}",
        f"!{SECURITY}.fsGroup.hasValue()",
    ),
    validating(
        "openshift-constraints",
        {
            _in_range(f"{SECURITY}.runAsUser.orValue({FIRST})"): _refused(".spec.securityContext.runAsUser"),
            _in_range(f"{SECURITY}.fsGroup.orValue({FIRST})"): _refused(".spec.securityContext.fsGroup"),
            f"{CONTAINERS}.all(c, {_in_range(f'c.?securityContext.runAsUser.orValue({FIRST})')})": _refused(
                ".containers.runAsUser"
            ),
            "object.spec.?volumes.orValue([]).all(v, !has(v.hostPath))": (
                "'unable to validate against any security context constraint: hostPath volumes are not allowed'"
            ),
        },
    ),
]
"""What the constraint `restricted-v2` does to users and groups: what a pod does not name comes from the range of its
namespace, and a pod that names others is refused."""


def mesh(image: str) -> list[Object]:
    """Return the policy of a mesh: the first container of each pod is its proxy, without ports, and ends last."""
    of = "Object.spec.containers"
    container = f"""{of}{{
        name: "{SIDECAR}", image: "{image}", imagePullPolicy: "IfNotPresent", command: ["sh", "-c", "{RUNS_ON}"],
        resources: {of}.resources{{requests: {{"cpu": "10m", "memory": "32Mi"}}, limits: {{"memory": "64Mi"}}}},
        securityContext: {of}.securityContext{{
            allowPrivilegeEscalation: false, runAsNonRoot: true,
            seccompProfile: {of}.securityContext.seccompProfile{{type: "RuntimeDefault"}},
            capabilities: {of}.securityContext.capabilities{{drop: ["ALL"]}}
        }}
    }}"""
    expression = f'[JSONPatch{{op: "add", path: "/spec/containers/0", value: {container}}}]'
    left_alone = f"object.metadata.?labels['{LEFT_ALONE}'].orValue('') == 'false'"
    return [mutating("mesh-sidecars", expression, f"!({left_alone})", patch=True)]


@contextmanager
def ruled(api: Api, policies: list[Object]) -> Iterator[None]:
    """Have the policies during the block. Admission follows them a moment after they are made."""
    with ExitStack() as undo:
        for policy in policies:
            kind, name = policy["kind"].lower(), policy["metadata"]["name"]
            binding = {"metadata": {"name": name}, "spec": _binding(policy)}
            for path, body in ((kind.replace("policy", "policies"), policy), (f"{kind}bindings", binding)):
                api.create(f"{ADMISSION}/{path}", body)
                undo.callback(api.delete, f"{ADMISSION}/{path}/{name}")
        yield


def _binding(policy: Object) -> Object:
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    spaces = {"key": NAME, "operator": "In", "values": [NAMESPACE, JOBS]}
    matched = {"matchResources": {"namespaceSelector": {"matchExpressions": [spaces]}}}
    denied = {"validationActions": ["Deny"]} if policy["kind"].startswith("Validating") else {}
    return {"policyName": policy["metadata"]["name"], **(matched if rule["resources"] == ["pods"] else {}), **denied}


def tried(api: Api, path: str, body: Object) -> Object:
    """Return what admission makes of an object that is not created; raise ApiProblem where it is refused."""
    return api.create(path, body, dryRun="All")


@contextmanager
def dns_pods(api: Api, place: str) -> Iterator[None]:
    """Have the DNS's pods in another namespace, at another port, in the block: `openshift-dns:5353`."""
    api.merge(DNS_SERVICE, {"metadata": {"annotations": {DNS_PODS: place}}})
    try:
        yield
    finally:
        api.merge(DNS_SERVICE, {"metadata": {"annotations": {DNS_PODS: None}}})


def wait_for_ranges(api: Api) -> None:
    """Return once namespaces get their ranges, which they do only when they are created."""
    body = {"metadata": {"name": NAMESPACE}}
    made = partial(tried, api, "/api/v1/namespaces", body)
    wait_until(lambda: RANGE in made()["metadata"].get("annotations", {}), "namespaces get ranges")


def wait_for_users(api: Api) -> None:
    """Return once pods get users of their namespace's range, and those with a user of their own are refused."""
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"

    def in_force() -> bool:
        with suppress(ApiProblem):
            tried(api, pods, named)
            return False
        got = tried(api, pods, safe_pod("tried"))["spec"]["securityContext"]
        return bool(got.get("runAsUser") == got.get("fsGroup") == RANGES[NAMESPACE])

    named = safe_pod("tried")
    named["spec"]["containers"][0]["securityContext"]["runAsUser"] = 10001
    wait_until(in_force, "pods get users of the range")


def wait_for_sidecars(api: Api) -> None:
    """Return once pods get a sidecar, and no policy of a platform before refuses them any more."""

    def in_force() -> bool:
        with suppress(ApiProblem):
            made = tried(api, f"/api/v1/namespaces/{NAMESPACE}/pods", safe_pod("tried"))
            return bool(made["spec"]["containers"][0]["name"] == SIDECAR)
        return False

    wait_until(in_force, "pods get a sidecar")
