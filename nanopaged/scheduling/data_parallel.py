"""A pool of KV blocks on each of several GPUs, in one process. An addition to chapter 3.

Each GPU has the weights, a pool, a BlockManager with that pool's books, a Scheduler and an Engine. All books are dicts
and lists in this process, and all sequences wait in one queue:

                     queue                E F G ..             in the one order (priority, arrival)
                                            |  placed, when a step is scheduled that has room for it
                   +------------------------+------------------------+
    GPU            0                        1                        2
    running        A D                      B                        C
    its books      free, held and cached blocks; a block id 0 .. num_blocks - 1 means another block on each GPU
    its steps      =====|=====|=====|===    ==============|====      ===|===|===|===|===     none waits for another's

**Placement.** Before a step is scheduled, the sequences at the front of the queue are placed. Each goes where the next
step would have the fewest tokens to compute with it: the new tokens of the sequences that are there, and those of its
own that this pool's prefix cache will not have. Among equals it goes where most blocks are free. So a sequence follows
its cached prefix, unless another GPU computes the prefix again in a smaller step: 64 chats with one system prompt
spread over all GPUs, and each GPU computes that prompt once. A GPU is no candidate if its next step is full, if it
lacks a batch row or enough free blocks, or if an earlier sequence waits there for its blocks. If there is no candidate,
the sequence waits; one that is earlier in the order than sequences that run goes where the last of these is, which is
then preempted.

A sequence that its pool could not admit returns to the queue, and so does a preempted one: it may come back on another
GPU. Samples of one prompt, and swapped sequences, stay where their blocks are.

vLLM runs a process for each GPU, and a balancer that knows the lengths of their queues.
"""
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from heapq import merge
from itertools import takewhile
from typing import Any, NamedTuple

from nanopaged import engine
from nanopaged.scheduling.additions import BlockManager, Scheduler, SchedulerOutput, Sequence
from nanopaged.scheduling.samples import Samples

POLL_SECONDS = 20e-6  # between two looks at the devices, while all of them are busy
LAST = (math.inf,)  # behind every place in the order


class Offer(NamedTuple):
    """What a pool's next step would be with one more sequence."""
    num_tokens: int  # of the step
    num_needed: int  # free blocks that the sequence needs
    num_free: int  # free blocks that are promised to nobody yet
    hit: engine.PrefixHit


class Placement(NamedTuple):
    """A sequence has been placed in a pool. offers: of all candidates; none if it had no choice."""
    seq: Sequence
    pool: "PoolScheduler"
    offers: dict["PoolScheduler", Offer]


class PoolScheduler(Scheduler):
    """The Scheduler of one pool. In its `waiting` are only sequences that were placed here.

    pools: all PoolSchedulers of the engine; this one appends itself
    limits: max_num_seqs and max_num_batched_tokens
    """

    def __init__(self, block_manager: BlockManager, pools: list["PoolScheduler"], *limits: int):
        super().__init__(block_manager, *limits)
        self.pools, self.index = pools, len(pools)
        self.queue: list[Sequence] = pools[0].queue if pools else []  # sequences without a pool, of all
        pools.append(self)
        self.placements: list[Placement] = []  # of the last call of `schedule`
        self.return_unbound()  # no promises yet

    def schedule(self) -> SchedulerOutput:
        if not (self.running or self.waiting or self.queue):  # idle: look for work that was placed elsewhere
            for pool in self.pools:
                pool.return_unbound()
        self.placements = []
        if self.queue:
            self._place_all()
        try:
            return super().schedule()
        finally:
            self.return_unbound()

    def return_unbound(self) -> None:
        """Give the waiting sequences that another pool could serve as well back to the queue. Those stay whose blocks
        are on this pool's host, and samples of a prompt of which one runs here."""
        # What the sequences placed here will compute, take and cache. Once a step was scheduled, the books know it.
        self.promised_tokens, self.promised_blocks, self.promised_keys = 0, 0, set[int]()
        here = {samples for samples in {seq.samples for seq in self.waiting} if self.runs_here(samples)}
        for seq in list(self.waiting):
            if not (seq.host_table or seq.samples in here):
                engine.discard(self.waiting, seq)
                insort(self.queue, seq, key=engine.by_order)

    def runs_here(self, samples: Samples | None, but: Sequence | None = None) -> bool:
        """Whether a sample of this prompt, other than `but`, runs in this pool."""
        return samples is not None and any(seq is not but for seq in samples.running(self.block_manager))

    def _remove(self, seq: Any) -> None:
        super()._remove(seq)
        for queue in (self.queue, *(pool.waiting for pool in self.pools)):
            engine.discard(queue, seq)

    # ---- placement

    def _place_all(self) -> None:
        """Place sequences from the front of the queue, as long as they have candidates."""
        loads = {pool: pool.promised_tokens + sum(1 if seq.drafts else seq.num_new_tokens for seq in pool.running)
                 for pool in self.pools}
        # The first sequence that waits in a pool, if too few blocks are free for it: none overtakes it there.
        blocked = {pool: seq.order for pool in self.pools for seq in pool.waiting[:1]
                   if pool.block_manager.plan(seq) is None}
        for seq in list(self.queue):
            homes = [pool for pool in self.pools if pool.runs_here(seq.samples)]
            if self.placements and self.placements[-1].seq.samples is seq.samples is not None:
                homes = [self.placements[-1].pool]
            offers = {pool: offer for pool in homes or self.pools
                      if seq.order < blocked.get(pool, LAST) and (offer := pool.offer(seq, loads[pool]))}
            if offers:
                best = min(offers, key=lambda pool: (offers[pool].num_tokens, -offers[pool].num_free))
                best.promised_tokens += offers[best].num_tokens - loads[best]
                best.promised_blocks += offers[best].num_needed
                best.promised_keys.update(best.keys(seq, offers[best].hit))
                loads[best] = offers[best].num_tokens
            elif homes:
                best = homes[0]
            else:
                break
            self._place(best, offers)
        # One that has no candidate goes where the last of all running sequences is, if that is later in the order: its
        # pool preempts that one.
        last = max((pool for pool in self.pools if pool.running), key=lambda pool: pool.running[-1].order, default=None)
        if last and self.queue and self.queue[0].order < last.running[-1].order:
            self._place(last, {})

    def _place(self, pool: "PoolScheduler", offers: dict["PoolScheduler", Offer]) -> None:
        """Place the first sequence of the queue in this pool."""
        seq = self.queue.pop(0)
        self.placements.append(Placement(seq, pool, offers))
        pool.add(seq)

    def offer(self, seq: Sequence, load: int) -> Offer | None:
        """load: the tokens of the next step without the sequence. None: there is no room for it."""
        manager = self.block_manager
        if load >= self.max_num_batched_tokens or len(self.running) + len(self.waiting) >= self.max_num_seqs:
            return None
        if (hit := manager.plan(seq)) is None:
            return None
        num_shared = len(list(takewhile(self.promised_keys.__contains__, self.keys(seq, hit))))
        num_needed = manager.num_blocks_needed(seq, hit) - num_shared
        num_free = manager.num_free_blocks - self.promised_blocks
        num_cached = min(hit.num_tokens + num_shared * manager.block_size, seq.num_tokens - 1)
        return Offer(load + seq.num_tokens - num_cached, num_needed, num_free, hit) if num_needed <= num_free else None

    def keys(self, seq: Sequence, hit: engine.PrefixHit) -> Iterator[int]:
        """A number for each block after the hit that the sequence will cache. Two texts with one number would only make
        an estimate wrong."""
        size, key = self.block_manager.block_size, hash(hit.prefix_key)
        is_cached = hit.num_cached_blocks == len(hit.blocks)  # else a sample's
        if self.block_manager.enable_prefix_caching and seq.reads_prefix_cache and is_cached:
            for start in range(hit.num_tokens, len(seq.token_ids) - size + 1, size):
                key = hash((key, *seq.token_ids[start:start + size]))
                yield key


def make_schedulers(managers: list[BlockManager], *limits: int) -> list[PoolScheduler]:
    pools: list[PoolScheduler] = []
    for manager in managers:
        PoolScheduler(manager, pools, *limits)
    return pools


class Whole:
    """The parts as one: each number, such as num_free_blocks, is the sum of theirs."""

    def __init__(self, parts: list):
        self.parts = parts

    def __getattr__(self, name: str) -> int:
        return sum(getattr(part, name) for part in self.parts)


class BlockManagers(Whole):
    """The books of all pools."""

    def __init__(self, parts: list[BlockManager]):
        super().__init__(parts)
        self.block_size = parts[0].block_size

    def check_idle(self) -> None:
        for manager in self.parts:
            manager.check_idle()


class Pools(Whole):
    """The schedulers of all pools, and their step loops. A step launches work on every device that has room for it.
    Once none has room for more, a step also waits until one device is done."""

    def __init__(self, engines: list[Any], interruptible: Callable = nullcontext):
        super().__init__([one.scheduler for one in engines])
        self.engines, self.interruptible = engines, interruptible
        self.queue, self.max_num_seqs = self.parts[0].queue, self.parts[0].max_num_seqs  # max_num_seqs: of each pool
        self.block_manager = BlockManagers([pool.block_manager for pool in self.parts])
        self.updates: deque = deque()
        for one in engines:
            one.updates = self.updates

    @property
    def waiting(self) -> list[Sequence]:
        return list(merge(self.queue, *(pool.waiting for pool in self.parts), key=engine.by_order))

    @property
    def running(self) -> list[Sequence]:
        return list(merge(*(pool.running for pool in self.parts), key=engine.by_order))

    def add(self, seq: Sequence) -> None:
        insort(self.queue, seq, key=engine.by_order)

    def of(self, seq: Sequence) -> PoolScheduler:
        """The scheduler of the pool that has the sequence's blocks."""
        return next((pool for pool in self.parts if pool.block_manager is seq.pool), self.parts[0])

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        self.of(seq).finish(seq, reason, stop_reason)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self.of(parent).fork(parent, child)

    resume: Any = Scheduler.resume

    @property
    def is_idle(self) -> bool:
        return not self.queue and all(one.is_idle for one in self.engines)

    def step(self) -> None:
        if any([one.launch_next() and one.has_room for one in self.engines if one.has_room]):
            return  # to plan the next before any is read: lookahead has room for it, or one ran out of memory
        done = busy = [one for one in self.engines if one.launched]
        if not busy:  # only paused sequences are running: they give up their blocks
            for one in self.engines:
                one.unblock()
        while len(busy) > 1 and not (done := [one for one in busy if one.launched[0][1].is_done()]):
            with self.interruptible():
                time.sleep(POLL_SECONDS)
        for one in done:
            one.update()
