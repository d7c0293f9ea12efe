"""What a call used: the facts a price is computed from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Count what one call used. The token classes never overlap.

    `input_tokens` are the uncached ones, `cached_input_tokens` were read from the provider's
    cache, `cache_write_tokens` were written to it; their sum is the prompt. `output_tokens`
    include `reasoning_tokens`, which are kept for display only. Adapters normalise to this form:
    OpenAI's cached tokens are a subset of its prompt tokens, Anthropic's come in addition.
    """

    input_tokens: int = 0
    cached_input_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    images: int = 0
    audio_ms: int = 0
    characters: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Return all tokens of the prompt, whatever class they were priced in."""
        return self.input_tokens + self.cached_input_tokens + self.cache_write_tokens
