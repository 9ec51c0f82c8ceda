"""Sliding windows and swapping: some blocks of a running sequence leave the pool for good, and those of a preempted one
wait on the host.

**Sliding windows.** In a model whose layers all have a window, a token attends to the last `window` tokens, itself
included. Blocks before the window of the next token are freed. The block table keeps NULL in their place, so that a
position's block is still found by its index:

    block_size 4, window 6, next position 11       block table    [ NULL, 5, 2 ]     attends to positions 6 .. 11

A text of any length then runs in a pool that holds a window, the tokens of a step, and a block.

**Swapping.** A preempted sequence's blocks move to a second, smaller pool on the host. Without swapping they are freed,
and its tokens are computed again when it returns (recompute). On an H200 with Qwen3-0.6B swapping was cheaper up to
some 1,000 tokens. When the sequence returns, each of its blocks has one of four sources, always in this order:

    tokens    0..15     16..31    32..47    48..63    64..70
    source    NULL      shared    shared    host      new (`allocate` takes it when a step computes its tokens)
              (window)  (prefix hit)        (swapped)
"""
import sys
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanopaged import engine
from nanopaged.device.pool import GIB, Pool
from nanopaged.device.transfer import as_current, send
from nanopaged.tiles import widest_window
from nanopaged.weights.build import memory_for

NULL = -1  # in a block table: a block that left the window and was freed
MOST_BYTES_MOVED = 2**28  # of blocks at once: they pass through a copy


@dataclass(eq=False)
class SwapOutput(engine.SchedulerOutput):
    """Before the copies the pool moves blocks to the host, and after them blocks from the host."""
    swaps_out: list[tuple[int, int]] = field(default_factory=list)  # (block, host block)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, block)


class Swapping(engine.BlockManager):
    """A BlockManager that frees blocks behind a window, and has `num_host_blocks` on the host for preempted sequences.

    window: in tokens; 0: none
    max_num_batched_tokens: what is asked for; `most_tokens` is what a scheduler of this pool may have
    """
    step: SwapOutput

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, window: int = 0,
                 num_host_blocks: int = 0, max_num_batched_tokens: int = sys.maxsize):
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self.window, self.most_tokens, self.max_blocks_per_seq = window, max_num_batched_tokens, num_blocks
        if window:  # a window and the tokens of a step have to fit into the pool, and the window may begin in a block
            self.most_tokens = min(max_num_batched_tokens, (num_blocks - 1) * block_size - window)
            self.max_blocks_per_seq = engine.cdiv(window + self.most_tokens, block_size) + 1
        self.ref_counts.append(sys.maxsize)  # ref_counts[NULL]: it is never free
        self.num_host_blocks, self.free_host_blocks = num_host_blocks, list(range(num_host_blocks))[::-1]
        self.host_tables: dict[engine.Sequence, list[int]] = {}  # SWAPPED sequence -> its block table on the host
        self.step = SwapOutput()

    def begin_step(self) -> SwapOutput:
        # Within a step moves to the host run before moves from it. So what the last step read there is free only now.
        if self.step.swaps_in:
            self.free_host_blocks += [host_block for host_block, _ in self.step.swaps_in]
            self.free_host_blocks.sort(reverse=True)  # neighbouring blocks move in one copy
        self.step = SwapOutput()
        return self.step

    def check_idle(self) -> None:
        super().check_idle()
        self.begin_step()  # host blocks that the last step read are free from here on
        if num_held := self.num_host_blocks - len(self.free_host_blocks):
            raise RuntimeError(f"the engine is idle, yet {num_held} host blocks are held: please report this")

    # ---- the window

    def num_blocks_before_window(self, position: int) -> int:
        """Leading blocks that the token at this position does not attend to."""
        return max(0, position - self.window + 1) // self.block_size if self.window else 0

    def allocate(self, seq: engine.Sequence, end: int) -> bool:
        """Free the blocks that lie before the window of the sequence's next token, first."""
        table = seq.block_table
        for i in range(num_null_blocks(table), self.num_blocks_before_window(seq.num_computed_tokens)):
            self._decref(table[i])
            table[i] = NULL
        return super().allocate(seq, end)

    def cache_full_blocks(self, seq: engine.Sequence) -> None:
        """Not if a block left the window before it was offered: the later ones could be found only through it."""
        if seq.num_keyed_blocks >= num_null_blocks(seq.block_table):
            super().cache_full_blocks(seq)

    def find_prefix(self, seq: engine.Sequence) -> engine.PrefixHit:
        """With NULL for each block that the next token does not attend to."""
        hit = super().find_prefix(seq)
        num_computed_tokens = max(hit.num_tokens, seq.num_computed_tokens)  # a SWAPPED sequence has computed some
        num_null = self.num_blocks_before_window(min(num_computed_tokens, seq.num_tokens - 1))
        return hit._replace(blocks=[NULL] * num_null + hit.blocks[num_null:])

    def num_blocks_needed(self, seq: engine.Sequence, hit: engine.PrefixHit) -> int:
        return min(super().num_blocks_needed(seq, hit), self.max_blocks_per_seq)

    # ---- the host

    def preempt(self, seq: engine.Sequence) -> engine.Status:
        """Move the sequence's blocks to the host, or free them if too few host blocks are free."""
        # While a step is planned, at most one other is not read, and that one has no drafts (Engine.must_read). So
        # these are known tokens: not pending ones or undecided drafts. Later blocks of the table held wrong drafts.
        num_computed_tokens, num_null = seq.num_computed_tokens, num_null_blocks(seq.block_table)
        blocks = seq.block_table[num_null:engine.cdiv(num_computed_tokens, self.block_size)]
        if not num_computed_tokens or len(blocks) > len(self.free_host_blocks):
            return super().preempt(seq)
        host_blocks = [self.free_host_blocks.pop() for _ in blocks]
        self.step.swaps_out += zip(blocks, host_blocks)
        self.free(seq)
        self.host_tables[seq], seq.num_computed_tokens = [NULL] * num_null + host_blocks, num_computed_tokens
        return engine.Status.SWAPPED

    def start(self, seq: engine.Sequence, hit: engine.PrefixHit) -> None:
        host_table, num_found = self.host_tables.pop(seq, []), len(hit.blocks)
        num_tokens = max(hit.num_tokens, seq.num_computed_tokens)
        super().start(seq, hit)
        swapped = host_table[num_found:]
        seq.block_table += [self._pop_free_block() for _ in swapped]
        self.step.swaps_in += zip(swapped, seq.block_table[num_found:])
        self._free_on_host(host_table[:num_found])
        seq.num_found_tokens, seq.num_computed_tokens = num_tokens, min(num_tokens, seq.num_tokens - 1)

    def free(self, seq: engine.Sequence) -> None:
        super().free(seq)
        self._free_on_host(self.host_tables.pop(seq, []))

    def _free_on_host(self, host_table: list[int]) -> None:
        self.free_host_blocks += [block for block in reversed(host_table) if block != NULL]


def num_null_blocks(table: list[int]) -> int:
    """Leading entries of a block table that are NULL."""
    return bisect_left(table, True, key=lambda block: block != NULL)


def pick_window(runner: Any, size: int) -> int:
    """The sliding window, in tokens, whose blocks are freed; 0 if some layer has none. A pool of `size` tokens must
    hold more than a window and a block; else texts must fit into it."""
    window = widest_window(runner.config)
    return window if window < size - runner.block_size else 0


def make_manager(options: Any, runner: Any, num_blocks: int, window: int) -> Swapping:
    return Swapping(num_blocks, runner.block_size, options.enable_prefix_caching, window,
                    swap(runner, options.swap_space), options.max_num_batched_tokens)


def swap(runner: Any, swap_space: float) -> int:
    """Give the runner a pool with blocks on the host, and return their number. swap_space: GiB, of all GPUs that share
    the model. ValueError: too little memory."""
    pool = runner.pool
    num_blocks = int(swap_space / runner.num_ranks * GIB) // pool.block_bytes
    with memory_for(f"swap_space of {swap_space} GiB is more memory than the host has; lower swap_space",
                    num_blocks * pool.block_bytes), as_current(runner.device):
        runner.pool = SwapPool(pool, num_blocks) if num_blocks else pool
    return num_blocks


class SwapPool(Pool):
    """The pool, and num_blocks blocks on the host. All layers of many blocks move at once, and the host waits for no
    move: moves and steps run on the device in the order in which they are launched."""

    def __init__(self, pool: Pool, num_blocks: int):
        super().__init__(pool.num_layers, pool.block_shape, pool.dtype, pool.device)
        self.blocks = pool.blocks
        layers, kinds, _, *block = pool.blocks.shape
        self.host = torch.empty(num_blocks, layers, kinds, *block, dtype=torch.uint8,
                                pin_memory=pool.device.type == "cuda")

    def move(self, step: Any) -> None:
        """Moves to the host, then copies, then moves from the host: a block that a move or a copy has read may be the
        target of a later one. step: a SwapOutput"""
        for blocks, there in self._stretches(step.swaps_out):
            self.host[there].copy_(self.blocks.index_select(2, blocks).movedim(2, 0).contiguous(), non_blocking=True)
        super().move(step)
        for blocks, there in self._stretches([(block, host_block) for host_block, block in step.swaps_in]):
            moved = self.host[there].to(self.device, non_blocking=True)
            self.blocks.index_copy_(2, blocks.long(), moved.movedim(0, 2))

    def _stretches(self, pairs: list[tuple[int, int]]) -> Iterator[tuple[Tensor, slice]]:
        """The blocks of (block, host block), cut where the next host block is no neighbour, and where more would be too
        many. With each stretch comes its place on the host."""
        start = 0
        for end in range(1, len(pairs) + 1):
            is_full = (end - start + 1) * self.block_bytes > MOST_BYTES_MOVED
            if is_full or end == len(pairs) or pairs[end][1] != pairs[end - 1][1] + 1:
                blocks = send(self.device, [[block for block, _ in pairs[start:end]]])[0]
                yield blocks, slice(pairs[start][1], pairs[end - 1][1] + 1)
                start = end
