"""Mail: letters are written from templates, put in the outbox, and delivered by a loop.

Every link in a letter begins with PUBLIC_URL, never with what a request called us. Without a mail server
letters are printed to the console, and a development house shows them on a page.
"""

from __future__ import annotations

import asyncio
import logging
from email.errors import MessageError
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime, make_msgid, parseaddr

import aiosmtplib

from models import outbox
from models.clock import moment, now_ms
from models.database import Database
from models.outbox import Claimed, Letter
from models.settings import Settings
from portal.rendering import render

CLAIMED_AT_ONCE = 5
STEP_TIMEOUT_S = 15
# Shorter than a letter is claimed for, so that nobody else sends it meanwhile.
LETTER_TIMEOUT_S = 45

_log = logging.getLogger("tollgate.mail")


class Undeliverable(Exception):
    """Report a letter that no later try will deliver."""


async def write(kind: str, recipient: str, settings: Settings, **view: object) -> Letter:
    """Write a letter from its three templates. `link` in a view is a path of ours."""
    if "link" in view:
        view["link"] = f"{settings.public_url}{view['link']}"
    view |= {"public_url": settings.public_url}
    subject = (await render(f"mail/{kind}/subject.txt", **view)).strip()
    return Letter(
        recipient=recipient, kind=kind, subject=subject,
        text=await render(f"mail/{kind}/body.txt", **view),
        html=await render(f"mail/{kind}/body.html", subject=subject, **view),
    )


class Postman:
    """Deliver what is due."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    async def deliver(self) -> None:
        """Deliver letters until none is due."""
        while await outbox.is_due(self._database):
            letters = await self._database.run(lambda: outbox.claim(CLAIMED_AT_ONCE), deadline_s=10)
            await asyncio.gather(*(self._deliver_one(letter) for letter in letters))
            if not letters:
                return

    async def _deliver_one(self, letter: Claimed) -> None:
        if self._settings.mail_server is None:
            self._print(letter)
            done = outbox.sent if self._settings.production else outbox.kept
            await self._database.run(lambda: done(letter.id), deadline_s=10)
            return
        try:
            async with asyncio.timeout(LETTER_TIMEOUT_S):
                await self._send(letter)
        except Exception as error:
            for_good, said = _is_for_good(error), _said(error)
            _log.warning(
                "a mail was not taken, %s", "and is given up" if for_good else "and is tried again later",
                extra={"mail": letter.id, "tries": letter.tries, "error": said},
            )
            await self._database.run(
                lambda: outbox.failed(letter, said, for_good=for_good), deadline_s=10
            )
        else:
            await self._database.run(lambda: outbox.sent(letter.id), deadline_s=10)

    async def _send(self, letter: Claimed) -> None:
        server = self._settings.mail_server
        assert server is not None
        message = message_of(letter, self._settings.mail_from)
        await aiosmtplib.send(
            message, sender=parseaddr(self._settings.mail_from)[1], recipients=[letter.recipient],
            hostname=server.host, port=server.port, username=server.user, password=server.password,
            # None: STARTTLS when the server offers it.
            use_tls=server.tls, start_tls=False if server.tls else None, timeout=STEP_TIMEOUT_S,
        )

    def _print(self, letter: Claimed) -> None:
        print(f"\n--- Mail to {letter.recipient}: {letter.subject}\n\n{letter.text.rstrip()}\n---", flush=True)


def message_of(letter: Claimed, mail_from: str) -> EmailMessage:
    """Return a letter as a mail of two faces. Raises Undeliverable when its address cannot stand in a header."""
    message = EmailMessage(policy=SMTP)
    name, sender = parseaddr(mail_from)
    try:
        message["From"] = Address(name, addr_spec=sender)
        message["To"] = Address(addr_spec=letter.recipient)
        message["Subject"] = letter.subject
    except (ValueError, MessageError, IndexError) as error:
        raise Undeliverable(f"the address cannot be written in a mail: {type(error).__name__}") from None
    message["Date"] = format_datetime(moment(now_ms()))
    message["Message-ID"] = make_msgid(letter.id, sender.rpartition("@")[2])
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(letter.text)
    message.add_alternative(letter.html, subtype="html")
    return message


def _is_for_good(error: Exception) -> bool:
    """Return whether the server will never take this letter.

    What it says of us (a sender or a password that it refuses) is for the operator to put right, and the
    letter waits for that.
    """
    if isinstance(error, aiosmtplib.SMTPRecipientsRefused):
        return all(refused.code >= 500 for refused in error.recipients)
    if isinstance(error, aiosmtplib.SMTPRecipientRefused | aiosmtplib.SMTPDataError):
        return error.code >= 500
    return isinstance(error, Undeliverable | aiosmtplib.SMTPNotSupported)


def _said(error: Exception) -> str:
    """Return what went wrong, without what may hold a password."""
    code = getattr(error, "code", None)
    if isinstance(error, aiosmtplib.SMTPRecipientsRefused):
        code = error.recipients[0].code
    return type(error).__name__ + (f" {code}" if code else "")
