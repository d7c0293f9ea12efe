"""Static files, cached for good under an address that changes with their content."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

from quart import Quart, Response, request
from werkzeug.exceptions import NotFound

TYPES = {
    ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
KEPT = "public, max-age=31536000, immutable"


_FONT = re.compile(rb'url\("\.\./(vendor/[^"]+)"\)')


def register(app: Quart, folder: Path) -> None:
    """Serve the files of a folder, read once, and give templates `static('css/house.css')`."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.suffix in TYPES
    }
    hashes = {name: _hash(content) for name, content in files.items()}
    for name in [name for name in files if name.endswith(".css")]:
        # A sheet names its fonts, so their hashes go into it, and into its own.
        files[name] = _FONT.sub(
            lambda match: f'url("/static/{hashes[match[1].decode()]}/{match[1].decode()}")'.encode(), files[name]
        )
        hashes[name] = _hash(files[name])
    # Compressed once, at the start. Pages are not: what is secret in them must not show in their length.
    packed = {
        name: gzip.compress(content, mtime=0) for name, content in files.items() if not name.endswith(".woff2")
    }
    app.jinja_env.globals["static"] = lambda name: f"/static/{hashes[name]}/{name}"

    @app.get("/static/<digest>/<path:name>")
    async def static_file(digest: str, name: str) -> Response:
        if hashes.get(name) != digest:
            raise NotFound
        takes_packed = name in packed and request.accept_encodings["gzip"] > 0
        response = Response(
            packed[name] if takes_packed else files[name], 200, content_type=TYPES[Path(name).suffix]
        )
        if takes_packed:
            response.headers["content-encoding"] = "gzip"
        response.headers["vary"] = "Accept-Encoding"
        response.headers["cache-control"] = KEPT
        return response


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
