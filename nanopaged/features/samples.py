"""Samples of one prompt (n > 1) share the blocks of the prompt, also without prefix caching.

Each sample is a sequence of its own: it runs, waits and is preempted like any other. Only the first one is queued, and
computes the prompt. When it gets its first token, each other sample **forks** from it: it shares the blocks of the
prompt, the last one included, which may be partly filled. Whichever sample writes there first copies the block, and the
last holder keeps the original (copy-on-write, BlockManager). With block_size 4 and a prompt of the tokens 0 to 5:

    step    A, the first sample                 B, the second sample
    0       computes 0 to 5, blocks 0 1
    1       copies block 1 to 2, writes 6       shares blocks 0 1, computes 5 for its logits alone
    2       writes 7 into block 2               holds block 1 alone by now, writes 6

A sample that finds no free batch row forks later, from any sample that gets a token then. If the last sample ends
before that, the next one is queued, and computes the prompt again.

B may fork when A has filled that last block and offered it. If A ends before B writes there, the prefix cache must not
find the block by A's tokens any more (drawn in BlockManager).

A sample that shares another's blocks has not looked up their keys (PrefixHit.num_keyed_blocks is 0). So the prefix
cache may know such a block by a key that nothing finds any more, and `cache_full_blocks` then gives it a new one:

    1. block 3 follows the tokens P, whose prefix key is 1, and gets the key (1, efgh)
    2. the block of P is evicted; P is computed again in another block, with the new prefix key 9
    3. a sample that shares block 3 offers it with the key (9, efgh)
"""
from collections import deque
from collections.abc import Callable
from typing import Any

from nanopaged import engine


def fork(scheduler: Any, parent: engine.Sequence, child: engine.Sequence, hit: engine.PrefixHit) -> bool:
    """Let the child run with these blocks of the parent, or queue it if it cannot share them (features/kinds). False:
    the parent has no blocks, no batch row is free, or a sequence that is earlier in the order waits for one."""
    if (parent.status is not engine.Status.RUNNING or len(scheduler.running) >= scheduler.max_num_seqs
            or scheduler.waiting and scheduler.waiting[0].order < child.order):
        return False
    if scheduler.block_manager.fork(parent, child, hit):
        scheduler.run(child)
    else:
        scheduler.add(child)
    return True


class Samples:
    """The samples of one prompt.

    scheduler_of: gives the scheduler of a sequence's pool
    """

    def __init__(self, seqs: list["SampleSequence"], scheduler_of: Callable[[engine.Sequence], Any]):
        self.unstarted, self.num_started, self.scheduler_of = deque(seqs[1:]), 1, scheduler_of
        for seq in seqs:
            seq.samples = self


def start(core: Any, params: Any, sequences: list[Any]) -> None:
    """Prepare the samples of a request."""
    Samples(sequences, core.scheduler_of)


class SampleSequence(engine.Sequence):
    """A sample of a prompt that has several."""
    samples: Samples

    def append(self, token: int) -> None:
        """The prompt is in the KV cache, so other samples may fork, before this one may end with its token."""
        if self.samples.unstarted:
            self._start_others()
        super().append(token)

    def _start_others(self) -> None:
        samples, scheduler = self.samples, self.samples.scheduler_of(self)
        blocks = self.block_table[:engine.cdiv(self.num_prompt_tokens, scheduler.block_manager.block_size)]
        hit = engine.PrefixHit(blocks, self.num_prompt_tokens, self.root, 0)
        # A negative entry: the block has left the sliding window. No entries: the sequence was preempted.
        while samples.unstarted and min(blocks, default=-1) >= 0 and fork(scheduler, self, samples.unstarted[0], hit):
            samples.unstarted.popleft()
            samples.num_started += 1

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """The last sample that has started queues the next one."""
        samples, was_finished = self.samples, self.status is engine.Status.FINISHED
        super().finish(reason, stop_reason)
        if self in samples.unstarted:
            samples.unstarted.remove(self)
        elif not was_finished:
            samples.num_started -= 1
            if samples.unstarted and not samples.num_started:
                samples.num_started += 1
                samples.scheduler_of(self).add(samples.unstarted.popleft())


SEQUENCE = SampleSequence
