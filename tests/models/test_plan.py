"""Plans: what they include."""

import dataclasses

import pytest

from models.plan import DEFAULT_PLANS, SURFACES, Plan


def plan(*surfaces):
    return Plan("p", 0, 0, 1, frozenset(surfaces))


def test_a_plan_includes_the_surfaces_it_names():
    assert plan("chat", "models").includes("chat")
    assert not plan("chat", "models").includes("images")


def test_a_star_includes_every_surface():
    assert all(plan("*").includes(surface) for surface in SURFACES)


@pytest.mark.parametrize("name", ["", "*", "telepathy", "speech"])
def test_what_is_no_surface_is_never_included(name):
    assert not plan("*", "chat").includes(name)


def test_an_empty_plan_includes_nothing():
    assert not any(plan().includes(surface) for surface in SURFACES)


def test_the_default_plans():
    free, payg = DEFAULT_PLANS
    assert (free.name, free.included_calls_per_month, free.requests_per_minute) == ("free", 500, 20)
    assert (payg.name, payg.included_calls_per_month, payg.requests_per_minute) == ("payg", 500, 600)
    assert free.included_max_cost_microusd == payg.included_max_cost_microusd == 20_000
    assert [surface for surface in SURFACES if not free.includes(surface)] == ["images", "audio"]
    assert all(payg.includes(surface) for surface in SURFACES)


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT_PLANS[0].requests_per_minute = 10**6
