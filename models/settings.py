"""Settings: the environment, read once into a frozen value that names everything wrong with it.

| Variable | Means | Default |
|---|---|---|
| HOST | address to listen on; a container wants 0.0.0.0 | 127.0.0.1 |
| PORT | port to listen on | 8000 |
| DATA_DIR | directory for everything kept on disk | ./data |
| DATABASE_URL | sqlite:///relative.db, sqlite:////absolute.db, postgresql://… | a file in DATA_DIR |
| PUBLIC_URL | address that users see; https means production | http://localhost:PORT |
| SECRET_KEY | signs sessions; 32 characters or more; required in production | new at every start |
| PROCESSES | processes that serve, 1 to 64 | 1 |
| TOLLGATE_CONFIG | TOML file of what is sold | none |
| DRAIN_SECONDS | how long running calls may finish at a stop, 1 to 300 | 90 |
| CLIENT_TIMEOUT_SECONDS | how long a client may neither send nor take a byte, 1 to 600 | 30 |
| LOG_LEVEL | debug, info, warning or error | info |
| CLIENT_IP_HEADER | header in which the operator's own proxy names the client | none |
| TRUSTED_PROXIES | addresses and networks that header is believed from | loopback and private networks |
| BAD_KEYS_PER_MINUTE | requests without a good key that one client address may make, 1 to 1000000 | 60 |
| SIGN_UPS_PER_DOMAIN | sign-ups an hour with mail addresses of one domain, 1 to 1000000 | 20 |
| METRICS_TOKEN | opens /metrics to a bearer of it | none |
| SMTP_URL | mail server: smtp://user:password@host:port, smtps://…; required in production | none: console |
| MAIL_FROM | address that mail comes from | no-reply@ the host of PUBLIC_URL |
| MAIL_TO_CONSOLE | yes prints mail instead of sending it, in production too | no |
| TEST_CHECKOUT | yes or no: credit is sold for pretended payments; never in production | yes, but no with Stripe |
| TOP_UP_MAX_USD | the most one top-up may buy, in dollars, 10 to 1000000 | 10000 |
| STRIPE_SECRET_KEY | sells credit by Stripe: sk_live_… or, for Stripe's test mode, sk_test_… | none |
| STRIPE_WEBHOOK_SECRET | whsec_…, of the endpoint PUBLIC_URL/webhooks/stripe; required with the key | none |
| STRIPE_TAX | yes adds tax by Stripe Tax to what is paid, not to the credit | no |
| STRIPE_INVOICES | yes has Stripe write an invoice for each top-up | no |
| STRIPE_RECEIPTS | yes has Stripe mail a receipt for each top-up | yes |
| STRIPE_API_BASE | address of Stripe's API, for a stand-in of it | https://api.stripe.com |

A variable that is empty or blank counts as not set.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from models.errors import ConfigurationError

SECRET_KEY_CHARACTERS_MIN = 32
PROCESSES_MAX = 64
DRAIN_S_MAX = 300
CLIENT_TIMEOUT_S_MAX = 600
TOP_UP_MIN_USD = 10
LOG_LEVELS = ("debug", "info", "warning", "error")
DATABASE_FILE = "tollgate.sqlite3"
# Where an operator's own proxy sits: on the same machine, or on a network that strangers have no address in.
PRIVATE_NETWORKS = (
    "127.0.0.0/8,::1/128,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,100.64.0.0/10,169.254.0.0/16,fc00::/7,fe80::/10"
)

# RFC 9110, 5.6.2: a field name is a token.
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_STRIPE_KEY = re.compile(r"[sr]k_(live|test)_[A-Za-z0-9_]{8,}")
_STRIPE_SECRET = re.compile(r"whsec_[A-Za-z0-9+/=_-]{24,}")
_HOST = re.compile(r"[A-Za-z0-9.:_-]+")
_MAIL_FROM = re.compile(r"[^<>@\s]+@[^<>@\s]+|[^<>@\r\n\"]*<[^<>@\s]+@[^<>@\s]+>")
Network = IPv4Network | IPv6Network
_SQLITE = "sqlite:///"
_POSTGRESQL = ("postgres://", "postgresql://")


@dataclass(frozen=True, slots=True)
class MailServer:
    """Be the server that takes our mail. `tls` is from the first byte on; otherwise it is used when offered."""

    host: str
    port: int
    user: str | None
    password: str | None = field(repr=False)
    tls: bool


@dataclass(frozen=True, slots=True)
class Stripe:
    """Be what Stripe is reached with, and what it is asked to do for each top-up."""

    secret_key: str = field(repr=False)
    webhook_secret: str = field(repr=False)
    api_base: str | None
    tax: bool
    invoices: bool
    receipts: bool

    @property
    def live(self) -> bool:
        """Tell whether real money moves."""
        return "_live_" in self.secret_key


@dataclass(frozen=True, slots=True)
class Settings:
    """Hold what the environment says. Secrets never show in the representation.

    `public_url` has no trailing slash. `database_url` is kept as given, password included;
    `environ` is the whole environment, for the provider keys that the catalog names.
    """

    host: str
    port: int
    data_dir: Path
    database_url: str = field(repr=False)
    public_url: str
    secret_key: str = field(repr=False)
    processes: int
    config_path: Path | None
    drain_s: int
    client_timeout_s: int
    log_level: str
    client_ip_header: str | None
    trusted_proxies: tuple[Network, ...]
    bad_keys_per_minute: int
    sign_ups_per_domain: int
    metrics_token: str | None = field(repr=False)
    mail_server: MailServer | None
    mail_from: str
    test_checkout: bool
    top_up_max_usd: int
    stripe: Stripe | None
    environ: Mapping[str, str] = field(repr=False)

    @property
    def production(self) -> bool:
        """Tell whether strangers are served: then nothing pretended runs unless asked for by name."""
        return self.public_url.startswith("https://")

    @property
    def sqlite_path(self) -> Path | None:
        """Return the SQLite file, or None when the database is PostgreSQL."""
        if not self.database_url.startswith(_SQLITE):
            return None
        return Path(self.database_url.removeprefix(_SQLITE))


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Read the environment. Raises ConfigurationError with one problem for each wrong variable."""
    read = _Reader(environ)
    port = read.whole("PORT", 8000, 1, 65_535)
    data_dir = Path(read.text("DATA_DIR") or "./data")
    public_url = read.public_url(f"http://localhost:{port}")
    settings = Settings(
        host=read.matching("HOST", _HOST, "a host name or an address") or "127.0.0.1",
        port=port,
        data_dir=data_dir,
        database_url=read.database_url(_SQLITE + str(data_dir / DATABASE_FILE)),
        public_url=public_url,
        secret_key=read.secret_key(required=public_url.startswith("https://")),
        processes=read.whole("PROCESSES", 1, 1, PROCESSES_MAX),
        config_path=read.file("TOLLGATE_CONFIG"),
        drain_s=read.whole("DRAIN_SECONDS", 90, 1, DRAIN_S_MAX),
        client_timeout_s=read.whole("CLIENT_TIMEOUT_SECONDS", 30, 1, CLIENT_TIMEOUT_S_MAX),
        log_level=read.choice("LOG_LEVEL", LOG_LEVELS, "info"),
        client_ip_header=read.matching("CLIENT_IP_HEADER", _HEADER_NAME, "the name of a header"),
        trusted_proxies=read.networks("TRUSTED_PROXIES", PRIVATE_NETWORKS),
        bad_keys_per_minute=read.whole("BAD_KEYS_PER_MINUTE", 60, 1, 1_000_000),
        sign_ups_per_domain=read.whole("SIGN_UPS_PER_DOMAIN", 20, 1, 1_000_000),
        metrics_token=read.text("METRICS_TOKEN"),
        mail_server=read.mail_server(required=public_url.startswith("https://")),
        mail_from=read.mail_from(f"no-reply@{urlsplit(public_url).hostname}"),
        test_checkout=read.test_checkout(
            production=public_url.startswith("https://"), sells=read.text("STRIPE_SECRET_KEY") is not None
        ),
        top_up_max_usd=read.whole("TOP_UP_MAX_USD", 10_000, TOP_UP_MIN_USD, 1_000_000),
        stripe=read.stripe(),
        environ=dict(environ),
    )
    if read.problems:
        raise ConfigurationError(read.problems)
    return settings


class _Reader:
    """Read variables one by one and keep what is wrong with them; a wrong one reads as its default."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[str] = []

    def text(self, name: str) -> str | None:
        return self.environ.get(name, "").strip() or None

    def whole(self, name: str, default: int, lowest: int, highest: int) -> int:
        text = self.text(name)
        if text is None:
            return default
        # Nine digits are enough for every variable, and int() takes more forms than these.
        if re.fullmatch(r"[0-9]{1,9}", text) and lowest <= int(text) <= highest:
            return int(text)
        self.problems.append(f"{name}: {text!r} is not a whole number from {lowest} to {highest}")
        return default

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        text = (self.text(name) or default).lower()
        if text in choices:
            return text
        self.problems.append(f"{name}: {text!r} is none of {', '.join(choices)}")
        return default

    def matching(self, name: str, pattern: re.Pattern[str], what: str) -> str | None:
        text = self.text(name)
        if text is None or pattern.fullmatch(text):
            return text
        self.problems.append(f"{name}: {text!r} is not {what}")
        return None

    def networks(self, name: str, default: str) -> tuple[Network, ...]:
        networks = []
        for text in (self.text(name) or default).split(","):
            try:
                networks.append(ip_network(text.strip()))
            except ValueError:
                self.problems.append(f"{name}: {text.strip()!r} is neither an address nor a network")
        return tuple(networks)

    def file(self, name: str) -> Path | None:
        text = self.text(name)
        if text is None:
            return None
        if not Path(text).is_file():
            self.problems.append(f"{name}: there is no file {text!r}")
        return Path(text)

    def public_url(self, default: str) -> str:
        text = (self.text("PUBLIC_URL") or default).rstrip("/")
        if _is_origin(text):
            return text
        self.problems.append(
            f"PUBLIC_URL: {text!r} is not an address such as https://gateway.example, without a path"
        )
        return default

    def database_url(self, default: str) -> str:
        text = self.text("DATABASE_URL") or default
        scheme = next((known for known in (_SQLITE, *_POSTGRESQL) if text.startswith(known)), None)
        if scheme and len(text) > len(scheme) and not text.endswith(":memory:"):
            return text
        # The value is not repeated: it may hold a password.
        self.problems.append("DATABASE_URL: write sqlite:///path/to/file, postgres://… or postgresql://…")
        return default

    def secret_key(self, *, required: bool) -> str:
        text = self.text("SECRET_KEY")
        characters = f"{SECRET_KEY_CHARACTERS_MIN} characters"
        if text is None and required:
            self.problems.append(f"SECRET_KEY: missing; with an https PUBLIC_URL set {characters} or more")
        elif text is not None and len(text) < SECRET_KEY_CHARACTERS_MIN:
            self.problems.append(f"SECRET_KEY: shorter than {characters}")
        return text or secrets.token_urlsafe(48)

    def test_checkout(self, *, production: bool, sells: bool) -> bool:
        wanted = self.choice("TEST_CHECKOUT", ("yes", "no"), "no" if production or sells else "yes") == "yes"
        if wanted and production:
            self.problems.append("TEST_CHECKOUT: not with an https PUBLIC_URL; pretended payments would buy calls")
        elif wanted and sells:
            self.problems.append("TEST_CHECKOUT: not beside STRIPE_SECRET_KEY; credit is sold in one way")
        return wanted

    def stripe(self) -> Stripe | None:
        """Return how Stripe is reached. Without a secret, its events could not be told from forged ones."""
        key, secret = self.text("STRIPE_SECRET_KEY"), self.text("STRIPE_WEBHOOK_SECRET")
        tax = self.choice("STRIPE_TAX", ("yes", "no"), "no") == "yes"
        invoices = self.choice("STRIPE_INVOICES", ("yes", "no"), "no") == "yes"
        receipts = self.choice("STRIPE_RECEIPTS", ("yes", "no"), "yes") == "yes"
        base = self.stripe_base()
        if key is None and secret is None:
            return None
        # The values are not repeated: they are secrets.
        if key is None:
            self.problems.append("STRIPE_SECRET_KEY: missing; STRIPE_WEBHOOK_SECRET alone takes no money")
        elif not _STRIPE_KEY.fullmatch(key):
            self.problems.append("STRIPE_SECRET_KEY: write sk_live_… or, for Stripe's test mode, sk_test_…")
        if secret is None:
            self.problems.append(
                "STRIPE_WEBHOOK_SECRET: missing; set the whsec_… of the endpoint PUBLIC_URL/webhooks/stripe"
            )
        elif not _STRIPE_SECRET.fullmatch(secret):
            self.problems.append("STRIPE_WEBHOOK_SECRET: write whsec_ and the 24 characters or more that follow it")
        return Stripe(key or "", secret or "", base, tax, invoices, receipts)

    def stripe_base(self) -> str | None:
        text = (self.text("STRIPE_API_BASE") or "").rstrip("/") or None
        if text is None or (_is_origin(text) and (
            text.startswith("https://") or urlsplit(text).hostname in ("localhost", "127.0.0.1", "::1")
        )):
            return text
        self.problems.append(f"STRIPE_API_BASE: {text!r} is not an https address without a path")
        return None

    def mail_server(self, *, required: bool) -> MailServer | None:
        to_console = self.choice("MAIL_TO_CONSOLE", ("yes", "no"), "no") == "yes"
        text = self.text("SMTP_URL")
        if text is None:
            if required and not to_console:
                self.problems.append(
                    "SMTP_URL: missing; with an https PUBLIC_URL name a mail server, or set MAIL_TO_CONSOLE=yes"
                )
            return None
        parts = _mail_parts(text)
        if parts is None:
            # The value is not repeated: it may hold a password.
            self.problems.append("SMTP_URL: write smtp://host:port or smtps://host:port, user:password@ in front")
            return None
        tls = parts.scheme == "smtps"
        return None if to_console else MailServer(
            host=parts.hostname or "", port=parts.port or (465 if tls else 587),
            user=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None, tls=tls,
        )

    def mail_from(self, default: str) -> str:
        text = self.text("MAIL_FROM")
        if text is None or (_MAIL_FROM.fullmatch(text) and text.isprintable()):
            return text or default
        self.problems.append(f"MAIL_FROM: {text!r} is not an address such as Tollgate <mail@gateway.example>")
        return default


def _mail_parts(text: str) -> SplitResult | None:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("smtp", "smtps") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if good and parts.path in ("", "/") and not (parts.query or parts.fragment) else None


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port_is_good = parts.port != 0
    except ValueError:
        return False
    whole = f"{parts.scheme}://{parts.netloc}"
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and "@" not in parts.netloc
        and not re.search(r"\s", text)
        and text == whole
        and port_is_good
    )
