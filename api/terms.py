"""On what terms a call may run: the most it can cost, and the output limit that keeps it there."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from api.calls import ChatCall
from api.errors import ApiError
from models.catalog import Offer
from models.plan import Plan

# The least output worth running a call for when the credit is short.
OUTPUT_TOKENS_LEAST = 16
# What a stream without a limit holds at first, and again each time it nears the end of it.
SLICE_TOKENS = 4096
# Recorded speech is billed at no more than some 20 tokens a second, and compresses to no less than
# about 1,000 bytes a second: a token for 32 bytes is beyond what any provider bills.
AUDIO_BYTES_PER_TOKEN = 32
# No tokenizer has text in tokens this long on average.
TOKEN_BYTES_MAX = 32


class Terms(msgspec.Struct, frozen=True):
    """Hold the bounds of a call; tokens are per choice, money in micro-dollars.

    `output_limit` is covered by `hold`; `ceiling` is how far a stream may go on by holding more,
    equal to `output_limit` when the limit is final. `wished` is the limit the caller would have had
    with all the money in the world. `included_output_limit` is None when not even the input fits,
    or when the plan has no included calls.
    """

    input_tokens_max: int
    choices: int
    output_limit: int
    ceiling: int
    wished: int
    hold: int
    included_output_limit: int | None
    affordable: Callable[[int], tuple[int, int] | None]


def of_chat(call: ChatCall, offer: Offer, plan: Plan) -> Terms:
    """Return the terms of a chat call. Raises ApiError 400 when it cannot fit the offer's context."""
    _refuse_hopeless(call, offer)
    input_max = (
        call.input_bytes
        + call.images * offer.image_tokens_max
        + -(-call.audio_bytes // AUDIO_BYTES_PER_TOKEN)
    )
    if call.file_bytes:
        # A compressed document of a few kilobytes may be hundreds of pages: only the context bounds it.
        input_max = max(input_max, offer.context_tokens or 0)
    limit, ceiling, wished = _limits(call, offer)
    rates = offer.rates

    def hold_for(tokens: int) -> int:
        return rates.bound_microusd(
            input_tokens_max=input_max, output_tokens_max=tokens * call.choices, images=0
        )

    def affordable(budget: int) -> tuple[int, int] | None:
        least = min(OUTPUT_TOKENS_LEAST, limit)
        tokens = min(rates.output_tokens_affordable(budget, input_max) // call.choices, ceiling)
        if tokens < least or hold_for(tokens) > budget:
            return None
        return tokens, hold_for(tokens)

    included = affordable(plan.included_max_cost_microusd) if plan.included_calls_per_month else None
    return Terms(
        input_tokens_max=input_max,
        choices=call.choices,
        output_limit=limit,
        ceiling=ceiling,
        wished=wished,
        hold=hold_for(limit),
        included_output_limit=min(included[0], wished) if included else None,
        affordable=affordable,
    )


def _limits(call: ChatCall, offer: Offer) -> tuple[int, int, int]:
    """Return (limit held for, ceiling, limit wished for) in tokens per choice."""
    if call.output_limit is not None:
        limit = min(call.output_limit, offer.max_output_tokens)
        return limit, limit, limit
    if call.stream and not offer.reasons_hidden:
        limit = min(SLICE_TOKENS, offer.max_output_tokens)
        return limit, offer.max_output_tokens, offer.max_output_tokens
    limit = min(offer.default_max_output_tokens, offer.max_output_tokens)
    return limit, limit, limit


def _refuse_hopeless(call: ChatCall, offer: Offer) -> None:
    """Refuse an input that no tokenizer could fit, and a document whose tokens nothing would bound."""
    if call.file_bytes and offer.context_tokens is None:
        raise ApiError(400, "unsupported_parameter", f"Files are not supported for {offer.id}.", param="messages")
    if offer.context_tokens is not None and call.input_bytes // TOKEN_BYTES_MAX > offer.context_tokens:
        raise ApiError(
            400, "context_length_exceeded",
            f"The messages are longer than the {offer.context_tokens} tokens {offer.id} can take.",
            param="messages",
        )
