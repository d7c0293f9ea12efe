"""Pages of lists: what a query may ask for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import listing
from api.errors import ApiError
from api.listing import Page


@pytest.mark.parametrize(
    "query, page",
    [
        ({}, Page(20, None, None, False)),
        ({"limit": "", "after": "", "before": "", "order": ""}, Page(20, None, None, False)),
        ({"limit": "100", "after": "req_1", "order": "asc"}, Page(100, "req_1", None, True)),
        ({"before": "req_1"}, Page(20, None, "req_1", False)),
        ({"after": "a\0b"}, Page(20, "ab", None, False)),
        ({"after": "\ud800"}, Page(20, "?", None, False)),
        ({"after": "\0"}, Page(20, None, None, False)),
        ({"after": "x" * 5000}, Page(20, "x" * 256, None, False)),
    ],
)
def test_a_page(query: dict[str, str], page: Page) -> None:
    assert listing.page_of(query) == page


@pytest.mark.parametrize(
    "query, param",
    [
        ({"limit": "0"}, "limit"), ({"limit": "101"}, "limit"), ({"limit": "-1"}, "limit"),
        ({"limit": "1.0"}, "limit"), ({"limit": "٣"}, "limit"), ({"limit": " 1"}, "limit"),
        ({"limit": "9" * 5000}, "limit"), ({"order": "ASC"}, "order"), ({"after": "a", "before": "b"}, "before"),
    ],
)
def test_a_mistake_is_named(query: dict[str, str], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        listing.page_of(query)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_request", param)


def test_a_list_may_have_longer_pages() -> None:
    assert listing.page_of({"limit": "10000"}, limit_max=10_000).limit == 10_000


@given(st.dictionaries(st.sampled_from(["limit", "after", "before", "order"]), st.text()))
def test_any_query_is_a_page_or_a_refusal(query: dict[str, str]) -> None:
    try:
        page = listing.page_of(query)
    except ApiError as error:
        assert error.param in query
    else:
        assert 1 <= page.limit <= 100
        assert "\0" not in (page.after or "") + (page.before or "")
