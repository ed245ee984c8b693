"""From router logits to experts and weights, and the losses that keep experts evenly used."""

from amoeba.routing.router import (
    Routing,
    load_balance_loss,
    route,
    sequence_balance_loss,
    update_selection_bias_,
    z_loss,
)

__all__ = ["Routing", "load_balance_loss", "route", "sequence_balance_loss", "update_selection_bias_", "z_loss"]
