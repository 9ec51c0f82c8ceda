"""The last layer attends, and runs its MLP, only for the tokens that need logits. An addition to model.py, which
`enforce_eager=True` leaves off.

No layer reads the last layer's output, and most tokens of a prompt need no logits. Tokens without logits need K and V
there, and neither attention nor the MLP. A decodes, B brings a whole prompt, and C a first chunk:

    token             a6  b0  b1  b2  b3  c0  c1  c2
    K and V           x   x   x   x   x   x   x   x
    attention, MLP    x   .   .   .   x   .   .   .      logits_indices 0 4, sampling_places 0 1 (A, B)
"""
from functools import partial
from typing import Any, Callable

import torch
from torch import Tensor

from nanopaged import kernel, model


class ShortLastLayer(model.Layer):
    """`model.LastLayer` in less time: [T, D] -> [logit rows, D]."""

    def forward(self, x: Tensor, rope: Tensor | None, batch: model.Batch, cache: model.LayerCache,
                kernels: kernel.Kernels) -> Tensor:
        o = self.attention(self.input_layernorm(x), rope, batch, cache, kernels)
        x = model.select_rows(x, batch) + o
        return x + self.mlp_post_norm(self.mlp(self.post_attention_layernorm(x)))

    def attention(self, x: Tensor, rope: Tensor | None, batch: model.Batch, cache: model.LayerCache,
                  kernels: kernel.Kernels) -> Tensor:
        """Write the K and V of all tokens, then return the attention of some: [T, D] -> [R, D]."""
        attention = partial(attend_for_tokens, kernels.attention, batch)
        return super().attention(x, rope, batch, cache, kernels._replace(attention=attention))


MODULES = model.PLAIN._replace(last_layer=ShortLastLayer)


def attend_for_tokens(attention: Callable[..., Tensor], batch: model.Batch, q: Tensor, k_cache: Tensor, v_cache: Tensor,
                      block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor, scale: float,
                      **options: Any) -> Tensor:
    """`attention` of the queries of batch.logits_indices. These are first the last token of each sequence in
    sampling_places, then the tokens that predict prompt tokens whose log probabilities are wanted."""
    tokens, places, caches = batch.logits_indices, batch.sampling_places, (k_cache, v_cache)
    attend_for_all = partial(attention, q, *caches, block_tables, seq_lens, query_start_loc, scale, **options)
    if tokens is not None and not len(tokens):
        return q[:0]
    if tokens is None or places is None or not len(places) or batch.metadata.max_query_len == 1:
        return model.select_rows(attend_for_all(), batch)  # tokens of prompts alone, or one of each sequence
    # The last token of each sequence that samples attends as a decode of one token.
    last_tokens, others = tokens[:len(places)], tokens[len(places):]
    seq_lens, block_tables = seq_lens.index_select(0, places), block_tables.index_select(0, places)
    # A CUDA graph's padding has length 0 and stands at the end; it gets no query.
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
    starts = torch.minimum(starts, (seq_lens > 0).sum(dtype=torch.int32))
    metadata = model.AttentionMetadata(1, batch.metadata.max_seq_len)
    options = {name: value for name, value in options.items() if name not in batch.metadata._fields}
    o = attention(q.index_select(0, last_tokens), *caches, block_tables, seq_lens, starts, scale, **options,
                  **metadata._asdict())
    return torch.cat([o, attend_for_all().index_select(0, others)]) if len(others) else o
