"""Sliding windows: blocks that no later token attends to are freed while their sequence runs. An addition to chapter 3.

In a model whose layers all have a window, a token attends to the last `window` tokens, itself included. Blocks before
the window of the next token leave the block table, and the table keeps NULL in their place, so that a position's block
is still found by its index:

    block_size 4, window 6, next position 11       block table    [ NULL, 5, 2 ]     attends to positions 6 .. 11

A text of any length then runs in a pool that holds a window, a chunk and a block.
"""
import sys
from typing import Any

from nanopaged import engine
from nanopaged.scheduling.additions import NULL, BlockManager


def widest_window(windows: list[int]) -> int:
    """The tokens that one token attends to, itself included, at most. windows: of each layer. 0: some has no window."""
    return max(windows) if windows and all(windows) else 0


class SlidingWindow(BlockManager):
    """A BlockManager that frees blocks behind the window. window: 0 for none, so that swapping can build on this."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, window: int = 0):
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self.window = window
        if window:  # window and chunk have to fit into the pool, and the window may begin within a block
            self.max_chunk = (num_blocks - 1) * block_size - window
        self.ref_counts.append(sys.maxsize)  # ref_counts[NULL]: it is never free

    @property
    def max_blocks_per_seq(self) -> int:
        """Under a window, a text longer than the pool slides through it."""
        return engine.cdiv(self.window + self.max_chunk, self.block_size) + 1 if self.window else self.num_blocks

    def allocate(self, seq: Any, end: int) -> bool:
        """Free the blocks that lie before the window of the sequence's next token, first."""
        for i in range(seq.num_null_blocks, self.num_blocks_before_window(seq.num_computed_tokens)):
            self._decref(seq.block_table[i])
            seq.block_table[i] = NULL
        return super().allocate(seq, end)

    def cache_full_blocks(self, seq: Any) -> None:
        """Not if a block left the window before it was offered: the later ones could be found only through it."""
        if seq.num_cached_blocks >= seq.num_null_blocks:
            super().cache_full_blocks(seq)

    def find_prefix(self, seq: Any) -> engine.PrefixHit:
        """With NULL for each block that the next token does not attend to."""
        hit = super().find_prefix(seq)
        num_computed_tokens = max(hit.num_tokens, seq.num_computed_tokens)  # a swapped sequence has computed some
        num_null = self.num_blocks_before_window(min(num_computed_tokens, seq.num_tokens - 1))
        return hit._replace(blocks=[NULL] * num_null + hit.blocks[num_null:])

    def num_blocks_needed(self, seq: Any, hit: engine.PrefixHit) -> int:
        return min(super().num_blocks_needed(seq, hit), self.max_blocks_per_seq)
