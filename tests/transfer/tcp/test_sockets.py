"""How sockets are set up."""

import socket

import pytest

from transfer.tcp.sockets import ON_HOST_BYTES, limit_on_host


@pytest.mark.parametrize(("source", "is_limited"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_what_is_under_way_is_limited_between_two_ends_at_one_address(source: str, is_limited: bool) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), source_address=(source, 0)) as sock,
    ):
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        limit_on_host(sock)
        after = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert (after != before) is is_limited
        assert after <= max(before, 2 * ON_HOST_BYTES)


def test_a_socket_whose_peer_is_gone_is_left_as_it_is() -> None:
    with socket.socket() as sock:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        limit_on_host(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before
