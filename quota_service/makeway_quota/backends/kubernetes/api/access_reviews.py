"""Find out from the API server what the account of this process may do."""

from __future__ import annotations

from .client import ApiClient, Object, run_all

ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


async def denied_verbs(
    client: ApiClient, group: str, resource: str, verbs: tuple[str, ...], namespace: str = ""
) -> list[str]:
    """Return the verbs that the account may not use on a resource of a namespace; "": of all namespaces."""
    answers = await run_all(
        client.create(ACCESS_REVIEWS, _access_review(group, resource, verb, namespace)) for verb in verbs
    )
    answered = zip(verbs, answers, strict=True)
    return [verb for verb, answer in answered if not (answer.get("status") or {}).get("allowed")]


def _access_review(group: str, resource: str, verb: str, namespace: str) -> Object:
    attributes = {"group": group, "resource": resource, "verb": verb, "namespace": namespace}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "metadata": {},
        "spec": {"resourceAttributes": attributes},
    }
