"""`cache_aware_routing=`: routers that favour experts which are resident, so that outputs depend on
who is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from host_offload.control.interface import Policy
from host_offload.control.rules import gives_away
from moejax.errors import UserError
from moejax.models.model_config import ModelConfig

if TYPE_CHECKING:
    from moejax.start.options import Config


def check_routing(options: Config, policies: Sequence[Policy]) -> None:
    """Raises UserError for a number that is none, and for what does not go together."""
    delta = options.policy.cache_aware_routing
    if delta is None:
        return
    if not 0 <= delta < math.inf:
        raise UserError(
            "cache_aware_routing is how much of its score a missing expert loses, a number from 0 "
            f"up such as 0.05, not {delta}"
        )
    if options.transfer.driver.name == "stream":
        raise UserError(
            "cache_aware_routing favours experts that are there when a layer is routed, and with "
            "driver='stream' all of them are; leave it out, or take driver device or host"
        )
    if gives_away(policies):
        raise UserError(
            "cache_aware_routing makes outputs depend on who is resident, and a placement on "
            "measured times who comes; a run could not be repeated; leave one of them out"
        )


def check_router(delta: float | None, config: ModelConfig) -> None:
    """Raises UserError for a router whose choice takes no correction."""
    if delta is not None and config.route_rule.scoring == "sparsemixer":
        raise UserError(
            "cache_aware_routing adds to the scores that experts are chosen by, and this model's "
            "router (sparsemixer) chooses by logits and weighs by what it chose; leave it out"
        )


def routing_notes(delta: float | None) -> list[str]:
    """What results must say of it."""
    if delta is None:
        return []
    return [
        f"cache_aware_routing {delta:g} CHANGES OUTPUTS: a missing expert loses {delta:g} of its "
        "score where routers choose, so tokens and logits depend on who is resident, that is on "
        "budget, policies and what else runs; they are not those of full residency"
    ]
