"""Logs: one JSON object a line, and no secret in it."""

from __future__ import annotations

import json
import logging

import pytest

from models import credentials
from portal.logs import JsonFormatter, redacted


def formatted(message: str, *arguments: object, **extra: object) -> str:
    """Return the line of a record."""
    record = logging.getLogger("x").makeRecord(
        "x", logging.INFO, "file", 1, message, arguments, None, extra=extra
    )
    return JsonFormatter().format(record)


def test_a_line_is_json_with_its_extras() -> None:
    line = json.loads(formatted("hello %s", "there", request_id="req_1", status=200, absent=None))
    assert (line["message"], line["request_id"], line["status"]) == ("hello there", "req_1", 200)
    assert "absent" not in line and line["level"] == "info" and line["time"].endswith("+00:00")


def test_a_record_cannot_forge_another() -> None:
    assert "\n" not in formatted("one\n{\"level\":\"error\"}\x1b[31m")


@pytest.mark.parametrize("secret", [
    "sk-tg-0000000000000000000000000000002P0j63", "sk-proj-abcdefghijklmnop", "whsec_abcdefghijklmnop",
    "sk_live_abcdefghijklmnop", "rk_test_abcdefghijklmnop",
    "Bearer abcdefghijkl",
    "https://host/?api_key=abcdefghijkl", '"password": "abcdefghijkl"', "postgres://user:abcdefghijkl@host/db",
    "x-api-key: abcdefghijkl",
])
def test_secrets_are_left_out(secret: str) -> None:
    hidden = redacted(f"before {secret} after")
    assert hidden.startswith("before ") and hidden.endswith(" after")
    assert "abcdefghijkl" not in hidden and secret not in hidden


def test_secrets_in_exceptions_and_extras_are_left_out() -> None:
    key = credentials.new_key()
    try:
        raise ValueError(key)
    except ValueError:
        record = logging.getLogger("x").makeRecord(
            "x", logging.ERROR, "file", 1, "failed", (), __import__("sys").exc_info(), extra={"detail": key}
        )
    line = JsonFormatter().format(record)
    assert key not in line and "ValueError" in line


def test_ordinary_words_stay() -> None:
    text = "the key was read, a token count of 12 and a monkey=banana tree"
    assert redacted(text) == text
