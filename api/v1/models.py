"""Models: the offers a key may use, with their prices."""

from __future__ import annotations

from quart import Blueprint, Response, g

from api.auth import Caller
from api.errors import ApiError
from api.exchange import Need
from api.v1.services import Services, answer
from api.wire import Model, ModelList, ModelPricing
from models.catalog import Offer

NEED = Need("models", write=False, metered=False)


def register(blueprint: Blueprint, services: Services) -> None:
    """Add the model routes."""

    @blueprint.get("/models")
    @services.need(NEED)
    async def list_models() -> Response:
        rows = [model_of(offer) for offer in _visible(services, g.exchange.caller)]
        first, last = (rows[0].id, rows[-1].id) if rows else ("", "")
        return answer(ModelList("list", rows, first, last, has_more=False))

    @blueprint.get("/models/<path:model_id>")
    @services.need(NEED)
    async def retrieve_model(model_id: str) -> Response:
        wanted = model_id.rstrip("/")
        for offer in _visible(services, g.exchange.caller):
            if offer.id == wanted:
                return answer(model_of(offer))
        raise ApiError(
            404, "model_not_found",
            f"The model {wanted[:100]!r} does not exist or is not available to this key.", param="model",
        )


def model_of(offer: Offer) -> Model:
    """Return an offer as the wire shows it."""
    return Model(
        id=offer.id,
        object="model",
        created=offer.created,
        owned_by=offer.owned_by or "tollgate",
        name=offer.name,
        surface=offer.surface,
        context_length=offer.context_tokens,
        max_output_tokens=offer.max_output_tokens,
        modalities=list(offer.modalities),
        capabilities=list(offer.capabilities),
        supported_parameters=list(offer.supported_parameters),
        pricing=ModelPricing(**offer.rates.to_usd()),
    )


def _visible(services: Services, caller: Caller) -> list[Offer]:
    offers = services.catalog().offers.values()
    return sorted(
        (offer for offer in offers if caller.may_use(offer.id) and caller.plan.includes(offer.scope)),
        key=lambda offer: offer.id,
    )
