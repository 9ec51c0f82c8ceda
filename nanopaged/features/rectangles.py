"""Attention in torch, for many sequences at once. An addition to kernel.py; `enforce_eager=True` leaves it off.

`paged_attention_reference` computes one sequence after the other. With many short ones torch then spends its time
between small calls. Here the n sequences with the same query_len are one padded batch, a rectangle, so a decode step is
a single one, and all layers of a step share the slots and the masks. Two sequences decode, block_size 4:

    block table 3 1, 7 tokens    slots  12 13 14 15  4  5  6      mask  0 0 0 0 0 0 0
    block table 2 0, 5 tokens    slots   8  9 10 11  0  0  0      mask  0 0 0 0 0 -inf -inf    (0: token 4 again)
"""
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nanopaged import kernel

# A step's block tables -> window -> (its lengths, its rectangles), which all layers share. An entry goes with its key.
RECTANGLES: Any = WeakTensorKeyDictionary()


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
                    query_start_loc: Tensor, scale: float, *, sliding_window: int = 0, sinks: Tensor | None = None,
                    out: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, **_) -> Tensor:
    """`kernel.paged_attention_reference`."""
    out = torch.empty_like(q) if out is None else out
    group = q.shape[1] // k_cache.shape[2]
    lengths, of_windows = (seq_lens, query_start_loc), RECTANGLES.setdefault(block_tables, {})
    found = of_windows.get(sliding_window)
    if found is None or any(map(operator.is_not, found[0], lengths)):
        found = lengths, list(_rectangles(block_tables, *lengths, k_cache.shape[1], group, sliding_window, q.dtype))
        of_windows[sliding_window] = found
    for tokens, slots, mask in found[1]:
        out[tokens] = _attend(q[tokens], k_cache, v_cache, slots, mask, scale * k_scale, sinks)
    return out if v_scale == 1 else out.mul_(v_scale)


def _rectangles(block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor, block_size: int, group: int,
                sliding_window: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields of each rectangle its tokens, indices into q [n, query_len], the slots to read [n, num_keys], where
    num_keys is the longest seq_len, and the mask to add to the scores [n, 1, group * query_len, num_keys]."""
    query_lens = query_start_loc.diff()
    for query_len in query_lens[query_lens > 0].unique().tolist():  # 0 is padding
        members = (query_lens == query_len).nonzero()[:, 0]  # [n]
        query = torch.arange(query_len, device=members.device)
        tokens = query_start_loc[members, None] + query
        lens = seq_lens[members, None].long()  # [n, 1]
        key_position = torch.arange(int(lens.max()), device=members.device)  # [num_keys]
        query_position = (lens - query_len + query)[:, :, None]  # [n, query_len, 1]
        window = sliding_window or len(key_position)
        visible = (key_position <= query_position) & (key_position > query_position - window)
        # A masked key is read all the same. An unwritten slot may hold NaN, which a weight of 0 does not remove. So
        # positions that no query sees, after the end or before the window, read the nearest visible slot.
        oldest = (lens - query_len - window + 1).clamp(min=0)
        position = key_position.clamp(oldest, lens - 1)  # [n, num_keys]
        block = block_tables[members].gather(1, position // block_size).long()
        slots = block * block_size + position % block_size
        mask = torch.zeros(visible.shape, dtype=dtype, device=members.device).masked_fill_(~visible, -math.inf)
        yield tokens, slots, mask[:, None].repeat(1, 1, group, 1)  # every head of a group has the same mask


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, mask: Tensor, scale: float,
            sinks: Tensor | None) -> Tensor:
    """Attention for n sequences: q and the result are [n, query_len, num_heads, head_dim]."""
    (n, query_len, num_heads, size), num_kv_heads = q.shape, k_cache.shape[2]
    k = _read_slots(k_cache, slots, q.dtype)  # [n, num_keys, num_kv_heads, head_dim]
    v = _read_slots(v_cache, slots, q.dtype)
    if sinks is not None:
        (q, k, v), mask = kernel.add_sinks(q, k, v, sinks, scale), F.pad(mask, (0, 1))
    # The query heads of a kv head become further queries of that head, so K and V are not repeated.
    q = q.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    o = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), mask, scale=scale)[..., :size]
    return o.unflatten(2, (-1, query_len)).permute(0, 3, 1, 2, 4).reshape(n, query_len, num_heads, size)


def _read_slots(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The slots [n, num_keys] of a cache as [n, num_keys, num_kv_heads, head_dim]."""
    flat = kernel.as_bytes(cache).flatten(0, 1)  # [num_slots, num_kv_heads, head_dim], a view if blocks are contiguous
    picked = flat.index_select(0, slots.flatten()).view(cache.dtype)
    return picked.view(*slots.shape, *cache.shape[2:]).to(dtype)


KERNELS = kernel.Kernels(kernel.rotate_and_store_reference, paged_attention)
