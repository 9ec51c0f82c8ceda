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


class LastLayer(model.Layer):
    """Returns only the rows that need logits, [rows, D]."""

    def forward(self, x: Tensor, residual: Tensor, rope: Tensor | None, batch: model.Batch, cache: model.LayerCache,
                kernels: kernel.Kernels) -> tuple[Tensor, Tensor]:
        q, residual = self.write_kv(x, residual, rope, batch, cache, kernels)
        rows, seq_indices = batch.logits_indices, batch.sampling_indices
        if rows is not None and not len(rows):  # nothing but K and V is needed
            return residual[:0], residual[:0]
        if batch.max_query_len == 1 or rows is None or seq_indices is None or not len(seq_indices):
            o = self.attend(q, batch, cache, kernels)  # one token each, or all rows wanted, or prompt rows alone
        else:
            # Some query is longer than 1. Sampling needs each sequence's last row alone, which attends as a decode of
            # one token.
            last_rows = rows[:len(seq_indices)]
            o_last = self.attend(q.index_select(0, last_rows), decode_only(batch, seq_indices), cache, kernels)
            if len(last_rows) == len(rows):
                return self.project(o_last, residual.index_select(0, rows))
            # The other rows are prompt tokens whose log probabilities are wanted.
            o = self.attend(q, batch, cache, kernels).index_copy_(0, last_rows.long(), o_last)
        x, residual = self.project(o, residual)  # x may be [count, T, D] with fused.py, hence -2
        return (x, residual) if rows is None else (x.index_select(-2, rows), residual.index_select(0, rows))


def decode_only(batch: model.Batch, seq_indices: Tensor) -> model.Batch:
    """A decode batch of these sequences, each with its last token alone, for attention."""
    seq_lens = batch.seq_lens.index_select(0, seq_indices)
    # A CUDA graph's padding has length 0 and stands at the end; it gets no query.
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
    starts = torch.minimum(starts, (seq_lens > 0).sum(dtype=torch.int32))
    return replace(batch, block_tables=batch.block_tables.index_select(0, seq_indices), seq_lens=seq_lens,
                   query_start_loc=starts, logits_indices=None, max_query_len=1, num_decodes=len(seq_lens),
                   query_tiles=None, shared={})


def skip_rows_without_logits(transformer: model.Transformer) -> None:
    transformer.layers[-1].__class__ = LastLayer
    transformer.select_rows = lambda x, residual, batch: (x, residual)  # type: ignore[method-assign]  # done by then
