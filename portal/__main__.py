"""The command line: python -m portal serve | migrate | check | audit | account | key | credit | code."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, date, datetime, time
from typing import TypeVar

from models import account as accounts
from models import api_key, clock, ids, ledger, password, redeem_code, wallet
from models.api_key import ApiKey
from models.catalog import Catalog, load_catalog
from models.clock import now_ms
from models.database import Database, migrate, pending_migrations
from models.errors import ConfigurationError, DatabaseUnavailable, DomainError
from models.money import MICROUSD_PER_CENT, microusd, usd
from models.plan import PLAN_OF_NEW_ACCOUNTS, PLAN_OF_PAYING_ACCOUNTS, SURFACES
from models.refund import Refund
from models.settings import Settings, read_settings
from portal import logs
from portal.payments import Payments, ProcessorUnavailable, processor_of
from portal.supervisor import AddressInUse, supervise
from portal.version import product_version

T = TypeVar("T")
DEMO_EMAIL = "demo@tollgate.local"
EXIT_REFUSED = 2
DAY_S = 24 * 3600
EXIT_VIOLATION = 3


class Refused(Exception):
    """Report a command that cannot be carried out, in one sentence for its user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 refused, 3 the books do not add up."""
    options = _parser().parse_args(arguments)
    try:
        settings = read_settings(os.environ)
        logs.set_up(settings.log_level if options.command == "serve" else "warning")
        return options.run(settings, options)
    except ConfigurationError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
    except DatabaseUnavailable as error:
        print(f"the database cannot be used: {error.__cause__ or error}", file=sys.stderr)
    except (DomainError, Refused, AddressInUse) as error:
        print(error, file=sys.stderr)
    return EXIT_REFUSED


def _serve(settings: Settings, options: argparse.Namespace) -> int:
    if options.child:
        # All that serves: the supervisor, and no other command, has use for it.
        from portal.server import serve_child  # noqa: PLC0415

        serve_child(settings)
        return 0
    catalog = load_catalog(settings)
    asyncio.run(migrate(settings.database_url))
    asyncio.run(_on_database(settings, lambda database: _welcome(settings, catalog, database)))
    sys.stdout.flush()
    return supervise(settings, [sys.executable, "-m", "portal", "serve", "--child"])


def _migrate(settings: Settings, options: argparse.Namespace) -> int:
    applied = asyncio.run(migrate(settings.database_url))
    for name in applied:
        print(name)
    print(f"{len(applied)} migrations applied", file=sys.stderr)
    return 0


def _check(settings: Settings, options: argparse.Namespace) -> int:
    catalog = load_catalog(settings)
    print(f"{len(catalog.upstreams)} upstreams, {len(catalog.offers)} offers, {len(catalog.plans)} plans")
    if catalog.is_demo:
        print("the demonstration answers: no provider is configured for it")
    if pending := asyncio.run(pending_migrations(settings.database_url)):
        print(f"migrations to apply at the next start: {', '.join(pending)}")
    return 0


def _audit(settings: Settings, options: argparse.Namespace) -> int:
    report = asyncio.run(_on_database(settings, lambda database: ledger.audit(database, full=options.full)))
    for violation in report.violations:
        print(violation)
    print(
        f"{report.accounts} accounts, {report.entries} entries, {report.calls} calls:"
        f" {len(report.violations)} violations"
    )
    return EXIT_VIOLATION if report.violations else 0


def _account_create(settings: Settings, options: argparse.Namespace) -> int:
    catalog = load_catalog(settings)
    plan = options.plan or PLAN_OF_NEW_ACCOUNTS
    if plan not in catalog.plans:
        raise Refused(f"--plan: there is no plan {plan!r}; there are {', '.join(sorted(catalog.plans))}")
    account = asyncio.run(_on_database(
        settings,
        lambda database: accounts.create(database, options.email, plan=plan, verified=options.verified),
    ))
    print(account.id)
    return 0


def _key_create(settings: Settings, options: argparse.Namespace) -> int:
    scopes = _scopes(options.scopes)
    _, plain = asyncio.run(_on_database(settings, lambda _: _make_key(options.email, options.name, scopes)))
    print(plain)
    return 0


def _credit_add(settings: Settings, options: argparse.Namespace) -> int:
    amount = _amount("USD", options.usd)
    balance = asyncio.run(_on_database(
        settings, lambda database: _add_credit(database, options.email, amount, options.reason)
    ))
    print(usd(balance))
    return 0


def _code_create(settings: Settings, options: argparse.Namespace) -> int:
    amount = _amount("--usd", options.usd)
    expires_at_ms = _day_end_ms(options.expires) if options.expires else None
    if not 1 <= options.uses <= redeem_code.USES_MAX:
        raise Refused(f"--uses: {options.uses} is not from 1 to {redeem_code.USES_MAX}")
    code = redeem_code.new_code()
    asyncio.run(_on_database(settings, lambda database: database.run(lambda: redeem_code.create(
        code, amount, uses_max=options.uses, expires_at_ms=expires_at_ms, note=options.note
    ))))
    print(code)
    return 0


def _code_list(settings: Settings, options: argparse.Namespace) -> int:
    codes = asyncio.run(_on_database(settings, redeem_code.newest))
    now = now_ms()
    for code in codes:
        until = clock.day(code.expires_at_ms - 1) if code.expires_at_ms else "-"
        print(
            code.id, f"{code.shown_prefix}-…", usd(code.amount_microusd), f"{code.used}/{code.uses_max}", until,
            code.state(now), " ".join(code.note.split()), sep="\t",
        )
    return 0


def _code_revoke(settings: Settings, options: argparse.Namespace) -> int:
    asyncio.run(_on_database(
        settings, lambda database: database.run(lambda: redeem_code.revoke(options.code))
    ))
    return 0


def _credit_refund(settings: Settings, options: argparse.Namespace) -> int:
    amount = None
    if options.usd is not None:
        try:
            amount = microusd(options.usd)
        except ValueError as error:
            raise Refused(f"USD: {error}") from None
        if amount <= 0 or amount % MICROUSD_PER_CENT:
            raise Refused("USD: a refund is more than 0, to the cent")
    made = asyncio.run(_on_database(
        settings, lambda database: _refund(settings, database, options.top_up, amount, options.force)
    ))
    print(usd(made.amount_microusd))
    return 0


async def _refund(
    settings: Settings, database: Database, top_up_id: str, amount: int | None, forced: bool
) -> Refund:
    payments = Payments(database, settings, processor_of(settings))
    try:
        return await payments.refund(top_up_id, amount, forced=forced)
    except ProcessorUnavailable as error:
        raise Refused(
            f"the processor gave no clear answer ({error}); the refund is taken up again by a running server"
        ) from error
    finally:
        await payments.close()


async def _make_key(email: str, name: str, scopes: list[str] | None = None) -> tuple[ApiKey, str]:
    return await api_key.create(await accounts.by_email(email), name, scopes=scopes)


async def _add_credit(database: Database, email: str, amount: int, reason: str) -> int:
    account = await accounts.by_email(email)
    reference = ids.new_id("adj")
    return await database.run(
        lambda: wallet.credit(
            account.id, amount, ledger.ADJUSTMENT, reference, ledger.PROMOTIONS, reason, now_ms()
        )
    )


async def _on_database(settings: Settings, work: Callable[[Database], Awaitable[T]]) -> T:
    await migrate(settings.database_url)
    database = Database(settings.database_url)
    await database.open()
    try:
        return await work(database)
    finally:
        await database.close()


async def _welcome(settings: Settings, catalog: Catalog, database: Database) -> None:
    """Say where the server is; on the very first start in development, hand out a key that works."""
    print(f"\n{catalog.service_name} {product_version()} at {settings.public_url}")
    print(f"  API        {settings.public_url}/v1 (OpenAI format)")
    print(f"  Described  {settings.public_url}/openapi.json")
    if settings.stripe is not None and not settings.stripe.live:
        print("  Payments   Stripe in test mode: no money moves")
    if catalog.is_demo:
        print("  Models     a demonstration answers; set OPENAI_API_KEY or TOLLGATE_CONFIG for real ones")
    if settings.production:
        return
    if settings.mail_server is None:
        print(f"  Mail       is kept at {settings.public_url}/dev/mail; set SMTP_URL to send it")
    if settings.test_checkout:
        print("  Payments   are pretended: the test checkout sells credit")
    if await accounts.Account.all().exists():
        print(f"  More keys  python -m portal key create {DEMO_EMAIL} --name NAME\n")
        return
    account = await accounts.create(database, DEMO_EMAIL, plan=PLAN_OF_PAYING_ACCOUNTS, verified=True)
    demo_password = secrets.token_urlsafe(12)
    account.password_hash = await password.hash_of(demo_password)
    await account.save(update_fields=["password_hash"])
    _, plain = await _make_key(DEMO_EMAIL, "First key")
    offer = next(offer.id for offer in catalog.offers.values() if offer.surface == "chat")
    print(f"  Account    {DEMO_EMAIL}, with 500 included calls a month")
    print(f"  Dashboard  {settings.public_url}/login   password {demo_password}")
    print(f"  Key        {plain}   (shown this once)")
    print("\nTry it:\n")
    print(_curl(settings.public_url, plain, offer, stream=False))
    print("\n...and as a stream:\n")
    print(_curl(settings.public_url, plain, offer, stream=True), flush=True)
    print()


def _curl(public_url: str, key: str, offer: str, *, stream: bool) -> str:
    flag, field = ("-N ", ', "stream": true') if stream else ("", "")
    return (
        f"curl {flag}{public_url}/v1/chat/completions -H 'Authorization: Bearer {key}'"
        f" -H 'Content-Type: application/json' -d '{{\"model\": \"{offer}\"{field},"
        ' "messages": [{"role": "user", "content": "Hello"}]}\''
    )


def _amount(name: str, text: str) -> int:
    try:
        amount = microusd(text)
    except ValueError as error:
        raise Refused(f"{name}: {error}") from None
    if amount <= 0:
        raise Refused(f"{name}: credit must be more than 0")
    return amount


def _day_end_ms(text: str) -> int:
    """Return when a day ends, UTC."""
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise Refused(f"--expires: {text!r} is not a day such as 2026-12-31") from None
    at_ms = int(datetime.combine(day, time(), UTC).timestamp() + DAY_S) * 1000
    if at_ms <= now_ms():
        raise Refused(f"--expires: {text} is over")
    return at_ms


def _scopes(text: str | None) -> list[str] | None:
    if text is None:
        return None
    scopes = [scope.strip() for scope in text.split(",") if scope.strip()]
    unknown = [scope for scope in scopes if scope.removesuffix(":read") not in SURFACES]
    if unknown or not scopes:
        raise Refused(f"--scopes: {', '.join(unknown) or 'nothing named'}; there are {', '.join(SURFACES)}")
    return scopes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m portal", description="Tollgate, a self-hosted AI gateway.")
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="migrate the database and serve")
    serve.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    serve.set_defaults(run=_serve)
    commands.add_parser("migrate", help="bring the database up to date").set_defaults(run=_migrate)
    commands.add_parser("check", help="validate the configuration").set_defaults(run=_check)
    audit = commands.add_parser("audit", help="reconcile the books; exits 3 on a violation")
    audit.add_argument("--full", action="store_true", help="from the beginning, not from the last clean audit")
    audit.set_defaults(run=_audit)

    account = commands.add_parser("account", help="accounts").add_subparsers(dest="verb", required=True)
    create = account.add_parser("create", help="create an account; prints its id")
    create.add_argument("email")
    create.add_argument("--verified", action="store_true", help="its address needs no verification")
    create.add_argument("--plan", help=f"its plan (default: {PLAN_OF_NEW_ACCOUNTS})")
    create.set_defaults(run=_account_create)

    key = commands.add_parser("key", help="API keys").add_subparsers(dest="verb", required=True)
    create = key.add_parser("create", help="create a key; prints it, once")
    create.add_argument("email")
    create.add_argument("--name", required=True)
    create.add_argument("--scopes", help="comma-separated surfaces, each optionally with :read")
    create.set_defaults(run=_key_create)

    credit = commands.add_parser("credit", help="credit").add_subparsers(dest="verb", required=True)
    add = credit.add_parser("add", help="add credit to an account; prints its balance in dollars")
    add.add_argument("email")
    add.add_argument("usd", metavar="USD")
    add.add_argument("--reason", required=True)
    add.set_defaults(run=_credit_add)
    refund = credit.add_parser("refund", help="give a top-up's money back; prints the credit refunded")
    refund.add_argument("top_up", metavar="TOP_UP", help="its order, top_...")
    refund.add_argument("usd", metavar="USD", nargs="?", help="how much (default: all that is unspent)")
    refund.add_argument("--force", action="store_true", help="also what is spent; the balance may fall below zero")
    refund.set_defaults(run=_credit_refund)

    code = commands.add_parser("code", help="redeem codes").add_subparsers(dest="verb", required=True)
    create = code.add_parser("create", help="create a code that gives credit; prints it, once")
    create.add_argument("--usd", required=True)
    create.add_argument("--uses", type=int, default=1, help="how many accounts may redeem it (default: 1)")
    create.add_argument("--expires", metavar="YYYY-MM-DD", help="its last day, UTC (default: none)")
    create.add_argument("--note", default="", help="for the list; accounts do not see it")
    create.set_defaults(run=_code_create)
    code.add_parser("list", help="list codes: id, beginning, dollars, used, last day, state, note").set_defaults(
        run=_code_list
    )
    revoke = code.add_parser("revoke", help="end a code; what it gave stays given")
    revoke.add_argument("code", metavar="CODE", help="the code, or its id from the list")
    revoke.set_defaults(run=_code_revoke)
    return parser


if __name__ == "__main__":
    sys.exit(main())
