"""Where a request comes from: the peer, or whom the operator's own proxy names."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import lru_cache

from api.exchange import Exchange
from models.settings import Network

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ClientAddress:
    """Tell the address of a request's client.

    A header is believed only when the peer is one of the trusted proxies, and of several values only the
    last one, which that proxy wrote itself. Without a header's name none is ever looked at.
    """

    def __init__(self, header: str | None, trusted: Sequence[Network]) -> None:
        self._header = header and header.lower()
        self._is_trusted = lru_cache(1024)(lambda peer: _is_within(peer, trusted))

    def of(self, exchange: Exchange) -> str:
        """Return the address as text; empty when there is none that could be told."""
        peer = exchange.peer
        if self._header is None or not self._is_trusted(peer):
            return peer
        named = exchange.headers.get(self._header)
        if named is None:
            return peer
        last = named.rpartition(",")[2].strip()
        return last if parsed(last) is not None else ""


def parsed(text: str) -> Address | None:
    """Return an address without its zone, and as IPv4 where it is one in IPv6's clothes; None when it is none."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def neighbourhood(text: str) -> str:
    """Return whom an address stands for in limits: itself, or the /64 that one IPv6 subscriber has."""
    address = parsed(text)
    if address is None:
        return ""
    return str(address) if address.version == 4 else str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def _is_within(peer: str, networks: Sequence[Network]) -> bool:
    address = parsed(peer)
    return address is not None and any(address in network for network in networks)
