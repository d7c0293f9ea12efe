"""Server-sent events: a parser that knows nothing of sockets, and the frames we write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

LINE_BYTES_MAX = 1 << 20
EVENT_BYTES_MAX = 4 << 20

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CR, _LF = 0x0D, 0x0A


class EventTooLarge(ValueError):
    """Report a line above `LINE_BYTES_MAX` or an event above `EVENT_BYTES_MAX`."""


@dataclass(frozen=True, slots=True)
class Event:
    """Hold one event: its `data:` lines joined by newlines, and its `event:` name if it has one."""

    data: bytes
    name: str | None = None


def encode(obj: Any) -> bytes:
    """Return one data frame holding `obj` as compact JSON."""
    return b"data: %b\n\n" % msgspec.json.encode(obj)


class EventParser:
    """Cut a byte stream into events, however the network cut it.

    Follows the WHATWG rules: lines end in LF, CR or CRLF, a leading byte order mark is dropped,
    comments and unknown fields are skipped, an event without its closing blank line is never
    dispatched. Time is linear in the bytes fed, also byte by byte.
    """

    __slots__ = ("_after_cr", "_data", "_data_bytes", "_line", "_name", "_started")

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._name: str | None = None
        self._after_cr = False
        self._started = False

    @property
    def pending(self) -> int:
        """Return how many bytes of an unfinished event are held; 0 between events."""
        return len(self._line) + self._data_bytes + len(self._name or "")

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes. Raises `EventTooLarge`."""
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")  # the second half of a CRLF that was cut in two
        if not data:
            return []
        events: list[Event] = []
        for line in data.splitlines(keepends=True):
            body = _without_line_end(line)
            if len(self._line) + len(body) > LINE_BYTES_MAX:
                raise EventTooLarge(f"a line of an event stream is above {LINE_BYTES_MAX} bytes")
            if len(body) == len(line):
                self._line += body
            else:
                self._take_line(self._completed(body), events)
        self._after_cr = data[-1] == _CR
        return events

    def _completed(self, body: bytes) -> bytes:
        if self._line:
            self._line += body
            body = bytes(self._line)
            self._line.clear()
        if not self._started:
            self._started = True
            body = body.removeprefix(_BYTE_ORDER_MARK)
        return body

    def _take_line(self, line: bytes, events: list[Event]) -> None:
        if not line:
            self._dispatch(events)
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._add_data(value.removeprefix(b" "))
        elif field == b"event":
            self._name = value.removeprefix(b" ").decode("utf-8", "replace") or None

    def _add_data(self, value: bytes) -> None:
        self._data.append(value)
        self._data_bytes += len(value) + 1
        if self._data_bytes > EVENT_BYTES_MAX:
            raise EventTooLarge(f"an event is above {EVENT_BYTES_MAX} bytes")

    def _dispatch(self, events: list[Event]) -> None:
        if self._data:
            events.append(Event(b"\n".join(self._data), self._name))
            self._data = []
            self._data_bytes = 0
        self._name = None


def _without_line_end(line: bytes) -> bytes:
    if line[-1] == _LF:
        return line[:-2] if line[-2:-1] == b"\r" else line[:-1]
    return line[:-1] if line[-1] == _CR else line
