"""Logs: one JSON object a line, with the request's id, and no secret in it."""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec

_SECRETS = re.compile(
    r"(sk-[A-Za-z0-9_-]{4})[A-Za-z0-9_-]{4,}"
    r"|(whsec_)[A-Za-z0-9+/=_-]+"
    r"|([sr]k_(?:live|test)_)[A-Za-z0-9_]+"
    r"|(?i:(bearer\s+))[^\s\"',;]+"
    r"|(?i:\b((?:api[-_]?key|key|token|secret|password)[\"']?\s*[=:]\s*[\"']?))[^\s\"'&,;}]{6,}"
    r"|(://[^/\s:@]*:)[^@\s/]+(?=@)"
    r"|(/(?:verify|reset|change-email)/)[A-Za-z0-9_%-]{8,}"
)
# What JSON leaves as it is and a terminal obeys: C1 controls, marks of direction, other ends of lines.
_UNSEEN = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def redacted(text: str) -> str:
    """Return a text without what looks like a key, a password or a token."""
    return _SECRETS.sub(lambda match: next(group for group in match.groups() if group is not None) + "…", text)


# The same few paths come again and again.
_redacted_path = lru_cache(1024)(redacted)


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON; what `extra` adds stands beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. Control characters are escaped by JSON, so no record can forge another."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD and value not in (None, ""):
                line[name] = value if isinstance(value, int | float) else redacted(str(value))
        if record.exc_info:
            line["exception"] = redacted(self.formatException(record.exc_info))
        return _visible(msgspec.json.encode(line).decode())


def write_request(
    level: int, *, request_id: str, method: str, path: str, status: int, elapsed_ms: float
) -> None:
    """Write a request's line as the formatter would; through `logging` each would take as long as a payment."""
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": logging.getLevelName(level).lower(),
        "logger": "tollgate", "message": "request", "request_id": request_id, "method": method,
        "path": _redacted_path(path), "status": status, "elapsed_ms": elapsed_ms,
    }
    sys.stderr.write(_visible(msgspec.json.encode(line).decode()) + "\n")


def _visible(text: str) -> str:
    plain = text.isascii() and "\x7f" not in text
    return text if plain else _UNSEEN.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def set_up(level: str) -> None:
    """Send all logs to standard error, as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # They repeat at INFO what our own line says, and at DEBUG they print what was sent.
    for noisy in (
        "asyncio", "aiosqlite", "tortoise", "tortoise.db_client", "hypercorn.access", "aiohttp.access", "stripe",
    ):
        logging.getLogger(noisy).setLevel(max(logging.getLogger().level, logging.WARNING))
