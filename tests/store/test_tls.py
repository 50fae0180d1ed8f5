"""PostgreSQL over TLS with a certificate authority of the site; what is wrong with it is told with what to do."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from makeway_quota.doctor.database import check_database
from makeway_quota.store.database.database import explain, parse
from makeway_quota.store.database.postgres_check import read_facts
from makeway_quota.store.errors import StoreError
from makeway_quota.store.store import open_store
from postgres import AUTHORITY, network_database, postgres_server
from sqlalchemy.exc import DBAPIError

from kube_cluster.certificates import Authority

NETWORK = "127.0.0.0/8"


def own_host() -> str:
    """Return an address of this machine that no other test listens on."""
    return f"127.77.{secrets.randbelow(256)}.{secrets.randbelow(254) + 1}"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Path]]:
    """Return the address of a database that is reached over TLS only, and its authority's certificate."""
    with postgres_server(own_host(), NETWORK, tls=True) as folder:
        yield network_database(folder, "makeway"), Path(folder, AUTHORITY)


@pytest.mark.covers("N24")
def test_a_database_whose_certificate_is_verified_is_used(server: tuple[str, Path]) -> None:
    url, authority = server
    trusted = f"{url}?sslmode=verify-full&sslrootcert={authority}"
    place = url.partition("@")[2].partition("/")[0]
    with_name = trusted.replace(f"@{place}/", "@/").replace("?", f"?host={place}&host={place}&")
    for address in (trusted, with_name):
        store = open_store(address)
        assert store.policies.current() is None
        store.close()
        facts = read_facts(address)
        assert facts is not None
        assert facts.encrypted
        assert not [one for one in check_database(address) if "encrypted" in one.what]


def test_what_is_wrong_with_it_is_said_with_what_to_do(server: tuple[str, Path], tmp_path: Path) -> None:
    url, authority = server
    host = url.partition("@")[2].partition("/")[0]
    other = Authority(tmp_path / "other").file
    verified = f"{url}?sslmode=verify-full&sslrootcert="
    unreadable = tmp_path / "text.crt"
    unreadable.write_text("no certificate", encoding="utf-8")
    for address, words in {
        f"{verified}{other}": "of an authority that is not trusted here; sslrootcert",
        f"{verified}{authority}&hostaddr={host}".replace(f"@{host}", "@localhost"): "name it as its certificate does",
        f"{verified}/nowhere/ca.crt": "it must exist in the service's pod or machine",
        f"{verified}{unreadable}": "it must exist in the service's pod or machine, and be readable",
        f"{url}?sslmode=disable": "takes them over TLS only: add an entry, or sslmode=verify-full",
        f"{url}?sslmode=verifyfull": "it is disable, prefer, require, verify-ca or verify-full",
    }.items():
        with pytest.raises(StoreError) as refused:
            open_store(address)
        assert words in str(refused.value), address
        with pytest.raises(StoreError) as refused:
            check_database(address)
        assert words in str(refused.value), "doctor says the same"
        assert url.partition("makeway:")[2].partition("@")[0] not in str(refused.value), "no password"


def test_a_server_without_tls_is_named(tmp_path: Path) -> None:
    with postgres_server(own_host(), NETWORK) as folder:
        url = network_database(folder, "makeway")
        with pytest.raises(StoreError, match="its ssl is off; turn it on, or leave sslmode out"):
            open_store(f"{url}?sslmode=require")
        open_store(url).close()


PG_HBA = 'FATAL:  no pg_hba.conf entry for host "10.0.0.9", user "x", database "y"'
NO_ENTRY = "an entry of its pg_hba.conf has to take this host, user and database"
PREFERRED = (("SSL encryption", "no encryption"), ("SSL on", "SSL off"), ("GSS encryption", "no encryption"))
"""What servers say of the two tries of sslmode=prefer, by their version"""


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("SSL error: certificate verify failed", "not trusted here"),
        ("SSL error: certificate verify failed: certificate has expired", "renew its certificate"),
        ("SSL error: sslv3 alert certificate expired", ""),
        ("the certificate has expired", "renew its certificate"),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.9", user "x", database "y", no encryption', "over TLS only"),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.9", user "x", database "y", SSL off', "over TLS only"),
        *((f"{PG_HBA}, {tls}\n{PG_HBA}, {plain}", NO_ENTRY) for tls, plain in PREFERRED),
        *((f"{PG_HBA}, {plain}\n{PG_HBA}, {tls}", NO_ENTRY) for tls, plain in PREFERRED),
        (f"{PG_HBA}, SSL encryption", NO_ENTRY),
        (f"{PG_HBA.replace('no pg_hba.conf entry', 'pg_hba.conf rejects connection')}, SSL encryption", NO_ENTRY),
        (f"{PG_HBA}, no encryption", "has no entry for this host, user and database, or takes them over TLS only"),
        ('FATAL:  password authentication failed for user "x"', ""),
    ],
)
def test_other_versions_say_it_otherwise(said: str, words: str) -> None:
    sentence = explain(parse("postgresql://x@y/z"), DBAPIError("", {}, Exception(said)))
    first = said.splitlines()[0]
    assert sentence.partition(first)[2].count(words) == (1 if words else len(sentence.partition(first)[2]) + 1)
