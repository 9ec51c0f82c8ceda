"""A router over whole engines of chapter 3: one for each GPU, all in one process (data_parallel_size).

    queue        F G ..         in the order of chapter 3: priority, then arrival
                   |            placed at once, if a GPU has a batch row and blocks for it
                   +------------------------+------------------------+
    GPU            0                        1                        2
    waiting        H                        E                                  H waits for token budget, E for blocks
    running        A D                      B                        C
    its steps      =====|=====|=====|===    ==============|====      ===|===|===|===|===     none waits for another's

**Placement.** A sequence goes where the fewest tokens are left to compute with it: those of the sequences that are
there, and its own without the prefix that this GPU's cache has. Each sequence there counts as PER_TEXT tokens more,
because it will decode meanwhile. Among equals the sequence goes where most blocks are free. So it follows its cached
prefix, unless another GPU computes the prefix again sooner: 64 chats with one system prompt spread over all GPUs, and
each GPU computes that prompt once.

A GPU has room if a batch row and enough blocks are free, after those of all sequences that wait there. A sequence waits
in the queue while no GPU has room, and so do all behind it; then the first GPU that has room takes it. But token budget
is no reason to wait in the queue: how many tokens are left is known, and the GPU with the prefix would be missed. On an
hour of a chat service, at twice its rate, 8 GPUs found 19% of all prompt tokens in their caches this way, and 16% when
sequences also waited for budget. (Output lengths are not known, so rows and blocks do free up in another order.)

If a sequence in the queue is more urgent than some that run, it goes where the last of these runs, which is then
preempted. A placed sequence stays on its GPU, also when it is preempted, and its samples or beams fork there.
"""
import time
from collections import deque
from collections.abc import Callable
from heapq import merge
from typing import Any

from nanopaged import engine

PER_TEXT = 256  # tokens; 0 and 1,024 gave slower texts and fewer hits on that hour
NOTHING = engine.PrefixHit([], 0, engine.ROOT, 0)  # found in the prefix cache
POLL_SECONDS = 20e-6  # between two looks at the GPUs, while all of them are busy


class Pools:
    """The BlockManagers of all engines as one."""

    def __init__(self, managers: list[engine.BlockManager]) -> None:
        self.managers, self.block_size = managers, managers[0].block_size
        self.num_blocks = sum(one.num_blocks for one in managers)

    @property
    def num_free_blocks(self) -> int:
        return sum(one.num_free_blocks for one in self.managers)

    def check_idle(self) -> None:
        for one in self.managers:
            one.check_idle()


class Router:
    """All engines as one, and their Schedulers as one. recover(engine, error) raises the error of a step, unless a
    smaller one may succeed. interruptible() is a context for waiting, in which Ctrl-C does no harm."""

    def __init__(self, engines: list[Any], recover: Callable, interruptible: Callable) -> None:
        self.engines, self.recover, self.interruptible = engines, recover, interruptible
        self.schedulers = schedulers = [one.scheduler for one in engines]
        self.block_manager = Pools([one.block_manager for one in self.schedulers])
        self.max_num_seqs = self.schedulers[0].max_num_seqs  # of each engine
        self.queue = queue = engine.Scheduler(engine.BlockManager(0, 1), 0, 0)  # where sequences wait, and none runs
        # The scheduler that has a sequence, or the queue. No method: samples keep it, and must not keep the engines.
        self.of: Callable = lambda seq: next((one for one in schedulers if seq in one.running + one.waiting), queue)
        self.head: Any = None  # the sequence that was looked up last
        self.hits: dict[engine.Scheduler, engine.PrefixHit] = {}  # what was found of it on each GPU
        self.add, self.updates = queue.add, deque[tuple]()
        for one in engines:
            one.updates = self.updates

    @property
    def waiting(self) -> list[engine.Sequence]:
        return list(merge(*(one.waiting for one in [self.queue, *self.schedulers]), key=engine.by_order))

    @property
    def running(self) -> list[engine.Sequence]:
        return list(merge(*(one.running for one in self.schedulers), key=engine.by_order))

    @property
    def is_idle(self) -> bool:
        return not self.queue.waiting and all(one.is_idle for one in self.engines)

    def finish(self, seq: engine.Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        self.of(seq).finish(seq, reason, stop_reason)

    def step(self) -> bool:
        """Launch a step on every GPU that has room for it. If none of these has room for one more, wait until a GPU is
        done. False: nothing was launched or read."""
        self._place()
        has_work = [one for one in self.engines if one.scheduler.running or one.scheduler.waiting]
        launched = [one for one in has_work if not one.must_read and self._try(one, one.launch)]
        for step, _ in [one.launched[-1] for one in launched if one.launched]:
            step.num_held_blocks = self.block_manager.num_blocks - self.block_manager.num_free_blocks
        if not all(one.must_read for one in launched):
            return True
        busy = done = [one for one in self.engines if one.launched]
        while len(busy) > 1 and not (done := [one for one in busy if self._try(one, one.launched[0][1].is_done)]):
            self.wait()
        for one in done:
            if one.launched:  # else `is_done` failed, and the engine has recovered
                self._try(one, one.update)
        return bool(busy)

    def wait(self) -> None:
        """Let time pass, while all GPUs are busy."""
        with self.interruptible():
            time.sleep(POLL_SECONDS)

    def _try(self, one: Any, act: Callable[[], Any]) -> Any:
        """The result, or True if this failed and a smaller step of the engine may succeed."""
        try:
            return act()
        except BaseException as error:
            self.recover(one, error)
            return True

    def _place(self) -> None:
        """Place sequences from the front of the queue, as long as there is a GPU for the first one."""
        if not self.queue.waiting:
            return
        loads = {one: sum(seq.num_tokens - seq.num_computed_tokens + PER_TEXT for seq in one.running + one.waiting)
                 for one in self.schedulers}
        num_free = {one: one.block_manager.num_free_blocks - sum(
            one.block_manager.num_blocks_needed(seq, NOTHING) for seq in one.waiting) for one in self.schedulers}
        while self.queue.waiting:
            seq = self.queue.waiting[0]
            hits = self._look_up(seq)
            needed = {one: one.block_manager.num_blocks_needed(seq, hit) for one, hit in hits.items()}
            costs = {one: (loads[one] + seq.num_tokens - hit.num_tokens, -num_free[one]) for one, hit in hits.items()
                     if needed[one] <= num_free[one] and len(one.running) + len(one.waiting) < one.max_num_seqs}
            best = min(costs, key=costs.__getitem__) if costs else max(self.schedulers, key=yields_to)
            if not costs and seq.order > yields_to(best):  # there the last running sequence is the least urgent
                break
            loads[best] += seq.num_tokens - hits[best].num_tokens + PER_TEXT
            num_free[best] -= needed[best]
            best.add(self.queue.waiting.pop(0))

    def _look_up(self, seq: engine.Sequence) -> dict[engine.Scheduler, engine.PrefixHit]:
        """What each GPU has of the first one in the queue. That it waits is no reason to look it up again: a prompt of
        100,000 tokens has thousands of blocks, which would be looked up on every GPU and before every step."""
        if seq is not self.head:
            self.head, self.hits = seq, {one: one.block_manager.find_prefix(seq) for one in self.schedulers}
        return self.hits


def yields_to(one: engine.Scheduler) -> tuple:
    """A sequence placed here runs at once, at the cost of the last running one, if its order is smaller than this: none
    that waits here comes before it then. With no sequence here this is (), which is smaller than every order."""
    return min((seq.order for seq in one.waiting[:1] + one.running[-1:]), default=())
