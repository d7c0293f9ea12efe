"""Money as integers: micro-dollars in the ledger, pico-dollars in prices. No float comes near it.

1 USD is 1,000,000 micro-dollars and 1,000,000,000,000 pico-dollars. A price of 1 USD per million
tokens is 1,000,000 pico-dollars a token, so that $0.01875 per million is exact.
"""

from __future__ import annotations

from decimal import Context, Decimal, InvalidOperation

MICROUSD_PER_USD = 1_000_000
MICROUSD_PER_CENT = 10_000
PICOUSD_PER_MICROUSD = 1_000_000
PICOUSD_PER_USD = MICROUSD_PER_USD * PICOUSD_PER_MICROUSD
# A signed 64-bit column holds 9.2e18; a single amount is kept far below it.
AMOUNT_MICROUSD_MAX = 10**15
TEXT_LENGTH_MAX = 40


def microusd(text: str) -> int:
    """Return the micro-dollars in a decimal string of dollars such as "10" or "0.02".

    Raises ValueError for anything that is not a plain finite decimal, is finer than a
    micro-dollar, or is absurdly large.
    """
    return _scaled(text, MICROUSD_PER_USD, "a millionth of a dollar", AMOUNT_MICROUSD_MAX)


def picousd(text: str) -> int:
    """Return the pico-dollars in a decimal string of dollars. Raises ValueError as `microusd` does."""
    return _scaled(text, PICOUSD_PER_USD, "a trillionth of a dollar", AMOUNT_MICROUSD_MAX * 1_000_000)


def ceil_to_microusd(amount_picousd: int) -> int:
    """Return pico-dollars rounded up to whole micro-dollars: the one rounding of a call's cost."""
    return -(-amount_picousd // PICOUSD_PER_MICROUSD)


def usd(amount_microusd: int) -> str:
    """Return micro-dollars as a decimal string of dollars with six places, e.g. "0.000421"."""
    sign = "-" if amount_microusd < 0 else ""
    dollars, rest = divmod(abs(amount_microusd), MICROUSD_PER_USD)
    return f"{sign}{dollars}.{rest:06d}"


def _scaled(text: str, scale: int, finest: str, highest: int) -> int:
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a decimal string such as \"0.25\"")
    if len(text) > TEXT_LENGTH_MAX:
        raise ValueError(f"{text[:TEXT_LENGTH_MAX]!r}... has too many digits")
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a decimal number") from None
    if not value.is_finite() or "e" in text.lower() or "_" in text:
        raise ValueError(f"{text!r} is not a plain decimal number")
    # Decimal's own context would round what is longer than 28 digits.
    scaled = Context(prec=3 * TEXT_LENGTH_MAX).multiply(value, Decimal(scale))
    if abs(scaled) > highest:
        raise ValueError(f"{text!r} is too large")
    if scaled != scaled.to_integral_value():
        raise ValueError(f"{text!r} is finer than {finest}")
    return int(scaled)
