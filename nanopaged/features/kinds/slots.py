"""The slots of a step's tokens in all groups, in one launch. (Six small ones of torch would cost a step 1%.)"""
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanopaged.optional_triton import jit, launch_options, tl

TILE = 1024  # tokens of a sequence that a program computes at once


def group_slots_reference(tables: Tensor, positions: Tensor, slot_mapping: Tensor, query_start_loc: Tensor,
                          block_size: int) -> Tensor:
    """tables [N, G, table_size]: a sequence's table for each group; positions, slot_mapping [T] -> slots [G, T], -1
    where slot_mapping has it. The flat batch may end with padding, which has slot -1."""
    tokens = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    place = torch.bucketize(tokens, query_start_loc[1:], right=True).clamp(max=len(tables) - 1)
    slots = tables[place, :, positions // block_size] * block_size + (positions % block_size)[:, None]
    return torch.where(slot_mapping[:, None] < 0, -1, slots).T.contiguous()


def group_slots(tables: Tensor, positions: Tensor, slot_mapping: Tensor, query_start_loc: Tensor,
                block_size: int) -> Tensor:
    """`group_slots_reference` in Triton."""
    num_seqs, num_groups, _ = tables.shape
    slots = slot_mapping.new_empty(num_groups, len(positions))
    group_slots_kernel[(num_seqs, num_groups)](
        slots, tables, positions, slot_mapping, query_start_loc, len(positions), *tables.stride()[:2],
        BLOCK_SIZE=block_size, TILE=TILE, **launch_options(slots.device, in_chain=False))
    return slots


def kernel_forms(r: Any) -> Iterator[Callable[[], Any]]:
    """For warmup.py."""
    nothing = torch.zeros(1, dtype=torch.int32, device=r.device)
    tables = r.rows.block_tables[:1].view(1, -1, r.rows.table_size)
    yield partial(group_slots, tables, nothing, nothing - 1, nothing.expand(2), r.block_size)


@jit
def group_slots_kernel(slots, block_tables, positions, slot_mapping, query_start_loc, num_tokens, table_row, table_size,
                       BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    """Grid (sequence, group)."""
    seq, group = tl.program_id(0), tl.program_id(1)
    table, slots = block_tables + seq * table_row + group * table_size, slots + group * num_tokens
    # The last sequence's program takes the padding behind its tokens as well.
    end = tl.where(seq == tl.num_programs(0) - 1, num_tokens, tl.load(query_start_loc + seq + 1))
    for first in range(tl.load(query_start_loc + seq), end, TILE):
        token = first + tl.arange(0, TILE)
        valid = token < end
        position = tl.load(positions + token, mask=valid, other=0)
        is_written = tl.load(slot_mapping + token, mask=valid, other=-1) >= 0
        block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0)
        tl.store(slots + token, tl.where(is_written, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=valid)
