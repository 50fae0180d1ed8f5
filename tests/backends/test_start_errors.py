"""What the API server's refusals of a start mean: the texts are those of Kubernetes 1.37."""

from __future__ import annotations

import pytest
from makeway_quota.backends.base import BackendError, BackendFull, BackendRejected, BackendUnavailable
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, ApiUnreachable
from makeway_quota.backends.kubernetes.attempts.start_errors import start_error

POD = 'pods "makeway-j1-1-0" is forbidden: '
IN_POD = 'Pod "makeway-j1-1-0" is invalid: spec.containers[0].'
WEBHOOK = 'admission webhook "deny.example.com" denied the request: '
OF_THE_INSTALLATION = [
    (403, 'pods is forbidden: User "makeway" cannot create resource "pods" in API group "" in the namespace "jobs"'),
    (403, f'{POD}error looking up service account jobs/makeway-jobs: serviceaccount "makeway-jobs" not found'),
    (403, f"{POD}no PriorityClass with name makeway-x was found"),
    (403, f'{POD}pod rejected: RuntimeClass "nvidia" not found'),
    (403, f"{POD}unable to create new content in namespace jobs because it is being terminated"),
    (403, f"{POD}status unknown for quota: few, resources: pods"),
    (403, f"{POD}not yet ready to handle request"),
    (404, 'namespaces "jobs" not found'),
    (401, "Unauthorized"),
    (429, "too many requests"),
    (500, 'Internal error occurred: failed calling webhook "down.example.com": connection refused'),
]
OF_ADMISSION = [
    (400, f"{WEBHOOK}image not signed"),
    (403, f"{WEBHOOK}image not signed"),
    (404, f"{WEBHOOK}policy x not found"),
    (403, f"{POD}ValidatingAdmissionPolicy 'vap' with binding 'vap' denied request: no"),
    (403, f'{POD}violates PodSecurity "restricted:latest": runAsNonRoot != true'),
    (403, f"{POD}maximum cpu usage per Container is 1, but limit is 2"),
    (403, f"{POD}failed quota: q2: must specify requests.memory for: worker"),
    (422, f"{POD}ValidatingAdmissionPolicy 'vap' with binding 'vap' denied request: no"),
    (403, f"{POD}minimum cpu usage per Container is 200m, but request is 50m"),
    (422, f'{IN_POD}resources.requests: Invalid value: "4": must be less than or equal to cpu limit of 500m'),
    (422, f"{IN_POD}securityContext.runAsUser: Invalid value: 1000: must be in the ranges: [1000660000, 1000669999]"),
    (403, f'{POD}unable to validate against any security context constraint: provider "restricted-v2": no'),
    (403, f"{POD}an admission plugin that is not known here says no"),
]
OF_THE_POD = [(422, f"{IN_POD}image: Required value")]


def exceeded(requested: str, used: str, limited: str) -> ApiStatusError:
    text = f"{POD}exceeded quota: few, requested: {requested}, used: {used}, limited: {limited}"
    return ApiStatusError(403, "Forbidden", text)


@pytest.mark.parametrize(("status", "message"), OF_THE_INSTALLATION + OF_ADMISSION)
def test_what_an_administrator_can_end_is_waited_for(status: int, message: str) -> None:
    result = start_error(ApiStatusError(status, "", message), 1)
    assert isinstance(result, BackendUnavailable)
    assert message in str(result)
    acts = f"Kubernetes does not create the pods of this job, and an administrator has to act: {message}"
    assert (str(result) == acts) is (status in (400, 403, 404, 422))


@pytest.mark.parametrize(("status", "message"), OF_ADMISSION)
def test_a_job_whose_pods_admission_refuses_keeps_no_gpus(status: int, message: str) -> None:
    assert type(start_error(ApiStatusError(status, "", message), 1)) is BackendFull


@pytest.mark.parametrize(("status", "message"), OF_THE_POD)
def test_an_invalid_image_fails_its_job(status: int, message: str) -> None:
    result = start_error(ApiStatusError(status, "", message), 1)
    assert type(result) is BackendError
    assert str(result) == f"Kubernetes refuses its pod: {message}"
    assert type(start_error(ApiStatusError(status, "", message), 0)) is BackendRejected


def test_no_answer_is_no_refusal() -> None:
    assert type(start_error(ApiUnreachable("nothing answers"), 1)) is BackendUnavailable


@pytest.mark.parametrize(
    ("pods", "refusal", "said"),
    [
        (1, exceeded("requests.nvidia.com/gpu=2", "requests.nvidia.com/gpu=0", "requests.nvidia.com/gpu=1"), "gpu=2"),
        (1, exceeded("cpu=1,memory=2Gi", "cpu=0,memory=0", "cpu=4,memory=1500Mi"), "memory=2Gi"),
        (1, exceeded("requests.cpu=1", "requests.cpu=0", "requests.cpu=500m"), "requests.cpu=1"),
        (4, exceeded("pods=1", "pods=3", "pods=3"), "Each of its 4 pods requests pods=1"),
    ],
)
def test_a_job_that_the_quota_can_never_hold_waits_for_an_administrator(
    pods: int, refusal: ApiStatusError, said: str
) -> None:
    result = start_error(refusal, pods)
    assert type(result) is BackendFull
    assert "an administrator has to act: " in str(result)
    assert said in str(result)
    assert "the quota of the namespace allows" in str(result)


@pytest.mark.parametrize(
    ("pods", "refusal"),
    [
        (1, exceeded("pods=1", "pods=3", "pods=3")),
        (3, exceeded("pods=1", "pods=1", "pods=3")),
        (1, exceeded("pods=1", "pods=0", "pods=0")),
        (1, exceeded("pods=many", "pods=1", "pods=1")),
        (1, ApiStatusError(403, "Forbidden", "exceeded quota: told in other words")),
        (0, ApiStatusError(403, "Forbidden", 'secrets "x" is forbidden: exceeded quota: few, requested: secrets=1')),
    ],
)
def test_a_job_waits_for_a_quota_that_others_use_or_that_is_closed(pods: int, refusal: ApiStatusError) -> None:
    assert type(start_error(refusal, pods)) is BackendFull
