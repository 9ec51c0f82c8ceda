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
from nanopaged.scheduling.additions import NULL, BlockManager, Sequence


def widest_window(windows: list[int]) -> int:
    """The tokens that one token attends to, itself included, at most. windows: of each layer. 0: some has no window."""
    return max(windows) if windows and all(windows) else 0


class SlidingWindow(BlockManager):
    """A BlockManager that frees blocks behind the window. window: 0 for none, so that swapping can build on this."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, window: int = 0):
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self.window = window
        self.max_blocks_per_seq = num_blocks
        self.ref_counts.append(sys.maxsize)  # ref_counts[NULL]: it is never free

    def largest_chunk(self, max_num_batched_tokens: int) -> int:
        """Window and chunk have to fit into the pool, and the window may begin within a block."""
        if not self.window:
            return max_num_batched_tokens
        chunk = min(max_num_batched_tokens, (self.num_blocks - 1) * self.block_size - self.window)
        self.max_blocks_per_seq = engine.cdiv(self.window + chunk, self.block_size) + 1
        return chunk

    def allocate(self, seq: Any, end: int) -> bool:
        self.free_out_of_window(seq)
        return super().allocate(seq, end)

    def cache_full_blocks(self, seq: Any) -> None:
        """Not if a block left the window before it was offered: the later ones could be found only through it."""
        if seq.num_cached_blocks >= seq.num_null_blocks:
            super().cache_full_blocks(seq)

    def free_out_of_window(self, seq: Sequence) -> None:
        """Free the blocks that lie before the window of the sequence's next token."""
        for i in range(seq.num_null_blocks, self.num_blocks_before_window(seq.num_computed_tokens)):
            self._decref(seq.block_table[i])
            seq.block_table[i] = NULL
            seq.num_null_blocks = i + 1

    def find_prefix(self, seq: Any) -> engine.PrefixHit:
        hit = super().find_prefix(seq)
        num_null = self.num_null_blocks(seq, hit)
        return hit._replace(blocks=[NULL if i < num_null else block for i, block in enumerate(hit.blocks)])

    def num_null_blocks(self, seq: Sequence, hit: engine.PrefixHit) -> int:
        """Leading entries of its block table that will be NULL, if it is admitted with this hit."""
        num_computed_tokens = max(hit.num_tokens, seq.num_computed_tokens)  # a swapped sequence has computed some
        before_window = self.num_blocks_before_window(min(num_computed_tokens, seq.num_tokens - 1))
        return min(before_window, max(len(hit.blocks), len(seq.host_table)))

    def num_blocks_needed(self, seq: Any, hit: engine.PrefixHit) -> int:
        num_null = self.num_null_blocks(seq, hit)
        num_needed = super().num_blocks_needed(seq, hit) - max(0, num_null - len(hit.blocks))
        return min(num_needed, self.max_blocks_per_seq)  # a text longer than the pool slides through it

    def start(self, seq: Any, hit: engine.PrefixHit) -> None:
        super().start(seq, hit)
        seq.num_null_blocks = seq.block_table.count(NULL)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        super().fork(parent, child)
        child.num_null_blocks = parent.num_null_blocks

    def free(self, seq: Any) -> None:
        super().free(seq)
        seq.num_null_blocks = 0

    def num_blocks_before_window(self, position: int) -> int:
        """Leading blocks that the token at this position does not attend to."""
        return max(0, position - self.window + 1) // self.block_size if self.window else 0
