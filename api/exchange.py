"""One request under /v1 as the rooms of the gateway see it, whoever brought it from the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from models.ids import new_id

if TYPE_CHECKING:
    from api.auth import Caller
    from api.limits import Presence


AtEnd = Callable[[Callable[[], object]], None]
"""Register an action for the moment when the work on a request is over, however it ended."""


@dataclass(frozen=True, slots=True)
class Need:
    """Say what a route needs of its caller.

    A metered one is admitted by the gateway, which notices a key that has changed; for any other the key's
    row is read. `scope` None needs nothing beyond a live key.
    """

    scope: str | None
    write: bool
    metered: bool


@dataclass(slots=True)
class Exchange:
    """Hold one request, and what is learned of it on its way.

    `headers` have their names in lower case; of a header that came more than once it is the last.
    `started_s` is by the event loop's clock. `let_body_in` opens the gate before a large body; `body_came` says
    that all of the body came with its head.
    """

    id: str
    method: str
    path: str
    query: bytes
    headers: Mapping[str, str]
    peer: str
    started_s: float
    at_end: AtEnd
    let_body_in: Callable[[], Awaitable[None]] | None = None
    body_came: bool = False
    need: Need | None = None
    caller: Caller | None = None
    presence: Presence | None = None
    offer: str = ""
    streamed: bool = False

    @property
    def resource(self) -> str:
        """Return the path as it stands in usage and in fingerprints."""
        return self.path.rstrip("/")


@dataclass(slots=True)
class Reply:
    """Be an answer on its way to the client: a whole body, or the pieces of a stream."""

    status: int
    body: bytes | AsyncIterator[bytes]
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def end_of(task: asyncio.Task[Any]) -> AtEnd:
    """Return how to register an action for the end of a task."""
    return lambda action: task.add_done_callback(lambda _: action())


def begin(scope: Mapping[str, Any], at_end: AtEnd) -> Exchange:
    """Return the exchange of an ASGI scope (https://asgi.readthedocs.io/en/latest/specs/www.html)."""
    client = scope.get("client")
    gate = scope.get("tollgate.body")
    return Exchange(
        id=new_id("req"),
        method=scope["method"],
        path=scope["path"],
        query=scope["query_string"],
        headers={name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
        peer=client[0] if client else "",
        started_s=asyncio.get_running_loop().time(),
        at_end=at_end,
        let_body_in=None if gate is None else gate.open,
        body_came="tollgate.whole" in scope.get("extensions", ()),
    )
