"""Composition: the one place where the rooms are introduced to each other."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest, multiprocess
from quart import Blueprint, Quart, Response, g, request
from werkzeug.exceptions import HTTPException

from api import exchange, openapi, own_calls
from api.auth import Authenticator
from api.client_address import ClientAddress, neighbourhood
from api.direct import dropping, shortened
from api.gateway import Gateway
from api.limits import CHAT_BODY_BYTES_MAX, Limits
from api.metering import Metering
from api.upstreams import Upstream
from api.upstreams.demo import Demo
from api.upstreams.http import Session
from api.upstreams.openai_like import OpenAILike
from api.v1 import CORS_HEADERS, create_blueprint, preflight
from api.v1.chat import DIRECT
from api.v1.services import Services, refused, respond
from models.catalog import Catalog, load_catalog
from models.database import Database
from models.errors import ConfigurationError, DatabaseUnavailable, NotFound, RateLimited
from models.outbox import Letter
from models.process import Process, beat
from models.settings import Settings
from portal import format, mail, rendering, static_files
from portal.answer import page
from portal.edge import Policy, guarded
from portal.guard import Guard, form_token
from portal.logs import write_request
from portal.loops import Loops
from portal.low_credit import LowCredit, Write
from portal.mail import Postman
from portal.pages import (
    NAVIGATION,
    Pages,
    account_end,
    api_keys,
    credits,
    docs,
    forgot,
    home,
    login,
    mailbox,
    models,
    overview,
    parts,
    passkeys,
    playground,
    second_factor,
    signup,
    test_checkout,
    usage,
    verify,
    webhooks,
)
from portal.pages import settings as account_settings
from portal.payments import Payments, processor_of
from portal.tries import Tries
from portal.version import product_version

ROOT = Path(__file__).parent.parent
PROBE_KEPT_S = 1
# What of the domain's errors a page may end with, and the refusals whose own sentence is shown.
ERROR_STATUSES = {NotFound: 404, DatabaseUnavailable: 503, RateLimited: 429}
SAID_STATUSES = (400, 403, 415)
PROBES = ("/healthz", "/readyz", "/metrics")

_log = logging.getLogger("tollgate")


class Tollgate:
    """Hold the parts of one process, from start to stop."""

    def __init__(self, settings: Settings, write: Write) -> None:
        self.settings = settings
        self.write = write
        self.catalog: Catalog = load_catalog(settings)
        self.database = Database(settings.database_url)
        self.process = Process(Path(settings.data_dir))
        self.metering = Metering(self.database, self.process)
        self.limits = Limits(bad_keys_per_minute=settings.bad_keys_per_minute)
        self.authenticator = Authenticator(self.database, lambda: self.catalog)
        self.upstreams: dict[str, Upstream] = {}
        self.gateway = Gateway(
            catalog=lambda: self.catalog,
            upstreams=lambda: self.upstreams,
            authenticator=self.authenticator,
            limits=self.limits,
            metering=self.metering,
            public_url=settings.public_url,
        )
        self.payments = Payments(self.database, settings, processor_of(settings))
        self.loops = Loops(
            self.database, self.process, self.metering, self.gateway, Postman(self.database, settings),
            self.payments, LowCredit(self.database, self.payments, write),
        )
        self._session: Session | None = None
        self._probe: asyncio.Task[bool] | None = None
        self._probed_at_s = 0.0

    async def start(self) -> None:
        """Open the database, write this process down, and start the loops."""
        await self.database.open()
        self.process.start()
        await self.database.run(lambda: beat(self.database, self.process), deadline_s=10)
        self._session = Session()
        self.upstreams = self._connected(self.catalog)
        await self.loops.start()

    async def stop(self) -> None:
        """End in order: loops, upstreams, the last notes, the database last of all."""
        await self.loops.stop()
        await self.payments.close()
        await self.metering.write_notes()
        for upstream in self.upstreams.values():
            await upstream.close()
        if self._session is not None:
            await self._session.close()
        await self.loops.sign_off()
        await self.database.close()
        self.process.stop()

    def reload(self) -> None:
        """Read the operator's file again; keep what runs when it is not valid."""
        try:
            catalog = load_catalog(self.settings)
        except ConfigurationError as error:
            _log.error("the configuration was not reloaded: %s", error)
            return
        self.upstreams = self._connected(catalog)
        self.catalog = catalog
        self.authenticator.forget_all()
        _log.info("the configuration was reloaded: %d offers", len(catalog.offers))

    async def is_ready(self) -> bool:
        """Return whether calls can be taken: not draining, and the database takes a write in time."""
        if self.gateway.draining:
            return False
        # One probe at a time and a second: whoever asks must not be able to keep the disk busy.
        if self._probe is None or (self._probe.done() and time.monotonic() - self._probed_at_s > PROBE_KEPT_S):
            self._probed_at_s = time.monotonic()
            self._probe = self.database.own(self._probe_database())
        return await asyncio.shield(self._probe)

    async def _probe_database(self) -> bool:
        try:
            await self.database.run(lambda: beat(self.database, self.process))
        except DatabaseUnavailable:
            return False
        return True

    def _connected(self, catalog: Catalog) -> dict[str, Upstream]:
        makers: dict[str, Callable[..., Upstream]] = {
            "demo": lambda config: Demo(config.name),
            "openai": lambda config: OpenAILike(
                config.name, config.base_url, config.api_key, session=self._session,
                limit_field=config.limit_field, headers=config.headers,
                strip_obfuscation=config.strip_obfuscation,
            ),
        }
        return {name: makers[config.format](config) for name, config in catalog.upstreams.items()}


def create_app(settings: Settings) -> Quart:
    """Return the application. Raises ConfigurationError."""
    app = Quart("portal", static_folder=None, template_folder=str(ROOT / "templates"))
    app.jinja_environment = rendering.Environment

    async def write(kind: str, recipient: str, **view: object) -> Letter:
        async with app.app_context():
            return await mail.write(kind, recipient, settings, **view)

    tollgate = Tollgate(settings, write)
    app.extensions["tollgate"] = tollgate
    # Quart would cut a response or an upload after 60 seconds, whatever comes.
    app.config.update(RESPONSE_TIMEOUT=None, BODY_TIMEOUT=None, MAX_CONTENT_LENGTH=CHAT_BODY_BYTES_MAX)
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False
    services = Services(
        database=tollgate.database,
        catalog=lambda: tollgate.catalog,
        authenticator=tollgate.authenticator,
        limits=tollgate.limits,
        gateway=tollgate.gateway,
        public_url=settings.public_url,
        client_timeout_s=settings.client_timeout_s,
        addresses=ClientAddress(settings.client_ip_header, settings.trusted_proxies),
    )
    app.register_blueprint(create_blueprint(services))
    static_files.register(app, ROOT / "static")
    app.register_blueprint(_portal(app, tollgate, services))
    webhooks.register(app, settings, tollgate.payments)
    _add_operations(app, tollgate)
    _add_hooks(app, services)
    short = shortened(app.asgi_app, services, DIRECT, _log_request)
    app.asgi_app = guarded(short, edge_policy(settings), dropping)
    app.before_serving(tollgate.start)
    app.after_serving(tollgate.stop)
    return app


def _portal(app: Quart, tollgate: Tollgate, services: Services) -> Blueprint:
    """Return the pages."""
    blueprint = Blueprint("portal", "portal")
    guard = Guard(tollgate.database, tollgate.settings, lambda: services.addresses.of(g.exchange))
    guard.watch(blueprint)
    format.register(app.jinja_env)
    app.jinja_env.globals.update(navigation=NAVIGATION, form_token=lambda: form_token(guard))
    app.context_processor(lambda: {"service_name": tollgate.catalog.service_name})
    pages = Pages(
        blueprint=blueprint, guard=guard, database=tollgate.database, catalog=lambda: tollgate.catalog,
        settings=tollgate.settings, tries=Tries(guard, tollgate.settings, neighbourhood),
        payments=tollgate.payments,
        ask=lambda key_hash, body: own_calls.ask(services, g.exchange, key_hash, body),
    )
    for part in (
        home, docs, signup, verify, login, forgot, overview, api_keys, usage, credits, test_checkout, models,
        playground, account_settings, second_factor, passkeys, account_end, mailbox, parts,
    ):
        part.register(pages)
    return blueprint


def edge_policy(settings: Settings) -> Policy:
    """Return the headers of every answer."""
    return Policy(settings, CORS_HEADERS)


def _add_operations(app: Quart, tollgate: Tollgate) -> None:
    described = openapi.document(
        title=tollgate.catalog.service_name, version=product_version(), public_url=tollgate.settings.public_url
    )

    @app.get("/healthz")
    async def is_alive() -> Response:
        return Response(b"ok\n", 200, content_type="text/plain")

    @app.get("/readyz")
    async def is_ready() -> Response:
        ready = await tollgate.is_ready()
        text, status = (b"ready\n", 200) if ready else (b"not ready\n", 503)
        response = Response(text, status, content_type="text/plain")
        response.headers["cache-control"] = "no-store"
        return response

    @app.get("/metrics")
    async def metrics() -> Response:
        if not _may_see_metrics(tollgate.settings):
            return Response(b"not found\n", 404, content_type="text/plain")
        # Printing many series takes tens of milliseconds, which is too long for the event loop.
        text = await asyncio.to_thread(_metrics_text)
        return Response(text, 200, content_type=CONTENT_TYPE_LATEST)

    @app.get("/openapi.json")
    async def openapi_document() -> Response:
        return Response(described, 200, content_type="application/json")


def _add_hooks(app: Quart, services: Services) -> None:
    @app.before_request
    async def open_request() -> Response | None:
        g.exchange = exchange.begin(request.scope, exchange.end_of(asyncio.current_task()))
        if request.method == "OPTIONS" and _is_api():
            return preflight()
        return None

    @app.after_request
    async def close_request(response: Response) -> Response:
        _log_request(g.exchange, response.status_code)
        response.headers["x-request-id"] = g.exchange.id
        return response

    @app.errorhandler(Exception)
    async def refuse(error: Exception) -> Response:
        if _is_api():
            return respond(await refused(services, g.exchange, error))
        status = error.code or 500 if isinstance(error, HTTPException) else ERROR_STATUSES.get(type(error), 500)
        if status >= 500:
            _log.error("a page failed", exc_info=error, extra={"request_id": g.exchange.id})
        return await _error_page(status, error)


async def _error_page(status: int, error: Exception) -> Response:
    """Return a page that says what happened; plain text when even that fails."""
    sentence = error.description if isinstance(error, HTTPException) and status in SAID_STATUSES else None
    try:
        response = await page("error/index.html", status=status, code=status, sentence=sentence)
    except Exception:
        _log.exception("the error page failed")
        response = Response(f"{status}\n", status, content_type="text/plain")
    response.headers["cache-control"] = "no-store"
    return response


def _log_request(asked: exchange.Exchange, status: int) -> None:
    """Write one line a request; of a stream, when it begins. The address's query is left out."""
    level = logging.DEBUG if asked.path in PROBES else logging.INFO
    if _log.isEnabledFor(level):
        elapsed_ms = round((asyncio.get_running_loop().time() - asked.started_s) * 1000, 1)
        write_request(
            level, request_id=asked.id, method=asked.method, path=asked.path[:200], status=status,
            elapsed_ms=elapsed_ms,
        )


def _is_api() -> bool:
    return request.path == "/v1" or request.path.startswith("/v1/")


def _may_see_metrics(settings: Settings) -> bool:
    """Return whether the asker holds the metrics token, or sits on this machine when none is set."""
    if settings.metrics_token:
        offered = request.headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(offered.encode(), settings.metrics_token.encode())
    peer = request.scope["client"][0] if request.scope.get("client") else ""
    return peer in ("127.0.0.1", "::1") and not _came_through_a_proxy(settings)


def _came_through_a_proxy(settings: Settings) -> bool:
    names = ["x-forwarded-for", "forwarded", "via", settings.client_ip_header or ""]
    return any(name and name in request.headers for name in names)


def _metrics_text() -> bytes:
    registry = CollectorRegistry()
    try:
        multiprocess.MultiProcessCollector(registry)
    except ValueError:
        # One process: its own registry is the whole truth.
        return generate_latest()
    return generate_latest(registry)

