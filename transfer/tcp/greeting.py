"""How two ends of a data connection prove to each other that a peer descriptor reached them.

    HELLO      -> the asker's nonce
    CHALLENGE  <- the owner's nonce
    PROOF      -> HMAC of the descriptor's epoch and both nonces, as the asker
    WELCOME    <- HMAC of the same, as the owner; or REFUSED, whatever was wrong

The key is the secret of the owner's process, drawn at its start, in its descriptor. Descriptors travel by
the stream to a conductor, which mutual TLS guards where it is set up. The secret itself is never sent here,
and nonces are fresh, so who saw one greeting cannot repeat it. Pure, but for `nonce`.
"""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple

from base.grants import PeerDescriptor
from transfer.tcp.frame import FrameKind, Header

SECRET_BYTES = 32
PROOF_BYTES = 24
"""Bytes of an HMAC-SHA256 that are sent, as three fields of a header."""


class PeerKey(NamedTuple):
    """Part of a peer descriptor that opens a connection to its process."""

    secret: bytes
    epoch: int


class Nonces(NamedTuple):
    """Random numbers that both ends drew for one connection: 128 bits each."""

    asker: tuple[int, int]
    owner: tuple[int, int]


def key_of(peer: PeerDescriptor) -> PeerKey:
    return PeerKey(peer.secret, peer.epoch)


def nonce() -> tuple[int, int]:
    return secrets.randbits(64), secrets.randbits(64)


def proof(kind: FrameKind, secret: bytes, epoch: int, nonces: Nonces) -> Header:
    """Return the PROOF or WELCOME of who knows `secret`."""
    words = (int(kind), epoch, *nonces.asker, *nonces.owner)
    digest = hmac.digest(secret, b"".join(word.to_bytes(8, "little") for word in words), "sha256")
    parts = (int.from_bytes(digest[at : at + 8], "little") for at in range(0, PROOF_BYTES, 8))
    segment_id, generation, offset = parts
    return Header(kind, segment_id=segment_id, generation=generation, offset=offset)


def proves(header: Header, secret: bytes, epoch: int, nonces: Nonces) -> bool:
    """Return whether who sent this PROOF or WELCOME knows `secret`; takes as long whatever is wrong."""
    return hmac.compare_digest(_digest(header), _digest(proof(header.kind, secret, epoch, nonces)))


def _digest(header: Header) -> bytes:
    return b"".join(
        word.to_bytes(8, "little") for word in (header.segment_id, header.generation, header.offset)
    )
