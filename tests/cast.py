"""The cast: Alice owns what a test is about, Bob has his own account, Mallory tries."""

from __future__ import annotations

from dataclasses import dataclass

from models import account as accounts
from models import api_key, ids, ledger, session, wallet
from models.account import Account
from models.clock import now_ms
from models.database import Database


@dataclass(frozen=True, slots=True)
class Actor:
    """Be somebody with an account and a key."""

    account: Account
    key_id: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of this actor's requests."""
        return {"Authorization": f"Bearer {self.key}"}


async def enter(
    books: Database, name: str = "alice", *, plan: str = "payg", credit_microusd: int = 0, **key_limits: object
) -> Actor:
    """Bring somebody on stage with an account of the plan, credit, and a key."""
    made = await accounts.create(books, f"{name}.{ids.new_id('x')}@example.com", plan=plan, verified=True)
    if credit_microusd:
        await give(books, made.id, credit_microusd)
    key, plain = await api_key.create(made, name, **key_limits)
    return Actor(made, key.id, plain)


async def sign_in(books: Database, actor: Actor) -> dict[str, str]:
    """Begin a session for somebody and return the cookie of a browser that holds it."""
    cookie = session.new_cookie()
    await books.run(lambda: session.begin(actor.account.id, cookie, address="127.0.0.1", agent="a test"))
    return {"session": cookie}


async def give(books: Database, account_id: str, amount_microusd: int) -> None:
    """Add credit to an account."""
    reference = ids.new_id("adj")
    await books.run(lambda: wallet.credit(
        account_id, amount_microusd, ledger.ADJUSTMENT, reference, ledger.PROMOTIONS, "a test", now_ms()
    ))
