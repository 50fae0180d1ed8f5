"""List the variables of the operator's environment that users' processes get, and the hosts that avoid proxies.

Used by the Hub and by the service, so that notebooks and jobs get the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
"""The variables that name a proxy: most programs read both spellings, some only one."""
EXCEPTIONS = ("NO_PROXY", "no_proxy")
"""Hosts that are reached without a proxy, separated by commas."""
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
"""Files and folders with the certificates that programs trust, as a company's proxy needs them."""
NETWORK = (*PROXIES, *EXCEPTIONS, *CERTIFICATES)
USERS_VARIABLES = ("PATH", "LANG", "LANGUAGE", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "CUDA_HOME", *NETWORK)
"""What notebooks and jobs on one machine get of the portal's environment; also LC_…, and TMPDIR where all is one
account's. Everything else stays: tokens, and what would load code into another account's process."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def without_proxy(env: Mapping[str, str], hosts: Iterable[str] = ()) -> dict[str, str]:
    """Return NO_PROXY and no_proxy with this machine and internal hosts added; empty where `env` names no proxy."""
    if not any(env.get(name) for name in PROXIES):
        return {}
    named = ",".join(env.get(name, "") for name in EXCEPTIONS)
    known = dict.fromkeys(host.strip() for host in named.split(",") if host.strip())
    if "*" not in known:
        known |= dict.fromkeys([*LOOPBACK, *(host for host in hosts if host)])
    return dict.fromkeys(EXCEPTIONS, ",".join(known))
