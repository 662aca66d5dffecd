"""The transports that a configuration may name. A new one is registered here, by one line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Registration:
    """A transport as it is known before it is made."""

    module: str
    """Module whose `offer` makes it, as `transfer/transport.py : OfferedTransport` says."""
    prior_bytes_per_s: float
    """Rate that a path has in the ranking until it was measured."""
    is_on_host: bool = False
    """Whether peers of this host reach us by it, through the board that shows our memory."""


TRANSPORTS = {
    "shm": Registration("transfer.shm.transport", 4e9, is_on_host=True),
    "cuda_ipc": Registration("transfer.gpu.transport", 300e9, is_on_host=True),
    "rdma": Registration("transfer.rdma.transport", 20e9),
    "tcp": Registration("transfer.tcp.transport", 2e9),
}
"""Each transport by its name. What offers to listen on the process's port stands before tcp."""
