"""Mail: written from templates, kept until a server takes it, given up when none ever will."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from models import ids, outbox
from models.account import normal_email
from models.database import Database
from models.errors import DatabaseUnavailable
from models.outbox import Claimed, Letter
from models.settings import read_settings
from portal.mail import Postman, Undeliverable, message_of
from tests.house import House
from tests.twins.mail import MailTwin, make_certificate
from tests.visitor import Visitor, link_in

PASSWORD = "four unrelated words"


@pytest.fixture
def server() -> MailTwin:
    """Give a mail server that wants a password."""
    twin = MailTwin(user="us@er", password="pa:ss/word").start()
    yield twin
    twin.stop()


def address_of(server: MailTwin, user: str = "us%40er", password: str = "pa%3Ass%2Fword") -> str:
    return f"smtp://{user}:{password}@127.0.0.1:{server.port}"


@pytest.fixture
def postman(books: Database, server: MailTwin) -> Postman:
    """Give a postman of that server."""
    sender = "Töllgate <mail@house.example>"
    return Postman(books, read_settings({"SMTP_URL": address_of(server), "MAIL_FROM": sender}))


def letter(recipient: str = "ada@example.com") -> Letter:
    return Letter(recipient, "verify", "Grüße", "Hello\n\nhttp://x/verify/abc\n", "<p>Hello</p>", "acc_1")


async def make_due(books: Database) -> None:
    """Let every wait be over."""
    def script():
        yield ("UPDATE outbox SET due_at_ms = 0 WHERE sent_at_ms IS NULL AND given_up_at_ms IS NULL", ())

    await books.run(script)


async def the_row(books: Database):
    (row,) = await books.fetch("SELECT * FROM outbox")
    return row


async def test_a_letter_arrives_with_both_its_faces(books: Database, server: MailTwin, postman: Postman) -> None:
    await postman.deliver()
    assert server.tries == 0
    await books.run(lambda: outbox.put(letter()))
    await postman.deliver()
    await postman.deliver()
    (mail,) = server.mails
    assert (mail["to"], mail["from"], mail["subject"]) == (
        "ada@example.com", "Töllgate <mail@house.example>", "Grüße"
    )
    assert mail["auto-submitted"] == "auto-generated" and mail["date"]
    assert mail["message-id"].endswith("house.example>")
    assert "http://x/verify/abc" in mail.get_body(("plain",)).get_content()
    assert "<p>Hello</p>" in mail.get_body(("html",)).get_content()
    row = await the_row(books)
    assert row["sent_at_ms"] and (row["body_text"], row["body_html"]) == ("", ""), "what it said is not kept"


async def test_a_letter_waits_for_a_server_that_is_busy_or_away(
    books: Database, server: MailTwin, postman: Postman
) -> None:
    server.answers = ["451 4.3.0 try later", "421 4.3.2 closing"]
    await books.run(lambda: outbox.put(letter()))
    for _ in range(2):
        await postman.deliver()
        row = await the_row(books)
        assert row["sent_at_ms"] is None and row["given_up_at_ms"] is None and row["error"]
        await postman.deliver()
        assert (await the_row(books))["tries"] == row["tries"], "not before its time"
        await make_due(books)
    away = Postman(books, read_settings({"SMTP_URL": "smtp://127.0.0.1:9"}))
    await away.deliver()
    assert "SMTPConnect" in (await the_row(books))["error"]
    await make_due(books)
    await postman.deliver()
    assert len(server.mails) == 1 and (await the_row(books))["sent_at_ms"]


@pytest.mark.parametrize("how", ["recipient", "content"])
async def test_a_letter_that_is_refused_for_good_is_given_up(
    books: Database, server: MailTwin, postman: Postman, how: str
) -> None:
    if how == "recipient":
        server.refused_recipients["ada@example.com"] = "550 5.1.1 no such mailbox"
    else:
        server.answers = ["554 5.7.1 looks like spam"]
    await books.run(lambda: outbox.put(letter()))
    for _ in range(3):
        await postman.deliver()
        await make_due(books)
    row = await the_row(books)
    assert server.tries == 1 and row["given_up_at_ms"]
    assert row["error"].endswith("550" if how == "recipient" else "554")


async def test_a_wrong_password_of_ours_loses_no_letter(books: Database, server: MailTwin) -> None:
    wrong = Postman(books, read_settings({"SMTP_URL": address_of(server, password="wrong")}))
    await books.run(lambda: outbox.put(letter()))
    await wrong.deliver()
    row = await the_row(books)
    assert row["given_up_at_ms"] is None and "535" in row["error"] and "wrong" not in row["error"]
    assert not server.mails


async def test_a_day_of_tries_is_enough(books: Database, postman: Postman, server: MailTwin) -> None:
    server.answers = ["451 later"] * 20
    await books.run(lambda: outbox.put(letter()))
    for _ in range(outbox.TRIES_MAX + 3):
        await postman.deliver()
        await make_due(books)
    assert server.tries == outbox.TRIES_MAX and (await the_row(books))["given_up_at_ms"]


async def test_several_postmen_deliver_each_letter_once(
    books: Database, server: MailTwin, postman: Postman
) -> None:
    for number in range(30):
        await books.run(lambda number=number: outbox.put(letter(f"reader{number}@example.com")))

    async def deliver() -> None:
        while True:
            try:
                return await postman.deliver()
            except DatabaseUnavailable:
                await asyncio.sleep(0.1)  # so does the loop that sends it out

    await asyncio.gather(*(deliver() for _ in range(4)))
    assert sorted(server.recipients) == sorted(f"reader{number}@example.com" for number in range(30))


async def test_a_postman_who_dies_leaves_the_letter_to_the_next(
    books: Database, server: MailTwin, postman: Postman
) -> None:
    await books.run(lambda: outbox.put(letter()))
    assert len(await books.run(lambda: outbox.claim(5))) == 1
    await postman.deliver()
    assert not server.mails, "it is in somebody's hands"
    await make_due(books)
    await postman.deliver()
    assert len(server.mails) == 1


async def test_a_server_that_offers_tls_gets_it(
    books: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = make_certificate(tmp_path)
    server = MailTwin(certificate=certificate).start()
    try:
        settings = read_settings({"SMTP_URL": f"smtp://localhost:{server.port}"})
        await books.run(lambda: outbox.put(letter()))
        await Postman(books, settings).deliver()
        row = await the_row(books)
        assert not server.mails and row["sent_at_ms"] is None and row["error"], "nobody signed for it"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert ssl.get_default_verify_paths().cafile == str(certificate[0])
        await make_due(books)
        await Postman(books, settings).deliver()
        assert server.encrypted == [True]
    finally:
        server.stop()


@pytest.mark.parametrize("recipient", ["a\r\nBcc: x@y.example", "no address", "<a@b>", "a@b, c@d"])
def test_an_address_cannot_add_a_header(recipient: str) -> None:
    claimed = Claimed("mail_1", recipient, "Subject", "text", "<p>html</p>", 1)
    with pytest.raises(Undeliverable):
        message_of(claimed, "mail@house.example")
    with pytest.raises(Exception):  # noqa: B017 - whichever way it is refused
        normal_email(recipient)


@pytest.fixture
async def posting_house(
    database_kind: str, new_database, twin: str, tmp_path: Path, server: MailTwin
) -> AsyncIterator[House]:
    """Give a Tollgate that sends its mail."""
    house = House(tmp_path, await new_database(database_kind), twin, SMTP_URL=address_of(server)).start()
    yield house
    house.stop()


async def test_a_house_with_a_mail_server_sends_and_shows_nothing(posting_house: House, server: MailTwin) -> None:
    email = f"{ids.new_id('x')}@example.com"
    visitor = Visitor(posting_house)
    await visitor.sign_up(email, PASSWORD)
    assert "/dev/mail" not in (await visitor.get("/signup/sent")).text
    assert (await visitor.get("/dev/mail")).status == 404
    for _ in range(100):
        if server.mails:
            break
        await asyncio.sleep(0.1)
    (mail,) = server.mails
    assert mail["to"] == email
    text = mail.get_body(("plain",)).get_content()
    path = link_in(text, posting_house)
    assert path in mail.get_body(("html",)).get_content()
    assert (await visitor.send(path, {})).location.startswith("/dashboard")
    assert path.rpartition("/")[2] not in posting_house.log() and "pa:ss" not in posting_house.log()


async def test_a_house_without_one_prints_and_shows(open_house: House, open_books: Database) -> None:
    email = f"{ids.new_id('x')}@example.com"
    visitor = Visitor(open_house)
    await visitor.sign_up(email, PASSWORD)
    assert "/dev/mail" in (await visitor.get("/signup/sent")).text
    for _ in range(100):
        if f"--- Mail to {email}" in open_house.log():
            break
        await asyncio.sleep(0.1)
    printed = open_house.log().partition(f"--- Mail to {email}")[2]
    page = await visitor.get("/dev/mail")
    assert page.status == 200 and email in page.text and link_in(printed, open_house) in page.text


async def test_production_shows_no_mailbox(
    new_database, database_kind: str, twin: str, tmp_path: Path
) -> None:
    house = House(
        tmp_path, await new_database(database_kind), twin, PUBLIC_URL="https://gateway.example",
        SECRET_KEY="s" * 32, MAIL_TO_CONSOLE="yes",
    )
    configuration = Path(house.environ["TOLLGATE_CONFIG"])
    configuration.write_text(configuration.read_text().replace('api_key = "', 'api_key_env = "TWIN_KEY" #"'))
    house.environ["TWIN_KEY"] = "twin-upstream-key-000111222333"
    house.start()
    try:
        answer = await Visitor(house).get("/dev/mail", Host="gateway.example")
        assert answer.status == 404
        assert (await Visitor(house).get("/login", Host="gateway.example")).status == 200
        cookies = (await Visitor(house).get("/login", Host="gateway.example")).headers["set-cookie"]
        assert cookies.startswith("__Host-visit=") and "Secure" in cookies and "HttpOnly" in cookies
    finally:
        house.stop()
