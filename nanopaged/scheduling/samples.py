"""Samples of one prompt (n > 1) share the blocks of the prompt, also without prefix caching. An addition to chapter 3.

Each sample is a sequence of its own: it waits, runs and is preempted like any other. When it is admitted it shares the
blocks of a sample that runs, the last one included, which may be partly filled. Whichever writes there first copies
the block, and the last holder keeps the original (copy-on-write, BlockManager). With block_size 4 and a prompt
of the tokens 0 to 5:

    step    A, the first sample                 B, the second sample
    0       computes 0 to 5, blocks 0 1         shares blocks 0 1, computes 5 for its logits alone
    1       copies block 1 to 2, writes 6       holds block 1 alone by now, writes 6

Copies are made before the forward pass: a copy of block 1 in step 0 would lack what step 0 writes there. A sample that
returns with generated tokens writes behind the prompt at once, and would need this copy. So it shares full blocks only.

A sample that shares another's blocks has not looked up their keys (PrefixHit.num_cached_blocks is 0). So the prefix
cache may know such a block by a key that nothing finds any more, and `cache_full_blocks` then gives it a new one:

    1. block 3 follows the tokens P, whose prefix key is 1, and gets the key (1, efgh)
    2. the block of P is evicted; P is computed again in another block, with the new prefix key 9
    3. a sample that shares block 3 offers it with the key (9, efgh)
"""
import weakref
from collections import deque
from collections.abc import Iterator

from nanopaged import engine
from nanopaged.scheduling.additions import BlockManager, Sequence


class Samples:
    """The samples of one prompt: Sequence.samples of each of them."""

    def __init__(self, seqs: list[Sequence]):
        # Weakly: a sample has this object, and a circle of references lives until the garbage collector comes by.
        self.seqs = deque(weakref.ref(seq) for seq in seqs)
        for seq in seqs:
            seq.samples = self

    def running(self, manager: BlockManager) -> Iterator[Sequence]:
        """Those that run with blocks of this pool."""
        while self.seqs and ((first := self.seqs[0]()) is None or first.status is engine.Status.FINISHED):
            self.seqs.popleft()
        for ref in self.seqs:
            seq = ref()
            if seq is not None and seq.status is engine.Status.RUNNING and seq.pool is manager:
                yield seq

    def find(self, manager: BlockManager, seq: Sequence, hit: engine.PrefixHit) -> engine.PrefixHit:
        """What the sequence can share: the prompt of a sample that runs, or the hit in the prefix cache if that is not
        shorter."""
        num_tokens = seq.num_prompt_tokens
        if seq.num_tokens > num_tokens:
            num_tokens -= num_tokens % manager.block_size
        num_null = manager.num_blocks_before_window(num_tokens - 1)  # that it could do without
        for other in self.running(manager) if hit.num_tokens < num_tokens else ():
            if other.num_computed_tokens >= num_tokens and other.num_null_blocks <= num_null:
                blocks = other.block_table[:engine.cdiv(num_tokens, manager.block_size)]
                return engine.PrefixHit(blocks, num_tokens, seq.root, 0)
        return hit
