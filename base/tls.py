"""Certificates: from PEM files to what gRPC and HTTP listen and dial with.

Files are read again when they have changed, so neither a renewed certificate nor an authority
that is trusted no more needs a restart: gRPC asks at each handshake, and so does whoever takes
or dials a connection of asyncio's. A file that was renewed and is wrong is logged, and the last
good one stays.

A peer learns nothing of why a handshake failed but what TLS itself says; the log of `base/arrivals.py` has
the reason. gRPC would write a line for each to standard error: `base/__init__.py` has it write errors alone.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from pathlib import Path

import grpc

from base.config import TlsConfig
from base.errors import ConfigError
from base.logs import event
from base.private import stamp_of

log = logging.getLogger(__name__)

NODE_NAME = "urn:conductor:node"
"""The URI among a certificate's names that lets its owner attach as a node."""

Pem = tuple[bytes, bytes, bytes | None]
"""Certificate, key and authority; None: no authority is set."""


class Certificates:
    """The certificate of one listener or dialler, as its files are now. Each has its own."""

    def __init__(self, tls: TlsConfig, where: str, protocol: int = ssl.PROTOCOL_TLS_SERVER) -> None:
        """Read the files.

        Args:
            tls: `cert` and `key` are set; with `ca`, peers must show a certificate.
            where: What the configuration calls `tls`.
            protocol: OpenSSL's name for who listens or dials.

        Raises:
            ConfigError: a file is missing or wrong; the message names key and file.
        """
        self._tls = tls
        self._where = where
        self._protocol = protocol
        self._seen = self._stamps()
        self._pem, self._context = _loaded(tls, where, protocol)
        self._dialled: Pem | None = None

    def for_grpc(self) -> grpc.ServerCredentials:
        configuration = self._configuration()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """Called on a thread of grpc's; None: no change, which the types do not know."""
            return self._configuration() if self._reread() else None

        needs_peers = bool(self._tls.ca)
        return grpc.dynamic_ssl_server_credentials(configuration, renewed, needs_peers)  # type: ignore[arg-type]

    def to_dial_grpc(self) -> grpc.ChannelCredentials:
        """Return what a channel is made with, by the files of this moment: the same while they are."""
        self._reread()
        if self._pem != self._dialled:
            cert, key, ca = self._dialled = self._pem
            self._credentials = grpc.ssl_channel_credentials(ca, key, cert)
        return self._credentials

    def context(self) -> ssl.SSLContext:
        """Return what asyncio shakes hands with, by the files of this moment: for HTTP, and for nodes.

        A new one where they have changed: of one in use no authority can be taken away, nor its tickets.
        """
        self._reread()
        return self._context

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        cert, key, ca = self._pem
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

    def _reread(self) -> bool:
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            self._pem, self._context = _loaded(self._tls, self._where, self._protocol)
        except (ConfigError, OSError) as error:  # one may go while it is looked at
            event(log, "certificate not renewed", level=logging.ERROR, reason=error)
            return False
        event(log, "certificate renewed", cert=self._tls.cert)
        return True

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(stamp_of(Path(path)) for path in (self._tls.cert, self._tls.key, self._tls.ca) if path)


def dialling_context(tls: TlsConfig, where: str) -> Callable[[], ssl.SSLContext] | None:
    """Return what makes a context to dial with; None: without TLS. Raises ConfigError as `Certificates`."""
    if not tls.is_set:
        return None
    return Certificates(tls, where, ssl.PROTOCOL_TLS_CLIENT).context


def dialling_credentials(tls: TlsConfig, where: str) -> Callable[[], grpc.ChannelCredentials] | None:
    """Return what makes the credentials of a channel, anew once files change; as `dialling_context`."""
    if not tls.is_set:
        return None
    return Certificates(tls, where, ssl.PROTOCOL_TLS_CLIENT).to_dial_grpc


def _pem(path: str, key: str, kind: bytes) -> bytes:
    try:
        pem = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {error.strerror}") from error
    if b"ENCRYPTED" in pem:
        raise ConfigError(f"{key}: {path}: it is encrypted; a key without a passphrase is wanted")
    if kind + b"-----" not in pem:
        raise ConfigError(f"{key}: {path}: no {kind.decode()} in PEM form is in it")
    return pem


def _loaded(tls: TlsConfig, where: str, protocol: int) -> tuple[Pem, ssl.SSLContext]:
    cert = _pem(tls.cert, f"{where}.cert", b"CERTIFICATE")
    key = _pem(tls.key, f"{where}.key", b"PRIVATE KEY")
    ca = _pem(tls.ca, f"{where}.ca", b"CERTIFICATE") if tls.ca else None
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert, tls.key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{where}.key: {tls.key}: it is not the key of {where}.cert") from error
        raise ConfigError(f"{where}.cert: {tls.cert}, or {where}.key: {tls.key}: {error}") from error
    if tls.ca:
        try:
            context.load_verify_locations(tls.ca)
        except ssl.SSLError as error:
            raise ConfigError(f"{where}.ca: {tls.ca}: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return (cert, key, ca), context
