"""Charges explained: how a call's cost follows from what it used and the prices it was admitted at."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from models import rate_card
from models.database import Row
from models.money import PICOUSD_PER_USD, ceil_to_microusd
from models.rate_card import RateCard
from portal.format import exact_usd

MILLION = 1_000_000
# Said of a call that ended with an error, or of its refusal.
SENTENCES = {
    "client_closed": "The client closed the connection before the answer was complete.",
    "content_policy_violation": "The provider refused the content.",
    "context_length_exceeded": "The prompt is longer than the model can read.",
    "idempotency_key_reused": "The Idempotency-Key was used before with another request.",
    "idempotency_not_replayable": "The answer kept under the Idempotency-Key was too long to be given again.",
    "insufficient_credits": "There was not enough credit for what the call might cost, and no included call left.",
    "internal_error": "Something went wrong on our side.",
    "invalid_json": "The body was not valid JSON.",
    "invalid_request": "The request was not valid.",
    "model_not_found": "There is no such model, or the key may not use it.",
    "payload_too_large": "The body was too large.",
    "rate_limit_exceeded": "Too many calls came at once or within a minute.",
    "request_timeout": "The body did not arrive in time.",
    "scope_denied": "The key or the plan does not allow this.",
    "service_unavailable": "The call could not be taken or finished just then.",
    "unsupported_media_type": "The body was sent in a form that is not taken.",
    "unsupported_parameter": "A parameter is not supported by the model.",
    "upstream_error": "The provider failed, or could not be reached.",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Be one class of what was used: how much, at what price, and what that makes. Amounts as shown."""

    name: str
    count: str
    price: str
    unit: str
    amount: str


@dataclass(frozen=True, slots=True)
class Charge:
    """Explain a charge: its pieces, their exact sum when that was rounded, and sentences."""

    pieces: tuple[Piece, ...]
    sum: str | None
    cost: int
    sentences: tuple[str, ...]


def explain(row: Row) -> Charge:
    """Return how a call's charge came about."""
    pieces: tuple[Piece, ...] = ()
    exact = None
    if row["rates"] is not None and row["state"] in ("settled", "expired"):
        pieces, picousd = _pieces(row)
        if ceil_to_microusd(picousd) != row["cost_microusd"]:
            pieces = ()  # not known, or counted before the call broke off; its sentence says so
        elif picousd != row["cost_microusd"] * (PICOUSD_PER_USD // MILLION):
            exact = dollars(picousd)
    return Charge(pieces, exact, row["cost_microusd"], tuple(_sentences(row)))


def error_sentence(code: str | None) -> str | None:
    """Return what an error code means."""
    return None if code is None else SENTENCES.get(code, "The call could not be answered.")


def dollars(amount_picousd: int) -> str:
    """Return pico-dollars as dollars with as many decimals as there are, and at least six."""
    whole, _, decimals = format(Decimal(amount_picousd).scaleb(-12), ".12f").partition(".")
    return f"{int(whole):,}.{decimals.rstrip('0').ljust(6, '0')}"


def _pieces(row: Row) -> tuple[tuple[Piece, ...], int]:
    try:
        card = RateCard.from_json(row["rates"])
    except ValueError:
        return (), 0  # written by a version that knew other prices
    prompt = row["input_tokens"] + row["cached_input_tokens"] + row["cache_write_tokens"]
    rates = next((tier for tier in reversed(card.tiers) if prompt > tier.start_tokens), card)
    pieces, total = [], 0
    for name, count, price in (
        ("Input", row["input_tokens"], rates.input),
        ("Cached input", row["cached_input_tokens"], rates.cached_input),
        ("Written to the cache", row["cache_write_tokens"], rates.cache_write),
        ("Output", row["output_tokens"], rates.output),
    ):
        if count:
            amount = dollars(count * price)
            pieces.append(Piece(name, f"{count:,}", dollars(price * MILLION), "a million tokens", amount))
            total += count * price
    for name, count, price, unit in (
        ("Images", row["images"], card.per_image, "an image"),
        ("Characters", row["characters"], card.per_character, "a character"),
        ("The call", 1, card.per_call, "a call"),
    ):
        if count and price:
            pieces.append(Piece(name, f"{count:,}", dollars(price), unit, dollars(count * price)))
            total += count * price
    if row["audio_ms"] and card.per_minute:
        amount = -(-row["audio_ms"] * card.per_minute // rate_card.MS_PER_MINUTE)
        seconds = f"{Decimal(row['audio_ms']).scaleb(-3).normalize():f} s"
        pieces.append(Piece("Audio", seconds, dollars(card.per_minute), "a minute", dollars(amount)))
        total += amount
    return tuple(pieces), total


def _sentences(row: Row) -> list[str]:
    state, included, cost = row["state"], row["included_month"], exact_usd(row["cost_microusd"])
    if state == "refused":
        return ["Refused calls cost nothing."]
    if state == "released":
        back = f" The included call went back to {included}." if included else " What was held is free again."
        return ["Nothing was delivered, so nothing was charged." + back]
    if state == "open":
        if included:
            return [f"The call is running as an included call of {included}: nothing is held for it."]
        held = exact_usd(row["hold_microusd"])
        return [f"The call is running. ${held} is held for it, which is the most it can cost; the rest comes back."]
    said = []
    if state == "expired":
        said.append("The process that ran this call died. It costs what was counted until then.")
    if row["estimated"]:
        said.append("The provider sent no final count, so the tokens are our own count of what was delivered.")
    if included:
        said.append(f"It was one of the included calls of {included}: its price of ${cost} was not charged.")
    elif row["house_loss_microusd"]:
        held, lost = exact_usd(row["hold_microusd"]), exact_usd(row["house_loss_microusd"])
        said.append(f"It was charged ${held}, which is what was held for it. The other ${lost} are our loss.")
    elif row["charged_microusd"]:
        said.append(f"${exact_usd(row['charged_microusd'])} was taken from your credit.")
    else:
        said.append("It cost nothing.")
    return said
