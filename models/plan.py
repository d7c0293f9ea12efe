"""Plans: what an account may call, how often, and how much of it is included."""

from __future__ import annotations

from dataclasses import dataclass

SURFACES = (
    "chat",
    "models",
    "embeddings",
    "images",
    "audio",
    "knowledge",
    "memories",
    "tools",
    "prompts",
    "chats",
    "files",
)
EVERY_SURFACE = "*"
# A new account is on the first; its first top-up moves it to the second. Both always exist.
PLAN_OF_NEW_ACCOUNTS = "free"
PLAN_OF_PAYING_ACCOUNTS = "payg"
CONCURRENT_CALLS = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """Say what a plan includes.

    Included calls are per account and UTC calendar month; `included_max_cost_microusd` is the most
    that one of them may cost the operator. `concurrent_calls` may run at once in one process, replies
    still being sent included. `surfaces` holds names from SURFACES, or "*" for all.
    """

    name: str
    included_calls_per_month: int
    included_max_cost_microusd: int
    requests_per_minute: int
    surfaces: frozenset[str]
    concurrent_calls: int = CONCURRENT_CALLS

    def includes(self, surface: str) -> bool:
        """Tell whether calls to a surface are part of the plan. An unknown surface never is."""
        return surface in SURFACES and (surface in self.surfaces or EVERY_SURFACE in self.surfaces)


DEFAULT_PLANS = (
    Plan(
        name=PLAN_OF_NEW_ACCOUNTS,
        included_calls_per_month=500,
        included_max_cost_microusd=20_000,
        requests_per_minute=20,
        concurrent_calls=10,
        surfaces=frozenset(SURFACES) - {"images", "audio"},
    ),
    Plan(
        name=PLAN_OF_PAYING_ACCOUNTS,
        included_calls_per_month=500,
        included_max_cost_microusd=20_000,
        requests_per_minute=600,
        surfaces=frozenset({EVERY_SURFACE}),
    ),
)
