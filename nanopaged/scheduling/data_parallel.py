"""A pool of KV blocks on each of several GPUs, in one process. An addition to chapter 3.

Each GPU has the weights, a pool, a BlockManager with that pool's books, a Scheduler and an Engine. All books are dicts
and lists in this process, and all sequences wait in one queue:

                            waiting, in the one order (priority, arrival)
                                     |  a sequence gets its GPU when it is admitted
                   +-----------------+-----------------+
    GPU 0          |                 |                 |          GPU 2
    running        A D               B E               C          num_tokens [1, 1]  [1, 210]  [1]
    its books      free, held, cached blocks of each pool         block ids 0 .. num_blocks - 1 in every pool
    its steps      ====|=====|====   =====|=====|===   ===|====   no GPU waits for another one's step

**Placement.** The first waiting sequence goes where the next step would have the fewest tokens to compute with it: the
new tokens of the sequences that run there, and those of its own tokens that this pool's prefix cache does not have.
Among equals it goes where most blocks are free. So a sequence follows its cached prefix, unless another GPU would
compute the prefix again in less time: 64 chats with one system prompt spread over all GPUs, and each GPU computes that
prompt once. A GPU without a batch row, enough free blocks or token budget for its next step is no candidate. A
preempted sequence may come back on another GPU. Samples of one prompt, and swapped sequences, stay where their blocks
are.

vLLM runs a process for each GPU and a balancer that knows the lengths of their queues.
"""
import time
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

from nanopaged import engine

POLL_SECONDS = 20e-6  # between two looks at the devices, while all of them are busy


class Placement(NamedTuple):
    """Why a sequence was admitted to a pool: the tokens that the next step of each candidate would have had with it."""
    seq: engine.Sequence
    pool: "PoolScheduler"
    num_tokens: dict["PoolScheduler", int]


class PoolScheduler(engine.Scheduler):
    """The Scheduler of one pool. It admits sequences to any pool, and schedules those that run in its own.

    pools: all PoolSchedulers of the engine; this one appends itself
    limits: max_num_seqs and max_num_batched_tokens
    """

    def __init__(self, block_manager: engine.BlockManager, runner: Any, pools: list["PoolScheduler"], *limits: int):
        super().__init__(block_manager, *limits)
        self.runner, self.pools, self.index = runner, pools, len(pools)
        self.waiting = pools[0].waiting if pools else self.waiting
        pools.append(self)
        self.turn = 0
        self.loads: dict[PoolScheduler, int] = {}  # tokens of each pool's next step, while this one is scheduling
        self.placements: list[Placement] = []  # of the last call of `schedule`

    def schedule(self) -> engine.SchedulerOutput:
        self.loads, self.placements = {}, []
        return super().schedule()

    def candidates(self, seq: engine.Sequence) -> list["PoolScheduler"]:
        """The pools that a waiting sequence may be admitted to."""
        home = seq.pool if seq.host_table else next((other.pool for other in seq.siblings), None)
        return self.pools if home is None else [pool for pool in self.pools if pool.block_manager is home]

    def next_waiting(self) -> engine.Sequence | None:
        """The first sequence that may be admitted to this pool. Its last token must be known on the host."""
        return next((seq for seq in self.waiting if not seq.num_pending_tokens and self in self.candidates(seq)), None)

    def _admit(self, seq: engine.Sequence, turn: int, step: engine.SchedulerOutput) -> bool:
        self.turn = turn
        return super()._admit(seq, turn, step)

    def _preempt(self, step: engine.SchedulerOutput) -> engine.Sequence:
        self.loads.pop(self, None)
        return super()._preempt(step)

    def _place(self, seq: engine.Sequence) -> bool:
        hits, num_tokens = {}, {}
        for pool in self.candidates(seq):
            if len(pool.running) == pool.max_num_seqs:
                continue
            if pool is not self and self._load(pool) >= pool.max_num_batched_tokens:
                continue
            hit = pool.block_manager.plan(seq)
            if hit is not None:
                num_cached = min(max(hit.num_tokens, seq.num_computed_tokens), seq.num_tokens - 1)
                hits[pool], num_tokens[pool] = hit, self._load(pool) + seq.num_tokens - num_cached
        if not hits:
            return False
        best = min(hits, key=lambda pool: (num_tokens[pool], -pool.block_manager.num_free_blocks))
        has_moved = seq.pool not in (None, best.block_manager)
        best.block_manager.start(seq, hits[best])
        self._remove(seq)
        best._run(seq)
        if has_moved:
            best.runner.forget_rows([seq])  # a row of its own from an earlier stay lacks the tokens sampled elsewhere
        self.loads[best] = num_tokens[best]
        self.placements.append(Placement(seq, best, num_tokens))
        return True

    def _load(self, pool: "PoolScheduler") -> int:
        """The tokens of a pool's next step: the one that is being scheduled if it is this pool's own."""
        if pool not in self.loads:
            planned = sum(self.block_manager.step.num_tokens) if pool is self else 0
            seqs = pool.running[self.turn:] if pool is self else pool.running
            self.loads[pool] = planned + sum(seq.num_new_tokens for seq in seqs)
        return self.loads[pool]


def make_schedulers(managers: list[engine.BlockManager], runners: list, *limits: int) -> list[PoolScheduler]:
    pools: list[PoolScheduler] = []
    for manager, runner in zip(managers, runners):
        PoolScheduler(manager, runner, pools, *limits)
    return pools


class Pools:
    """What users and LLM see of all pools' schedulers, as of one."""

    def __init__(self, pools: list[PoolScheduler]):
        self.pools, self.block_manager = pools, BlockManagers([pool.block_manager for pool in pools])

    @property
    def waiting(self) -> list[engine.Sequence]:
        return self.pools[0].waiting

    @property
    def running(self) -> list[engine.Sequence]:
        return sorted((seq for pool in self.pools for seq in pool.running), key=engine.by_order)

    @property
    def max_num_seqs(self) -> int:
        """Of each pool."""
        return self.pools[0].max_num_seqs

    @property
    def num_generated_tokens(self) -> int:
        return sum(pool.num_generated_tokens for pool in self.pools)

    def of(self, seq: engine.Sequence) -> PoolScheduler:
        """The scheduler of the pool that has the sequence's blocks."""
        return next((pool for pool in self.pools if pool.block_manager is seq.pool), self.pools[0])

    def add(self, seq: engine.Sequence) -> None:
        self.pools[0].add(seq)

    def finish(self, seq: engine.Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        self.of(seq).finish(seq, reason, stop_reason)

    def fork(self, parent: engine.Sequence, child: engine.Sequence) -> None:
        self.of(parent).fork(parent, child)

    def resume(self, seq: engine.Sequence) -> None:
        self.of(seq).resume(seq)


class BlockManagers:
    """The books of all pools, as of one."""

    def __init__(self, managers: list[engine.BlockManager]):
        self.managers, self.block_size = managers, managers[0].block_size

    def __getattr__(self, name: str) -> int:
        """Numbers of blocks and tokens are sums over the pools: num_blocks, num_free_blocks, num_cached_tokens .."""
        if not name.startswith(("num_", "most_")):
            raise AttributeError(f"several pools have no common {name}; look at .managers")
        return sum(getattr(manager, name) for manager in self.managers)

    def check_idle(self) -> None:
        for manager in self.managers:
            manager.check_idle()


class Engines:
    """The step loops of all pools, as one. A step launches work on every device that has room for it, then waits until
    one device is done."""

    def __init__(self, engines: list[engine.Engine], interruptible: Callable):
        self.engines, self.interruptible = engines, interruptible
        self.updates: deque = deque()
        for one in engines:
            one.updates = self.updates

    @property
    def lookahead(self) -> int:
        return self.engines[0].lookahead

    @lookahead.setter
    def lookahead(self, lookahead: int) -> None:
        for one in self.engines:
            one.lookahead = lookahead

    @property
    def launched(self) -> list:
        return list(chain.from_iterable(one.launched for one in self.engines))

    @property
    def is_idle(self) -> bool:
        return all(one.is_idle for one in self.engines)

    def step(self) -> None:
        for one in self.engines:
            if len(one.launched) <= one.lookahead:
                self._launch(one)
        busy = [one for one in self.engines if one.launched]
        if not busy:  # only paused sequences are running: they give up their blocks
            for one in self.engines:
                one.unblock(engine.SchedulerOutput())
            return
        with self.interruptible():
            while len(busy) > 1 and not any(map(is_done, busy)):
                time.sleep(POLL_SECONDS)
        for one in busy:
            if len(busy) == 1 or is_done(one):
                one.update()

    def _launch(self, one: engine.Engine) -> None:
        step = one.scheduler.schedule()
        if step.seqs:
            one.launch(step)
        else:
            one.scheduler.undo(step)


def is_done(one: engine.Engine) -> bool:
    """Whether its oldest launched step can be read without waiting."""
    result: Any = one.launched[0][1]
    return result.is_done()
