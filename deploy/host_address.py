"""The address by which other hosts reach this one, where Ray does not say it: a local one knows loopback.

The kernel chooses it, as it would for a packet that leaves the host; none is sent.
"""

from __future__ import annotations

import ipaddress
import socket

ELSEWHERE = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses for documentation (RFC 5737 and 3849): any that the default route leads to would do."""


def reachable_address(by_ray: str) -> str:
    """Return `by_ray`, or the host's own address where that is loopback and the host has another."""
    if not ipaddress.ip_address(by_ray).is_loopback:
        return by_ray
    for address, family in ELSEWHERE:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:  # no route: the host is alone
                continue
            return str(probe.getsockname()[0])
    return by_ray
