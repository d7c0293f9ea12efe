"""The domain's few errors. They carry facts; each edge translates them in one table."""

from __future__ import annotations


class ConfigurationError(Exception):
    """Report everything that is wrong with the environment or the configuration file at once."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class DomainError(Exception):
    """Be the parent of what a caller can be told."""


class UnknownKey(DomainError):
    """Report a key that does not exist, was revoked, or has expired; the caller is not told which."""


class CallerChanged(DomainError):
    """Report that the key or its account changed since it was read: read it again and retry."""


class RateLimited(DomainError):
    """Report a full rate window. `limit` calls are allowed in it; it ends at `until_ms`."""

    def __init__(self, bucket: str, limit: int, until_ms: int) -> None:
        super().__init__(f"{limit} calls a minute")
        self.bucket = bucket
        self.limit = limit
        self.until_ms = until_ms


class InsufficientCredits(DomainError):
    """Report that neither the included calls nor the wallet cover a call.

    Amounts in micro-dollars. `reason` is "balance", "key_limit" (the key's own spending limit), "disputed"
    or "debt" (a refund or dispute took more than there was); `included_too_small` says that an included call
    was there, but the call's input alone exceeds what one may cost.
    """

    def __init__(
        self, *, needed: int, available: int, reason: str = "balance", included_too_small: bool = False
    ) -> None:
        super().__init__(f"{reason}: {needed} micro-dollars needed, {available} available")
        self.needed = needed
        self.available = available
        self.reason = reason
        self.included_too_small = included_too_small


class IdempotencyKeyReused(DomainError):
    """Report an idempotency key that was used before with another request."""


class NotFound(DomainError):
    """Report that the account has nothing of that id."""


class DatabaseUnavailable(DomainError):
    """Report that the database did not answer within its deadline, or not at all."""
