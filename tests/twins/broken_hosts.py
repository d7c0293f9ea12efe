"""Addresses at which no provider can be talked to, on loopback: a black hole, and TLS gone wrong in every way.

`BrokenHosts(folder)` serves them from a thread of its own while its context is open. Its certificates are
made with the `openssl` command; `ca_path` is the authority that signed them.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import subprocess
import threading
import warnings
from pathlib import Path

from tests.twins.upstream import UpstreamTwin

BACKLOG_WAIT_S = 0.2
CONNECTIONS_MAX = 16


class BlackHole:
    """Hold a port whose connections are neither accepted nor refused: its backlog is full."""

    def __init__(self) -> None:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        self.port: int = self._listener.getsockname()[1]
        self._waiting: list[socket.socket] = []
        while self._takes_another():
            assert len(self._waiting) < CONNECTIONS_MAX, "this system's backlog cannot be filled"

    def close(self) -> None:
        """Give the port back."""
        for one in (*self._waiting, self._listener):
            one.close()

    def _takes_another(self) -> bool:
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", self.port))
        self._waiting.append(one)
        return bool(select.select([], [one], [], BACKLOG_WAIT_S)[1])


class BrokenHosts:
    """Serve every broken host while the context is open; `urls` by name, `twins` those that can be heard."""

    def __init__(self, folder: Path) -> None:
        self.ca_path = folder / "ca.pem"
        self.urls: dict[str, str] = {}
        self.twins: dict[str, UpstreamTwin] = {}
        self._folder = folder
        self._black_hole = BlackHole()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> BrokenHosts:
        _make_certificates(self._folder)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(20)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._black_hole.close()

    async def _open(self) -> None:
        contexts = {name: _context(self._folder, name) for name in ("good", "expired", "elsewhere", "self-signed")}
        contexts["old"] = _context(self._folder, "good")
        contexts["old"].set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            contexts["old"].minimum_version = contexts["old"].maximum_version = ssl.TLSVersion.TLSv1
        for name, context in contexts.items():
            twin = UpstreamTwin(tls=context)
            await twin.__aenter__()
            self.twins[f"tls-{name}"] = twin
            self.urls[f"tls-{name}"] = f"https://localhost:{twin.port}/v1"
        self._stall = await asyncio.start_server(self._swallow, "127.0.0.1", 0)
        self.urls["tls-stall"] = f"https://localhost:{self._stall.sockets[0].getsockname()[1]}/v1"
        self.urls["black-hole"] = f"http://127.0.0.1:{self._black_hole.port}/v1"
        self.urls["no-such-name"] = "http://provider.invalid/v1"
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            self.urls["closed"] = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"

    async def _swallow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            pass
        writer.close()

    async def _close(self) -> None:
        self._stall.close()
        for twin in self.twins.values():
            await twin.__aexit__()


def _context(folder: Path, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return context


def _make_certificates(folder: Path) -> None:
    """Make an authority and what it signed: one certificate that is good, one too old, one for another host."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "self-signed"):
        openssl("req", "-x509", *key, "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost",
                "-keyout", f"{name}.key", "-out", f"{name}.pem")
    signed = (("good", "localhost", "1"), ("expired", "localhost", "-1"), ("elsewhere", "x.test", "1"))
    for name, host, days in signed:
        (folder / f"{name}.ext").write_text(f"subjectAltName=DNS:{host}\n")
        openssl("req", *key, "-subj", f"/CN={host}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", days, "-extfile", f"{name}.ext", "-out", f"{name}.pem")
