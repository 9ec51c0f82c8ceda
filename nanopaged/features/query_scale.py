"""Queries that grow with their position: Ministral 3's, which Llama 4 had first.

In a longer text a query's softmax spreads over more keys, and its largest weights shrink. A factor of the query, which
is one of all its scores, makes up for that. It is 1 in the trained context, L tokens, and grows by the logarithm:

    position            0 .. L-1   L .. 2L-1           2L .. 3L-1
    factor              1          1 + beta * ln(2)    1 + beta * ln(3)      1 + beta * ln(1 + floor(position / L))

Cached keys stay as they are. The factor comes between rope and attention, so the layer puts it in front of attention,
whichever that is.
"""
from functools import partial
from typing import Any, Callable

from torch import Tensor

from nanopaged import kernel, model


class ScaledLayer(model.Layer):
    """A layer whose queries are multiplied. The first one that reads a batch computes the factors for all."""

    def attention(self, x: Tensor, rope: Tensor | None, batch: Any, cache: model.LayerCache,
                  kernels: kernel.Kernels) -> Tensor:
        if "query_factors" not in vars(batch):
            settings = self.config.ropes[0]
            contexts = batch.positions // settings["original_max_position_embeddings"]
            batch.query_factors = (1 + settings["llama_4_scaling_beta"] * contexts.float().log1p()).to(x.dtype)
        attention = partial(attend_scaled, kernels.attention, batch.query_factors)
        return super().attention(x, rope, batch, cache, kernels._replace(attention=attention))


def attend_scaled(attention: Callable[..., Tensor], factors: Tensor, q: Tensor, *rest: Any, **options: Any) -> Tensor:
    """factors: [T]"""
    return attention(q * factors[:, None, None], *rest, **options)


def with_query_scale(modules: model.Modules) -> model.Modules:
    """The modules with layers that do this besides. A short last layer picks its queries after they are multiplied."""
    def scaled(layer: type[model.Layer]) -> type[model.Layer]:
        return ScaledLayer if layer is model.Layer else type(layer.__name__, (layer, ScaledLayer), {})

    return modules._replace(layer=scaled(modules.layer), last_layer=scaled(modules.last_layer))
