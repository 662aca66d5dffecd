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
from transfer.tcp.frame import Header, Kind

SECRET_BYTES = 32
PROOF_BYTES = 24
"""Of an HMAC-SHA256, as three fields of a header."""


class PeerKey(NamedTuple):
    """What of a descriptor opens a connection to its process."""

    secret: bytes
    epoch: int


class Nonces(NamedTuple):
    """What both ends drew for one connection: 128 bits each."""

    asker: tuple[int, int]
    owner: tuple[int, int]


def key_of(peer: PeerDescriptor) -> PeerKey:
    return PeerKey(peer.secret, peer.epoch)


def nonce() -> tuple[int, int]:
    return secrets.randbits(64), secrets.randbits(64)


def proof(kind: Kind, secret: bytes, epoch: int, nonces: Nonces) -> Header:
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
