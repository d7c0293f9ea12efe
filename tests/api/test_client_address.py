"""Where a request comes from: whom to believe, and whom an address stands for."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from api.client_address import ClientAddress, neighbourhood
from api.exchange import begin
from models.settings import PRIVATE_NETWORKS

TRUSTED = [ip_network(text) for text in PRIVATE_NETWORKS.split(",")]
PROXY, STRANGER = "172.16.3.9", "198.51.100.7"


def address(header: str | None, peer: str, *lines: tuple[str, str]) -> str:
    """Return what is told of a request with these header lines."""
    raw = [(name.lower().encode(), value.encode()) for name, value in lines]
    asked = begin({
        "method": "GET", "path": "/v1/models", "query_string": b"", "headers": raw, "client": (peer, 1),
    }, [].append)
    return ClientAddress(header, TRUSTED).of(asked)


@pytest.mark.parametrize(
    "header, peer, lines, told",
    [
        (None, STRANGER, [], STRANGER),
        (None, PROXY, [("X-Forwarded-For", "192.0.2.1"), ("Fly-Client-IP", "192.0.2.1")], PROXY),
        ("Fly-Client-IP", PROXY, [("Fly-Client-IP", "192.0.2.1")], "192.0.2.1"),
        ("Fly-Client-IP", "fdaa::3", [("Fly-Client-IP", "2001:db8::1")], "2001:db8::1"),
        ("Fly-Client-IP", "::ffff:10.0.0.1", [("fly-client-ip", "192.0.2.1")], "192.0.2.1"),
        ("Fly-Client-IP", "127.0.0.1", [], "127.0.0.1"),
        # From anybody but the proxy the header is a claim.
        ("Fly-Client-IP", STRANGER, [("Fly-Client-IP", "192.0.2.1")], STRANGER),
        ("Fly-Client-IP", "2001:db8::7", [("Fly-Client-IP", "192.0.2.1")], "2001:db8::7"),
        # Another header, or the same with another dash, is not the one.
        ("Fly-Client-IP", PROXY, [("X-Forwarded-For", "192.0.2.1")], PROXY),
        ("Fly-Client-IP", PROXY, [("Fly_Client_IP", "192.0.2.1")], PROXY),
        ("X-Forwarded-For", PROXY, [("X_Forwarded_For", "192.0.2.1"), ("Forwarded", "for=192.0.2.1")], PROXY),
        # What the proxy itself has written stands last; before it stands what the client wrote.
        ("X-Forwarded-For", PROXY, [("X-Forwarded-For", "203.0.113.9, 192.0.2.1")], "192.0.2.1"),
        ("X-Real-IP", PROXY, [("X-Real-IP", "203.0.113.9"), ("X-Real-IP", "192.0.2.1")], "192.0.2.1"),
        # No address at all is nobody's, and not the proxy's own.
        ("X-Forwarded-For", PROXY, [("X-Forwarded-For", "unknown")], ""),
        ("X-Forwarded-For", PROXY, [("X-Forwarded-For", "")], ""),
        ("X-Forwarded-For", PROXY, [("X-Forwarded-For", "192.0.2.1, ")], ""),
    ],
)
async def test_whom_to_believe(header: str | None, peer: str, lines: list[tuple[str, str]], told: str) -> None:
    assert address(header, peer, *lines) == told


@pytest.mark.parametrize(
    "text, stands_for",
    [
        ("192.0.2.1", "192.0.2.1"), ("::ffff:192.0.2.1", "192.0.2.1"), ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"), ("fe80::1%eth0", "fe80::/64"), ("", ""), ("unix:", ""),
    ],
)
def test_whom_an_address_stands_for(text: str, stands_for: str) -> None:
    assert neighbourhood(text) == stands_for
