"""API keys: made and shown once, listed, limited, rotated, revoked."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from quart import Response, g, request
from werkzeug.datastructures import MultiDict

from models import api_key, clock, credentials, ids
from models.catalog import Catalog
from models.database import Row
from models.errors import NotFound
from models.money import usd
from models.plan import SURFACES
from portal.answer import onward, page, wants_fragment
from portal.forms import Form, sent_form
from portal.pages import Pages

PATH = "/dashboard/api-keys"
NEVER, ON_A_DAY, AS_IT_IS = "never", "date", "keep"
LIFETIMES_DAYS = {"30": 30, "90": 90, "365": 365}
EXPIRIES = [
    (NEVER, "Never"), ("30", "In 30 days"), ("90", "In 90 days"), ("365", "In a year"), (ON_A_DAY, "On a day"),
]
PERIODS = [("month", "a month"), ("day", "a day")]
GRACES = [("24", "After a day"), ("1", "After an hour"), ("168", "After a week"), ("0", "At once")]
HOUR_MS = 3600 * 1000
NETWORKS_MAX = 50
SPEND_MICROUSD_MAX = 1_000_000 * 1_000_000
REQUESTS_PER_MINUTE_MAX = 1_000_000
LAST_YEAR = 2100
STATE_KINDS = {"active": "good", "idle": "", "expired": "warn", "revoked": "bad"}
# IPv4 in IPv6's clothes, which callers never wear when they are compared.
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_MADE_ALREADY = f"{PATH}?said=key-made"


@dataclass(frozen=True, slots=True)
class KeyLine:
    """Show one key. `charged` is what it spent in the UTC month, in micro-dollars; `row` has the rest."""

    row: Row
    state: str
    kind: str
    charged: int


@dataclass(frozen=True, slots=True)
class Reveal:
    """Hold a new key for the one time it is shown."""

    name: str
    key: str


def register(pages: Pages) -> None:
    """Add the pages."""
    blueprint, database = pages.blueprint, pages.database

    @blueprint.get(PATH)
    async def api_keys() -> Response:
        if request.args.get("ended"):
            return await _ended(pages)
        return await _list(pages)

    @blueprint.post(PATH)
    async def create_api_key() -> Response:
        form = await sent_form()
        name, limits, expires_at_ms = _read(form, _choices(pages.catalog(), None), None)
        if not form.is_good:
            return await _list(pages, form=form, status=422)
        account_id, plain = g.session.account_id, credentials.new_key()
        try:
            key_id = api_key.id_of_form(account_id, form.typed("form_id"))
            await database.run(lambda: api_key.make(account_id, key_id, plain, name, limits, expires_at_ms))
        except api_key.MadeAlready:
            return await onward(_MADE_ALREADY)
        except (api_key.EmailNotVerified, api_key.TooManyKeys) as error:
            form.refuse("form", _sentence(error))
            return await _list(pages, form=form, status=422)
        return await _list(pages, reveal=Reveal(name, plain))

    @blueprint.get(f"{PATH}/<key_id>")
    async def api_key_page(key_id: str) -> Response:
        return await _one(pages, key_id)

    @blueprint.post(f"{PATH}/<key_id>")
    async def edit_api_key(key_id: str) -> Response:
        key = await _find(pages, key_id)
        form = await sent_form()
        name, limits, expires_at_ms = _read(form, _choices(pages.catalog(), key), key)
        if not form.is_good:
            return await _one(pages, key_id, form=form, status=422)
        account_id = g.session.account_id
        await database.run(lambda: api_key.edit(account_id, key_id, name, limits, expires_at_ms))
        return await onward(f"{PATH}/{key_id}?said=key-saved")

    @blueprint.get(f"{PATH}/<key_id>/rotate")
    async def rotated_api_key(key_id: str) -> Response:
        # Where a new key has been shown; whoever comes back to the address sees it no more.
        await _find(pages, key_id)
        return await onward(PATH)

    @blueprint.post(f"{PATH}/<key_id>/rotate")
    async def rotate_api_key(key_id: str) -> Response:
        key = await _find(pages, key_id)
        form = await sent_form()
        grace = form.choice("grace", [value for value, _ in GRACES])
        expires_at_ms = _expiry(form, key, "new_expires", "new_expires_on")
        if not form.is_good:
            return await _one(pages, key_id, rotation=form, status=422)
        account_id, plain = g.session.account_id, credentials.new_key()
        try:
            new_id = api_key.id_of_form(account_id, form.typed("form_id"))
            name = await database.run(lambda: api_key.rotate(
                account_id, key_id, new_id, plain, grace_ms=int(grace or 0) * HOUR_MS, expires_at_ms=expires_at_ms
            ))
        except api_key.MadeAlready:
            return await onward(_MADE_ALREADY)
        except api_key.TooManyKeys as error:
            form.refuse("form", _sentence(error))
            return await _one(pages, key_id, rotation=form, status=422)
        return await _list(pages, reveal=Reveal(name, plain))

    @blueprint.post(f"{PATH}/<key_id>/revoke")
    async def revoke_api_key(key_id: str) -> Response:
        await _find(pages, key_id)
        await api_key.revoke(g.session.account_id, key_id)
        return await onward(f"{PATH}?said=revoked")


async def _list(
    pages: Pages, *, form: Form | None = None, reveal: Reveal | None = None, status: int = 200
) -> Response:
    """Return the list of live keys, with the form for a new one; the part that htmx asked for, or the page."""
    account_id = g.session.account_id
    rows = await api_key.shown(pages.database, account_id)
    template = "api_keys/_keys.html" if wants_fragment() else "api_keys/index.html"
    return await page(
        template, status=status, form=form, reveal=reveal, keys=await _lines(pages, rows), older=None, ended=False,
        choices=_choices(pages.catalog(), None), expiries=EXPIRIES, periods=PERIODS,
        form_id=ids.new_id("form"), keys_max=api_key.LIVE_KEYS_MAX, is_verified=await _is_verified(pages),
        example=example_offer(pages.catalog()), base_url=f"{pages.settings.public_url}/v1", earliest=_tomorrow(),
    )


async def _ended(pages: Pages) -> Response:
    before = request.args.get("before")
    if before is not None:
        _require_id(before)
    rows = list(await api_key.shown(pages.database, g.session.account_id, ended=True, before=before))
    shown, more = rows[: api_key.LISTED_AT_ONCE], rows[api_key.LISTED_AT_ONCE :]
    older = f"{PATH}?ended=1&before={shown[-1]['id']}" if more else None
    return await page(
        "api_keys/ended.html", keys=await _lines(pages, shown), newer=f"{PATH}?ended=1" if before else None,
        older=older, ended=True,
    )


async def _one(
    pages: Pages, key_id: str, *, form: Form | None = None, rotation: Form | None = None, status: int = 200
) -> Response:
    key = await _find(pages, key_id)
    (line,) = await _lines(pages, [key])
    return await page(
        "api_keys/key.html", status=status, key=line, form=form or _filled(key), rotation=rotation,
        choices=_choices(pages.catalog(), key), expiries=[(AS_IT_IS, _as_it_is(key)), *EXPIRIES], periods=PERIODS,
        graces=GRACES, form_id=ids.new_id("form"), earliest=_tomorrow(),
    )


async def _find(pages: Pages, key_id: str) -> Row:
    """Return a key of whoever is signed in. Raises NotFound, for another's as for one that never was."""
    _require_id(key_id)
    return await api_key.find(pages.database, g.session.account_id, key_id)


def _require_id(text: str) -> None:
    try:
        ids.made_at_ms(text)
    except ValueError:
        raise NotFound(f"there is no key {text}") from None


async def _is_verified(pages: Pages) -> bool:
    rows = await pages.database.fetch(
        "SELECT email_verified_at_ms FROM accounts WHERE id = ?", (g.session.account_id,)
    )
    return bool(rows) and rows[0][0] is not None


async def _lines(pages: Pages, rows: Sequence[Row]) -> list[KeyLine]:
    now = clock.now_ms()
    charged = await api_key.charged_since(pages.database, g.session.account_id, f"{clock.month(now)}-01")
    states = [api_key.state_of(row, now) for row in rows]
    return [
        KeyLine(row, state, STATE_KINDS[state], charged.get(row["id"], 0))
        for row, state in zip(rows, states, strict=True)
    ]


def example_offer(catalog: Catalog) -> str:
    """Return the offer that examples call."""
    return min((offer.id for offer in catalog.offers.values() if offer.surface == "chat"), default="")


# The form of a key's limits.


@dataclass(frozen=True, slots=True)
class Choices:
    """Hold what may be ticked: what there is, and what the key has although there is no such thing any more."""

    scopes: list[str]
    models: list[str]


def _choices(catalog: Catalog, key: Row | None) -> Choices:
    own = (_stored(key, "scopes"), _stored(key, "models"))
    return Choices(
        scopes=[*SURFACES, *(scope for scope in own[0] if scope not in SURFACES)],
        models=sorted({*catalog.offers, *own[1]}),
    )


def _stored(key: Row | None, column: str) -> list[str]:
    return json.loads(key[column]) if key is not None and key[column] else []


def _read(form: Form, choices: Choices, key: Row | None) -> tuple[str, api_key.Limits, int | None]:
    """Read name, limits and expiry. `key` is the one that is changed, None for a new one."""
    name = form.text("name", length_max=api_key.NAME_LENGTH_MAX)
    spend_limit = form.dollars("spend_limit", 10_000, SPEND_MICROUSD_MAX)
    period = form.choice("spend_period", [value for value, _ in PERIODS], required=spend_limit is not None)
    limits = api_key.Limits(
        scopes=_ticked(form, "scopes", choices.scopes, key),
        models=_ticked(form, "models", choices.models, key),
        addresses=_networks(form, key),
        spend_limit_microusd=spend_limit,
        spend_period=period if spend_limit is not None else None,
        requests_per_minute=form.whole("requests_per_minute", 1, REQUESTS_PER_MINUTE_MAX),
    )
    return name, limits, _expiry(form, key, "expires", "expires_on")


def _ticked(form: Form, name: str, choices: list[str], key: Row | None) -> list[str] | None:
    """Return what was ticked; None, which is all, when nothing was, but never from a key that may do nothing."""
    ticked = form.choices(name, choices)
    return ticked or ([] if key is not None and key[name] == "[]" else None)


def _networks(form: Form, key: Row | None) -> list[str] | None:
    networks = []
    for word in form.lines("addresses", count_max=NETWORKS_MAX):
        try:
            networks.append(_network(word))
        except ValueError:
            form.refuse("addresses", f"{word[:60]} is no address or network such as 203.0.113.7 or 2001:db8::/32.")
    return sorted(set(networks)) or ([] if key is not None and key["addresses"] == "[]" else None)


def _network(word: str) -> str:
    if "%" in word:
        raise ValueError("a zone means nothing to anybody else")
    network = ipaddress.ip_network(word, strict=False)
    if network.version == 6 and network.subnet_of(_MAPPED):
        plain = ipaddress.IPv4Address(int(network.network_address) & 0xFFFFFFFF)
        network = ipaddress.ip_network((plain, network.prefixlen - 96))
    return str(network)


def _expiry(form: Form, key: Row | None, field: str, day_field: str) -> int | None:
    choices = [value for value, _ in EXPIRIES] + ([AS_IT_IS] if key is not None else [])
    choice = form.choice(field, choices)
    if choice in (None, NEVER):
        return None
    if choice == AS_IT_IS:
        return key["expires_at_ms"] if key is not None else None
    if choice == ON_A_DAY:
        return _end_of_day_ms(form, day_field)
    return clock.now_ms() + LIFETIMES_DAYS[choice] * api_key.DAY_MS


def _end_of_day_ms(form: Form, field: str) -> int | None:
    text = form.text(field)
    try:
        day = date.fromisoformat(text)
        if not datetime.now(UTC).date() < day or day.year > LAST_YEAR:
            raise ValueError(text)
    except ValueError:
        form.refuse(field, "Choose a day after today.")
        return None
    end = datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)
    return int(end.timestamp()) * 1000


def _filled(key: Row) -> Form:
    """Return the form as it would have been sent for a key as it is."""
    limit = key["spend_limit_microusd"]
    fields: list[tuple[str, str]] = [
        ("name", key["name"]),
        ("expires", AS_IT_IS),
        ("spend_limit", "" if limit is None else _dollars(limit)),
        ("spend_period", key["spend_period"] or "month"),
        ("requests_per_minute", "" if key["requests_per_minute"] is None else str(key["requests_per_minute"])),
        ("addresses", "\n".join(_stored(key, "addresses"))),
        *(("scopes", scope) for scope in _stored(key, "scopes")),
        *(("models", model) for model in _stored(key, "models")),
    ]
    return Form(MultiDict(fields))


def _dollars(amount_microusd: int) -> str:
    whole, _, fraction = usd(amount_microusd).partition(".")
    return f"{whole}.{fraction.rstrip('0').ljust(2, '0')}"


def _as_it_is(key: Row) -> str:
    expires_at_ms = key["expires_at_ms"]
    if expires_at_ms is None:
        return "As it is: never"
    return f"As it is: {datetime.fromtimestamp(expires_at_ms / 1000, UTC):%d %b %Y %H:%M} UTC"


def _tomorrow() -> str:
    return (datetime.now(UTC) + timedelta(days=1)).date().isoformat()


def _sentence(error: Exception) -> str:
    if isinstance(error, api_key.EmailNotVerified):
        return "Verify your e-mail address first. No key was made."
    return f"You have {api_key.LIVE_KEYS_MAX} live keys, which is the most. Revoke one first. No key was made."
