"""A certificate authority for tests, and certificates that it signs."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import pytest

from base.config import TlsConfig

pytest.importorskip("cryptography", reason="certificates are made with the package cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

START = datetime.datetime(2020, 1, 1)
END = datetime.datetime(2100, 1, 1)


class Authority:
    """Signs certificates, and writes them into a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._certificate(self._name, self._key.public_key(), END).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.path = str(folder / f"{name}.pem")
        self.pem = _pem(certificate.sign(self._key, hashes.SHA256()))
        Path(self.path).write_bytes(self.pem)

    def issue(
        self, name: str, uri: str | None = None, end: datetime.datetime = END, ca: bool = True
    ) -> TlsConfig:
        """Write a certificate for loopback, and its key; `uri` is one of its names."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        names += [x509.UniformResourceIdentifier(uri)] if uri else []
        builder = self._certificate(subject, key.public_key(), end)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        cert_path, key_path = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert_path.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return TlsConfig(str(cert_path), str(key_path), self.path if ca else "")

    def _certificate(self, subject, public_key, end) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(START)
            .not_valid_after(end)
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
