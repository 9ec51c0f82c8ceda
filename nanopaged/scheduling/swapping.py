"""Swapping: a preempted sequence's blocks move to a second, smaller pool on the host. An addition to chapter 3.

Without it a preempted sequence gives up its blocks, and its tokens are computed again when it returns (recompute). On
an H200 with Qwen3-0.6B swapping was cheaper up to some 1,000 tokens. When the sequence returns, each of its blocks has
one of four sources, always in this order:

    tokens    0..15     16..31    32..47    48..63    64..70
    source    NULL      shared    shared    host      new (`allocate` takes it when a step computes its tokens)
              (window)  (prefix hit)        (swapped)

The runner moves the blocks before a step's forward pass: first moves to the host, then copies, then moves from the
host (nanopaged/device/runner.py).
"""
from typing import Any

from nanopaged import engine
from nanopaged.scheduling.additions import NULL, SchedulerOutput, Sequence
from nanopaged.scheduling.window import SlidingWindow


class Swapping(SlidingWindow):
    """A BlockManager with `num_host_blocks` blocks on the host for preempted sequences."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, window: int = 0,
                 num_host_blocks: int = 0):
        super().__init__(num_blocks, block_size, enable_prefix_caching, window)
        self.num_host_blocks, self.free_host_blocks = num_host_blocks, list(range(num_host_blocks))[::-1]

    def begin_step(self) -> SchedulerOutput:
        # Within a step moves to the host run before moves from it. So what the last step read there is free only now.
        if self.step.swaps_in:
            self.free_host_blocks += [host_block for host_block, _ in self.step.swaps_in]
            self.free_host_blocks.sort(reverse=True)  # neighbouring blocks move in one copy
        return super().begin_step()

    def preempt(self, seq: Any) -> engine.Status:
        """Move the sequence's blocks to the host, or free them if the host pool is too small."""
        num_computed_tokens, num_null = seq.num_computed_tokens, seq.num_null_blocks
        if seq.drafts:  # the K and V of drafts that are not decided yet stay behind
            num_computed_tokens = min(num_computed_tokens, len(seq.token_ids))
        blocks = seq.block_table[num_null:engine.cdiv(num_computed_tokens, self.block_size)]  # later ones held drafts
        if not num_computed_tokens or len(blocks) > len(self.free_host_blocks):
            return super().preempt(seq)
        host_blocks = [self.free_host_blocks.pop() for _ in blocks]
        self.step.swaps_out += zip(blocks, host_blocks)
        self.free(seq)
        seq.host_table, seq.num_computed_tokens = [NULL] * num_null + host_blocks, num_computed_tokens
        return engine.Status.SWAPPED

    def start(self, seq: Any, hit: engine.PrefixHit) -> None:
        num_found, num_computed_tokens = len(hit.blocks), seq.num_computed_tokens
        super().start(seq, hit)
        if seq.host_table:
            seq.host_table, swapped = seq.host_table[:num_found], seq.host_table[num_found:]
            seq.block_table += [self._pop_free_block() for _ in swapped]
            self.step.swaps_in += zip(swapped, seq.block_table[num_found:])
            self._free_on_host(seq)
            seq.num_hit_tokens = max(hit.num_tokens, num_computed_tokens)
            seq.num_computed_tokens = min(seq.num_hit_tokens, seq.num_tokens - 1)

    def free(self, seq: Any) -> None:
        super().free(seq)
        self._free_on_host(seq)

    def _free_on_host(self, seq: Sequence) -> None:
        self.free_host_blocks += [block for block in reversed(seq.host_table) if block != NULL]
        seq.host_table = []

    def check_idle(self) -> None:
        super().check_idle()
        num_held = self.num_host_blocks - len(self.free_host_blocks)
        if num_held:
            raise RuntimeError(f"the engine is idle, yet {num_held} host blocks are held: please report this")
