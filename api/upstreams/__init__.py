"""The upstreams: who can answer a call, one file per wire format."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from api.calls import Answer, Frame, UpstreamChat
from api.pulse import Pulse


class Upstream(Protocol):
    """Answer calls in the neutral format. No web framework and no table in sight.

    Both methods raise `UpstreamFault` for everything the provider does wrong, and nothing else.
    Cancelling either one closes the connection to the provider at once.
    """

    name: str

    def chat_stream(self, chat: UpstreamChat, pulse: Pulse) -> AsyncIterator[Frame]:
        """Yield the frames of a streamed answer.

        A `Frame()` without data is yielded for a tick, so that the gateway can send a ping. The
        generator ends normally only after a terminal event (`finish_reason` or `[DONE]`).
        """
        ...

    async def chat_complete(self, chat: UpstreamChat, pulse: Pulse) -> Answer:
        """Return a whole answer."""
        ...

    async def close(self) -> None:
        """Give back connections."""
        ...
