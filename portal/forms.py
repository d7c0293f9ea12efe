"""Forms: fields read one by one, each with its own error, what was typed kept for showing it again."""

from __future__ import annotations

from collections.abc import Iterable

from quart import request
from werkzeug.datastructures import MultiDict

from models.account import InvalidEmail, normal_email
from models.money import microusd
from models.password import WeakPassword, require_fit

TEXT_LENGTH_MAX = 200


class Form:
    """Read what was sent. `errors` has a sentence for each field that will not do."""

    def __init__(self, sent: MultiDict[str, str] | None = None) -> None:
        self._sent = sent if sent is not None else MultiDict()
        self.errors: dict[str, str] = {}

    @property
    def is_good(self) -> bool:
        """Return whether every field read so far will do."""
        return not self.errors

    def typed(self, name: str) -> str:
        """Return what was typed, as it was, for showing it again. Never use it for a password."""
        return self._sent.get(name, "")

    def chosen(self, name: str) -> list[str]:
        """Return what was ticked, as it was."""
        return self._sent.getlist(name)

    def refuse(self, name: str, sentence: str) -> None:
        """Say what is wrong with a field, unless something has been said already."""
        self.errors.setdefault(name, sentence)

    def text(self, name: str, *, required: bool = True, length_max: int = TEXT_LENGTH_MAX) -> str:
        """Return a line of text."""
        text = self.typed(name).strip()
        if required and not text:
            self.refuse(name, "Fill this in.")
        if len(text) > length_max:
            self.refuse(name, f"Use at most {length_max} characters.")
        if not text.isprintable() or not _is_encodable(text):
            self.refuse(name, "Use ordinary characters on one line.")
            return ""
        return text

    def secret(self, name: str) -> str:
        """Return a password or code as it was typed."""
        text = self._sent.get(name, "")
        if not text:
            self.refuse(name, "Fill this in.")
        return text

    def new_password(self, name: str, email: str = "") -> str:
        """Return a new password for an address."""
        text = self.secret(name)
        try:
            require_fit(text, email)
        except WeakPassword as error:
            self.refuse(name, str(error))
        return text

    def email(self, name: str) -> str:
        """Return an e-mail address in its normal form."""
        try:
            return normal_email(self.text(name))
        except InvalidEmail:
            self.refuse(name, "This is not an e-mail address.")
            return ""

    def choice(self, name: str, choices: Iterable[str], *, required: bool = True) -> str | None:
        """Return one of the choices; None when none was made and none is required."""
        text = self.typed(name)
        if text in choices:
            return text
        if text or required:
            self.refuse(name, "Choose one of these.")
        return None

    def choices(self, name: str, choices: Iterable[str]) -> list[str]:
        """Return which of the choices were ticked."""
        known, ticked = set(choices), self.chosen(name)
        if not known.issuperset(ticked):
            self.refuse(name, "Choose among these.")
        return [choice for choice in ticked if choice in known]

    def whole(self, name: str, lowest: int, highest: int, *, required: bool = False) -> int | None:
        """Return a whole number; None when the field is empty."""
        text = self.typed(name).strip()
        if not text:
            if required:
                self.refuse(name, "Fill this in.")
            return None
        digits = text.replace(",", "")
        if digits.isascii() and digits.isdigit() and len(digits) < 16 and lowest <= int(digits) <= highest:
            return int(digits)
        self.refuse(name, f"Use a whole number from {lowest:,} to {highest:,}.")
        return None

    def dollars(self, name: str, lowest: int, highest: int, *, required: bool = False) -> int | None:
        """Return an amount in micro-dollars, of cents at the finest; None when the field is empty."""
        text = self.typed(name).strip().removeprefix("$").replace(",", "")
        if not text:
            if required:
                self.refuse(name, "Fill this in.")
            return None
        try:
            amount = microusd(text) if text.isascii() else None
        except ValueError:
            amount = None
        if amount is None or amount % 10_000 or not lowest <= amount <= highest:
            self.refuse(name, f"Use an amount from ${lowest / 1e6:,.2f} to ${highest / 1e6:,.2f}.")
            return None
        return amount

    def lines(self, name: str, *, count_max: int) -> list[str]:
        """Return the words of a field, apart by spaces, commas or lines."""
        words = self.typed(name).replace(",", " ").split()
        if len(words) > count_max:
            self.refuse(name, f"Use at most {count_max}.")
        return words[:count_max]


async def sent_form() -> Form:
    """Return the form that came with the request."""
    return Form(await request.form)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
