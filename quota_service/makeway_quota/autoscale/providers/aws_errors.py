"""Map errors of Amazon EC2 to what they mean for a call: out of stock, not allowed, too many calls, or not known.

Only what is certainly not done counts as refused. An error of the server (5xx) without a code that is known here, and
a call without an answer, may have been done.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    UnknownCredentialError,
)
from botocore.parsers import ResponseParserError

from ..provider import CallOutcomeUnknown, Denied, InvalidLaunch, ProviderError, QuotaReached, StockOut, Throttled

log = logging.getLogger("makeway.machines")

MAX_MESSAGE = 300
STOCK_OUT = frozenset(
    {
        "InsufficientCapacity",
        "InsufficientHostCapacity",
        "InsufficientInstanceCapacity",
        "InsufficientCapacityOnHost",
        "InsufficientReservedInstanceCapacity",
        "InsufficientVolumeCapacity",
        "ReservationCapacityExceeded",
        "SpotMaxPriceTooLow",
        "UnfulfillableCapacity",
        "Unsupported",  # the zone has no such type; others may
    }
)
QUOTA = frozenset(
    {
        "AuthFailure.ServiceLinkedRoleCreationNotPermitted",  # of the spot market only: on demand goes on
        "InstanceLimitExceeded",
        "InsufficientFreeAddressesInSubnet",
        "MaxIOPSLimitExceeded",
        "MaxSpotInstanceCountExceeded",
        "NetworkInterfaceLimitExceeded",
        "PendingVerification",
        "PrivateIpAddressLimitExceeded",
        "ResourceLimitExceeded",
        "VcpuLimitExceeded",
        "VolumeLimitExceeded",
    }
)
THROTTLED = frozenset(
    {
        "EC2ThrottledException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
    }
)
DENIED = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "AuthFailure",
        "Blocked",
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "MissingAuthenticationToken",
        "OptInRequired",
        "RequestExpired",
        "RequestInTheFuture",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "UnauthorizedOperation",
        "UnrecognizedClientException",
    }
)
UNKNOWN = frozenset({"IdempotentParameterMismatch", "RequestTimeout", "RequestTimeoutException"})
"""Errors of the client's side (4xx) after which an instance may exist"""


def error_code(error: ClientError) -> str:
    """Return the code of an error, "" without one."""
    return str(error.response.get("Error", {}).get("Code", ""))


@contextmanager
def as_provider_errors(action: str) -> Iterator[None]:
    """Raise a ProviderError instead of what the AWS SDK raises. `action`: the call, as EC2 names it."""
    try:
        yield
    except ClientError as error:
        raise _meant(error)(_message(action, error.response)) from error
    except (NoCredentialsError, PartialCredentialsError, ProfileNotFound, UnknownCredentialError) as error:
        raise Denied(f"{action}: {error}") from error
    except ParamValidationError as error:
        raise InvalidLaunch(f"{action}: {str(error)[:MAX_MESSAGE]}") from error
    except (ConnectionError, HTTPClientError, ResponseParserError) as error:  # the last: a proxy's own page
        raise CallOutcomeUnknown(f"{action}: no answer: {str(error)[:MAX_MESSAGE]}") from error
    except BotoCoreError as error:
        raise _of_the_sdk(error)(f"{action}: {type(error).__name__}: {str(error)[:MAX_MESSAGE]}") from error


def _meant(error: ClientError) -> type[ProviderError]:
    code = error_code(error)
    for codes, meaning in ((STOCK_OUT, StockOut), (QUOTA, QuotaReached), (THROTTLED, Throttled), (DENIED, Denied)):
        if code in codes:
            return meaning
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status in (401, 403):
        return Denied
    return InvalidLaunch if 400 <= status < 500 and code not in UNKNOWN else CallOutcomeUnknown


def _of_the_sdk(error: BotoCoreError) -> type[ProviderError]:
    """Return what another error of the SDK means: it is of the credentials, or nothing is known."""
    credentials = any(word in type(error).__name__ for word in ("Credential", "Token", "SSO", "Login"))
    return Denied if credentials else CallOutcomeUnknown


def _message(action: str, response: Any) -> str:
    """Return the message of an error, without the long text that only AWS can decode."""
    result = response.get("Error", {})
    message = str(result.get("Message", "")).partition(" Encoded authorization failure message:")[0]
    return f"{action}: {result.get('Code', '')}: {message[:MAX_MESSAGE]}"
