import socket

from deploy.launch import reachable_address


def test_address_that_a_joined_ray_says_is_kept():
    assert reachable_address("198.51.100.7") == "198.51.100.7"


def test_address_in_the_place_of_loopback_is_this_hosts_own():
    address = reachable_address("127.0.0.1")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        assert server.getsockname()[0] == address
