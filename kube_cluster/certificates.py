"""Keys and certificates of one cluster, and the kubeconfig files that use them."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = timedelta(days=365)
MASTERS = "system:masters"
"""The group that the API server binds to the cluster role `cluster-admin`."""


class Authority:
    """A certificate authority, such as that of one cluster; `folder` has every file that it made."""

    def __init__(self, folder: Path, name: str = "makeway-kube") -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        self._key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self._certificate = (
            _builder(issuer, issuer, self._key.public_key())
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file = folder / "ca.crt"
        _write(self.file, _pem(self._certificate))
        _write(folder / "ca.key", _key_pem(self._key))

    def service_account_keys(self) -> tuple[Path, Path]:
        """Make the key that signs tokens of service accounts; return the private and the public file."""
        key = ec.generate_private_key(ec.SECP256R1())
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        private_file, public_file = self.folder / "tokens.key", self.folder / "tokens.pub"
        _write(private_file, _key_pem(key))
        _write(public_file, public)
        return private_file, public_file

    def server_certificate(
        self, name: str, user: str, names: Sequence[str], group: str | None = None
    ) -> tuple[Path, Path]:
        """Make a server's certificate for these addresses and host names; return it and its key."""
        return self._issue(name, user, group, ExtendedKeyUsageOID.SERVER_AUTH, names)

    def client_certificate(self, user: str, group: str | None = None) -> tuple[Path, Path]:
        """Make the certificate of a user; return it and its key."""
        return self._issue(user.replace(":", "-"), user, group, ExtendedKeyUsageOID.CLIENT_AUTH, ())

    def kubeconfig(self, server: str, user: str, group: str | None = None) -> Path:
        """Write a kubeconfig of one user, with its certificate and key inside, and return it."""
        certificate, key = self.client_certificate(user, group)
        file = self.folder.parent / f"{user.rpartition(':')[2]}.kubeconfig"
        cluster = {"server": server, "certificate-authority-data": _base64(self.file)}
        credentials = {"client-certificate-data": _base64(certificate), "client-key-data": _base64(key)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "makeway", "cluster": cluster}],
            "users": [{"name": user, "user": credentials}],
            "contexts": [{"name": "makeway", "context": {"cluster": "makeway", "user": user}}],
            "current-context": "makeway",
        }
        _write(file, json.dumps(config, indent=1).encode())
        return file

    def _issue(
        self, name: str, user: str, group: str | None, usage: x509.ObjectIdentifier, names: Sequence[str]
    ) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
        if group:
            subject.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        builder = _builder(x509.Name(subject), self._certificate.subject, key.public_key())
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())  # Python 3.13 needs it
        builder = builder.add_extension(issuer_key, critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(one) for one in names]), False)
        certificate_file, key_file = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        _write(certificate_file, _pem(builder.sign(self._key, hashes.SHA256())))
        _write(key_file, _key_pem(key))
        return certificate_file, key_file


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # the clock may be set back a little
        .not_valid_after(now + VALID)
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _base64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _write(file: Path, text: bytes) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(text)
