"""The last layer computes only the rows that need logits. An addition to model.py; `enforce_eager=True` leaves it off.

No layer reads the last layer's output, and most rows of a prompt need no logits. In the last layer these rows need K
and V, and neither attention nor the MLP. A decodes, B brings a whole prompt, and C a first chunk:

    token             a6  b0  b1  b2  b3  c0  c1  c2
    K and V           x   x   x   x   x   x   x   x
    attention, MLP    x   .   .   .   x   .   .   .      logits_indices 0 4 (rows), sampling_indices 0 1 (A, B)
"""
from dataclasses import replace

import torch
from torch import Tensor

from nanopaged import kernel, model


class ShortLastLayer(model.Layer):
    """`model.LastLayer` in less time: [T, D] -> [rows, D]."""

    def forward(self, x: Tensor, rope: Tensor | None, batch: model.Batch, cache: model.LayerCache,
                kernels: kernel.Kernels) -> Tensor:
        o = self.attention(self.input_layernorm(x), rope, batch, cache, kernels)
        x = select_rows(x, batch) + o
        return x + self.mlp(self.post_attention_layernorm(x))

    def attention(self, x: Tensor, rope: Tensor | None, batch: model.Batch, cache: model.LayerCache,
                  kernels: kernel.Kernels) -> Tensor:
        """Write the K and V of all tokens, then attend with some: [T, D] -> [rows, D]."""
        q = self.write_kv(x, rope, batch, cache, kernels)
        rows, seq_indices = batch.logits_indices, batch.sampling_indices
        if rows is not None and not len(rows):
            o = q[:0]
        elif rows is None or seq_indices is None or not len(seq_indices) or batch.hints["max_query_len"] == 1:
            # All rows wanted, or rows of prompts alone, or one token each.
            o = select_rows(self.attend(q, batch, cache, kernels), batch)
        else:
            # Some query_len is above 1. Sampling needs each sequence's last row alone, which attends as a decode of
            # one token. Behind these rows stand those of prompt tokens whose log probabilities are wanted.
            last_rows, others = rows[:len(seq_indices)], rows[len(seq_indices):]
            o = self.attend(q.index_select(0, last_rows), decode_only(batch, seq_indices), cache, kernels)
            if len(others):
                o = torch.cat([o, self.attend(q, batch, cache, kernels).index_select(0, others)])
        return self.attention_post_norm(self.o_proj(o.flatten(1)))


MODULES = model.PLAIN._replace(last_layer=ShortLastLayer)


def select_rows(x: Tensor, batch: model.Batch) -> Tensor:
    return x if batch.logits_indices is None else x.index_select(0, batch.logits_indices)


def decode_only(batch: model.Batch, seq_indices: Tensor) -> model.Batch:
    """A decode batch of these sequences, each with its last token alone, for attention."""
    seq_lens = batch.seq_lens.index_select(0, seq_indices)
    # A CUDA graph's padding has length 0 and stands at the end; it gets no query.
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
    starts = torch.minimum(starts, (seq_lens > 0).sum(dtype=torch.int32))
    hints = dict(max_query_len=1, max_seq_len=batch.hints["max_seq_len"], shared={})
    return replace(batch, block_tables=batch.block_tables.index_select(0, seq_indices), seq_lens=seq_lens,
                   query_start_loc=starts, logits_indices=None, hints=hints)
