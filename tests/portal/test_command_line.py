"""The command line, as its users run it: a process, its output, its exit code."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from models import credentials
from tests.house import House, books_of


@pytest.fixture
async def empty_house(database_kind: str, new_database, twin: str, tmp_path: Path) -> House:
    """Give a Tollgate that was never started."""
    return House(tmp_path, await new_database(database_kind), twin)


async def test_account_key_and_credit_print_what_they_made(empty_house: House) -> None:
    account = empty_house.command("account", "create", "Alice@Example.com", "--verified", "--plan", "wallet")
    assert account.returncode == 0 and re.fullmatch(r"acc_[0-9a-z]{26}\n", account.stdout), account.stderr
    scopes = ("--scopes", "chat,models:read")
    key = empty_house.command("key", "create", "alice@example.com", "--name", "laptop", *scopes)
    assert key.returncode == 0 and credentials.is_well_formed(key.stdout.strip()), key.stderr
    for expected in ("10.500000\n", "21.000000\n"):
        credit = empty_house.command("credit", "add", "alice@example.com", "10.50", "--reason", "a present")
        assert (credit.returncode, credit.stdout) == (0, expected), credit.stderr
    assert empty_house.command("audit", "--full").returncode == 0


async def test_codes_are_made_listed_and_revoked(empty_house: House) -> None:
    made = empty_house.command("code", "create", "--usd", "5")
    assert made.returncode == 0 and re.fullmatch(r"([0-9A-Z]{4}-){3}[0-9A-Z]{4}\n", made.stdout), made.stderr
    more = ("--uses", "100", "--expires", "2099-12-31", "--note", "at the\tfair")
    other = empty_house.command("code", "create", "--usd", "2.50", *more)
    lines = [line.split("\t") for line in empty_house.command("code", "list").stdout.splitlines()]
    assert [line[1:] for line in lines] == [
        [f"{other.stdout[:4]}-…", "2.500000", "0/100", "2099-12-31", "good", "at the fair"],
        [f"{made.stdout[:4]}-…", "5.000000", "0/1", "-", "good", ""],
    ]
    assert empty_house.command("code", "revoke", made.stdout.strip().lower()).returncode == 0
    assert empty_house.command("code", "revoke", lines[0][0]).returncode == 0
    listed = empty_house.command("code", "list").stdout.splitlines()
    assert [line.split("\t")[5] for line in listed] == ["revoked"] * 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("account", "create", "nobody"), "not an e-mail address"),
        (("account", "create", "a@b.example", "--plan", "gold"), "--plan: there is no plan 'gold'"),
        (("key", "create", "nobody@example.com", "--name", "x"), "there is no account nobody@example.com"),
        (("key", "create", "a@b.example", "--name", "x", "--scopes", "chat,pies"), "--scopes: pies"),
        (("credit", "add", "nobody@example.com", "1", "--reason", "x"), "there is no account"),
        (("credit", "add", "nobody@example.com", "-1", "--reason", "x"), "more than 0"),
        (("credit", "add", "nobody@example.com", "1e3", "--reason", "x"), "USD: '1e3'"),
        (("code", "create", "--usd", "0"), "more than 0"),
        (("code", "create", "--usd", "five"), "--usd: 'five'"),
        (("code", "create", "--usd", "5", "--uses", "0"), "--uses: 0"),
        (("code", "create", "--usd", "5", "--expires", "tomorrow"), "--expires: 'tomorrow'"),
        (("code", "create", "--usd", "5", "--expires", "2020-01-01"), "is over"),
        (("code", "revoke", "WRNG-WRNG-WRNG-WRNG"), "there is no such code"),
        (("credit", "add", "nobody@example.com", "0.0000001", "--reason", "x"), "finer than"),
    ],
)
def test_commands_refuse_in_one_sentence(house: House, arguments: tuple[str, ...], complaint: str) -> None:
    refused = house.command(*arguments)
    assert refused.returncode == 2
    assert complaint in refused.stderr and "Traceback" not in refused.stderr
    assert refused.stdout == ""


def test_an_address_has_one_account(house: House) -> None:
    assert house.command("account", "create", "twice@example.com").returncode == 0
    again = house.command("account", "create", "TWICE@example.com")
    assert again.returncode == 2 and "exists" in again.stderr


async def test_migrate_says_what_it_applied_and_does_it_once(empty_house: House) -> None:
    first = empty_house.command("migrate")
    assert first.returncode == 0 and "m0001_books" in first.stdout
    assert empty_house.command("migrate").stdout == ""


async def test_check_names_everything_that_is_wrong(empty_house: House) -> None:
    assert empty_house.command("check").returncode == 0
    configuration = Path(empty_house.environ["TOLLGATE_CONFIG"])
    wrong_price = configuration.read_text().replace('input_per_million = "1"', 'input_per_million = "x"')
    configuration.write_text(wrong_price)
    empty_house.environ["PORT"] = "99999"
    wrong = empty_house.command("check")
    assert wrong.returncode == 2 and "PORT" in wrong.stderr
    empty_house.environ["PORT"] = "8000"
    wrong = empty_house.command("check")
    assert wrong.returncode == 2 and "offers[0].price_usd.input_per_million" in wrong.stderr


async def test_audit_names_the_violation(empty_house: House) -> None:
    empty_house.command("account", "create", "alice@example.com")
    empty_house.command("credit", "add", "alice@example.com", "5", "--reason", "x")

    def steal():
        yield ("UPDATE wallets SET posted_microusd = posted_microusd + 1", ())

    async with books_of(empty_house) as books:
        await books.run(steal)
    found = empty_house.command("audit")
    assert found.returncode == 3 and "R1 acc_" in found.stdout


async def test_the_first_start_hands_out_a_key_that_works(
    database_kind: str, new_database, twin: str, tmp_path: Path
) -> None:
    house = House(tmp_path, await new_database(database_kind), twin)
    del house.environ["TOLLGATE_CONFIG"]
    house.start()
    try:
        welcome = house.log()
        curls = re.findall(r"^curl .*$", welcome, re.MULTILINE)
        assert len(curls) == 2 and "demonstration" in welcome
        plain, stream = (
            subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=30).stdout for curl in curls
        )
        assert '"object":"chat.completion"' in plain and "demonstration" in plain
        assert stream.endswith("data: [DONE]\n\n")
    finally:
        house.signal(signal.SIGINT)
        assert house.stop() == 0
    house.start()
    assert house.log().count("shown this once") == 1
    assert house.stop() == 0


def test_production_refuses_to_start_without_what_it_needs(tmp_path: Path, twin: str) -> None:
    house = House(tmp_path, f"sqlite:///{tmp_path}/x.sqlite3", twin, PUBLIC_URL="https://gateway.example.com")
    refused = house.command("serve")
    assert refused.returncode == 2 and "SECRET_KEY" in refused.stderr
    assert "SMTP_URL" in refused.stderr
    house.environ |= {"SECRET_KEY": "x" * 40, "MAIL_TO_CONSOLE": "yes"}
    Path(house.environ["TOLLGATE_CONFIG"]).write_text("")
    refused = house.command("serve")
    assert refused.returncode == 2 and "demo" in refused.stderr.lower()
