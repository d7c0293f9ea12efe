"""Who calls: from the Authorization header to a `Caller`.

A caller found once is kept in memory, because its admission checks in the same transaction that the
key is still live and unchanged: no process ever runs a call for a revoked key. Everything that is
answered without an admission (lists, refusals) reads the key's row.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from api.client_address import Address, parsed
from api.errors import ApiError, invalid_key, missing_key
from models import api_key, credentials
from models.catalog import Catalog
from models.database import Database
from models.plan import Plan

CACHED_CALLERS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Be an authenticated key, its account and plan."""

    key: api_key.LiveKey
    plan: Plan
    key_hash: str

    @property
    def account_id(self) -> str:
        """Return the account every query of this request is narrowed to."""
        return self.key.account_id

    def may(self, scope: str, *, write: bool = False) -> bool:
        """Return whether plan and key include a surface; `chat:read` on a key allows reading only."""
        if not self.plan.includes(scope):
            return False
        if self.key.scopes is None or scope in self.key.scopes:
            return True
        return not write and f"{scope}:read" in self.key.scopes

    def may_come_from(self, address: str) -> bool:
        """Return whether the key may be used from an IP address."""
        return self.key.addresses is None or _allowed(address, self.key.addresses)

    def may_use(self, offer_id: str) -> bool:
        """Return whether the key may use an offer."""
        return self.key.models is None or offer_id in self.key.models


class Authenticator:
    """Turn credentials into callers."""

    def __init__(self, database: Database, catalog: Callable[[], Catalog]) -> None:
        self._database = database
        self._catalog = catalog
        self._callers: OrderedDict[str, Caller] = OrderedDict()

    async def caller(self, credential: str | None, *, fresh: bool = False) -> Caller:
        """Return who calls. Raises ApiError 401.

        `fresh` reads the key's row even when the caller is known.
        """
        if not credential:
            raise missing_key()
        if not credentials.is_well_formed(credential):
            raise invalid_key()
        key_hash = credentials.key_hash(credential)
        caller = None if fresh else self._callers.get(key_hash)
        if caller is None:
            caller = await self._read(key_hash)
        return caller

    async def caller_by_hash(self, key_hash: str) -> Caller:
        """Return the caller of a key that its own house knows by its hash. Raises ApiError 401."""
        return self._callers.get(key_hash) or await self._read(key_hash)

    async def confirm(self, caller: Caller) -> Caller:
        """Return the caller as its row says now. Raises ApiError 401 when the key is no longer live."""
        return await self._read(caller.key_hash)

    async def has_changed(self, caller: Caller) -> bool:
        """Return whether the key or its account is not what a caller was built from. Raises ApiError 401."""
        return (await self._read(caller.key_hash)).key != caller.key

    def forget(self, caller: Caller) -> None:
        """Drop a caller whose key or account has changed."""
        self._callers.pop(caller.key_hash, None)

    def forget_all(self) -> None:
        """Drop all callers: the plans have changed."""
        self._callers.clear()

    async def _read(self, key_hash: str) -> Caller:
        key = await api_key.live_by_hash(self._database, key_hash)
        if key is None:
            self._callers.pop(key_hash, None)
            raise invalid_key()
        plan = self._catalog().plans.get(key.plan)
        if plan is None:
            raise ApiError(403, "scope_denied", "The account's plan is no longer offered. Contact the operator.")
        caller = Caller(key, plan, key_hash)
        self._callers[key_hash] = caller
        self._callers.move_to_end(key_hash)
        if len(self._callers) > CACHED_CALLERS_MAX:
            self._callers.popitem(last=False)
        return caller


def credential_in(authorization: str | None, *others: str | None) -> str | None:
    """Return the key in an Authorization header, else the first of the other key headers."""
    text = (authorization or "").strip()
    scheme, _, value = text.partition(" ")
    if scheme.lower() == "bearer":
        text = value.strip()
    return next((other.strip() for other in (text, *others) if other and other.strip()), None)


def _allowed(address: str, networks: tuple[str, ...]) -> bool:
    ip = parsed(address)
    return ip is not None and any(_holds(network, ip) for network in networks)


def _holds(network: str, ip: Address) -> bool:
    """Return whether a network holds an address; one that is none lets nobody in."""
    try:
        return ip in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False
