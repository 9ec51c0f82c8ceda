"""What a run did, as data: a frame for each step, for its results, and for what happens between two steps.

`Traced` is put over the class of each scheduler, and tells `Frames` what the scheduler does. `Frames` makes a frame of
each SchedulerOutput, and of the block tables before and after it, for a function that shows frames: trace.py prints
them, page.py plays them. The engine computes the same with it and without it.

Sequences are named A, B, C in the order of arrival. Samples of one prompt, and beams, are named A0, A1, A2.
"""
import itertools
import operator
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nanopaged import engine

VERSION = 3  # of the frames in a file
NULL = -1  # in a block table: a block that left the sliding window (swapping.py)
events = partial(field, default_factory=list)  # of one kind


@dataclass
class Frame:
    """What happened. A file leaves out fields that are empty. Sequences stand here with their names, blocks with their
    ids, in lists, and tokens with theirs, in tuples."""
    kind: str  # "step", "tokens": a step was read, "ended": by a stop string or an abort, "undone": a step failed
    pool: int  # number of the GPU
    step: int | None = None  # its number; None: the frame belongs to no launched step
    late: bool = False  # of "tokens": other steps were launched before they were read
    budget: int = 0  # of tokens that the step may compute
    arrived: list = events()  # [names, priority, number of prompt tokens, prompt, most tokens that a text may have]
    # [name, kind, start, end, position that it samples or 0, drafts, prompt tokens] of each that runs; kind: "prompt",
    # "decode", "again" (for its logits, nothing is written), "recompute", "forced" (by a grammar), or why it waits
    work: list = events()
    waits: list = events()  # [name, why]
    # [name, tokens, shared blocks, with those that held them at that moment, blocks that were free]
    found: list = events()
    forked: list = events()  # of samples and beams, after the last step: [name, tokens, ..] like found
    swapped_in: list = events()  # [name, host blocks, blocks]
    slid_out: list = events()  # [name, blocks]
    taken: list = events()  # [name, blocks]
    evicted: list = events()  # blocks: the prefix cache has lost what was in them
    copied: list = events()  # [block, copy, holders of the copy, holders of the block]
    registered: list = events()  # blocks: the prefix cache has what is in them
    preempted: list = events()  # [name, blocks, host blocks that they go to]
    beams: list = events()  # [name, last token, all generated tokens] of beams that compute this token
    drafted: list = events()  # [name, drafts]
    # [name, tokens, how many its grammar allowed, tokens that it forced, right drafts, drafts]
    sampled: list = events()
    ended: list = events()  # [name, finish reason or None (a beam), stop reason, freed blocks, blocks that others hold]
    undone: list = events()  # names
    # New: name -> [pool, block table, host blocks, block tables of other groups of layers (kinds) ..], -1 in a table:
    # out of the window; None: it has none any more
    tables: dict = field(default_factory=dict)
    slots: dict = field(default_factory=dict)  # of recurrent states that are kept: slot -> its text, "" for a snapshot


class Traced(engine.Scheduler):
    """A Scheduler that tells its frames what it does."""
    frames: "Frames"
    pool: int

    def schedule(self) -> engine.SchedulerOutput:
        self.frames.begin(self)
        step = super().schedule()
        self.frames.tell_step(self, step)
        return step

    def run(self, seq: engine.Sequence) -> None:
        self.frames.admit(self, seq)
        super().run(seq)

    def release(self, seq: engine.Sequence) -> None:
        blocks = [block for table in _tables(seq) for block in _real(reversed(table))]
        counts = self.block_manager.ref_counts
        super().release(seq)
        held = [block for block in blocks if counts[block]]
        self.frames.released.append((seq, [block for block in blocks if not counts[block]], held))

    def update(self, step: engine.SchedulerOutput, sampled: engine.Sampled) -> list:
        alive = [seq for seq in step.sampled if seq.status is not engine.Status.FINISHED]
        grammars = {seq: vars(seq).get("grammar") for seq in alive}
        before = {seq: (len(seq.token_ids), _drafts(seq), grammars[seq] and grammars[seq].num_allowed())
                  for seq in alive}
        appended = super().update(step, sampled)
        self.frames.tell_tokens(self.pool, step, before)
        return appended

    def finish(self, seq: engine.Sequence, *reasons: Any) -> None:
        super().finish(seq, *reasons)
        if ended := self.frames.take_ended():
            self.frames.tell(Frame("ended", self.pool, ended=ended))

    def undo(self, step: engine.SchedulerOutput) -> None:
        super().undo(step)
        self.frames.tell_undone(self.pool, step)


class Frames:
    """Calls show(frame) at every change of an LLM's engine until close()."""

    def __init__(self, llm: Any, show: Callable[[Frame], object]):
        self.llm, self.show, self.counter = llm, show, itertools.count()
        self.schedulers = [one.scheduler for one in llm.engines]
        if isinstance(self.schedulers[0], Traced):
            raise ValueError("the LLM has a trace; close that one first")
        self.hosts = ChainMap(*(vars(one.block_manager).get("host_tables", {}) for one in self.schedulers))
        self.queue = llm.scheduler.queue.waiting if len(self.schedulers) > 1 else []  # for any of the GPUs
        self.letters: dict[int, str] = {}  # arrival -> the request's name
        self.arrived: list[list] = []  # requests that are not told yet
        self.numbers: dict[engine.SchedulerOutput, int] = {}  # of the launched steps that are not read
        self.most_computed = Counter[str]()  # name -> the most tokens computed for it
        self.next = [Frame("step", pool) for pool in range(len(self.schedulers))]  # of each pool's next step
        self.before: dict[engine.Sequence, list[list[int]]] = {}  # its tables before the step, or when it was admitted
        self.released: list[tuple] = []  # (sequence, freed blocks, blocks that others hold)
        self.tables: dict[str, list] = {}  # all of them, as in Frame
        self.cached: list[set[int]] = [set() for _ in self.schedulers]  # blocks of each pool
        self.kinds = {scheduler: type(scheduler) for scheduler in self.schedulers}
        for pool, (scheduler, kind) in enumerate(self.kinds.items()):
            scheduler.__class__ = type("Traced", (Traced, kind), dict(frames=self, pool=pool))

    def close(self) -> None:
        while self.kinds:
            scheduler, scheduler.__class__ = self.kinds.popitem()

    def header(self) -> dict[str, Any]:
        """What stays the same over the run."""
        manager = self.schedulers[0].block_manager
        return dict(version=VERSION, pools=len(self.schedulers), blocks=manager.num_blocks,
                    block_size=manager.block_size, host_blocks=vars(manager).get("num_host_blocks", 0),
                    window=vars(manager).get("window", 0),
                    groups=[0, *(kind.window for kind in vars(manager).get("kinds", {}).values()
                                 if hasattr(kind, "window"))],
                    slots=states.num_blocks if (states := states_of(manager)) else 0)

    def tell(self, frame: Frame) -> None:
        """Show the frame, with what has changed since the last one."""
        frame.arrived, self.arrived = self.arrived, []
        before, self.tables = self.tables, {}
        for pool, scheduler in enumerate(self.schedulers):
            for seq in scheduler.running + scheduler.waiting:
                if seq.block_table or seq in self.hosts:
                    table, *more = map(list, _tables(seq))
                    self.tables[self._name(seq)] = [pool, table, list(self.hosts.get(seq, ())), *more]
        frame.tables = {name: self.tables.get(name) for name in before | self.tables
                        if before.get(name) != self.tables.get(name)}
        if states := states_of(self.schedulers[frame.pool].block_manager):
            frame.slots = dict.fromkeys(states.key_of_block, "") | {
                seq.parts["states"].live: self._name(seq) for seq in self.schedulers[frame.pool].running}
        known, now = self.cached[frame.pool], set(self.schedulers[frame.pool].block_manager.key_of_block)
        frame.evicted, self.cached[frame.pool] = sorted(known - now | known & {*frame.registered}), now
        self.show(frame)

    # ---- a step

    def begin(self, scheduler: Traced) -> None:
        """Name new requests, with all their samples, also those that fork later."""
        for seq in sorted(self.llm.scheduler.running + self.llm.scheduler.waiting, key=lambda seq: seq.order.arrival):
            if seq.order.arrival not in self.letters:
                self.letters[seq.order.arrival] = letters(len(self.letters))
                names = list(map(self._name, self.llm.requests[seq.request_id].sequences))
                self.arrived.append([names, seq.order.priority, seq.num_prompt_tokens, (*seq.token_ids,), seq.max_len])
        self.before = {seq: [*map(list, _tables(seq))] for seq in scheduler.running}
        frame = self.next[scheduler.pool]
        frame.forked, frame.found = frame.found, []
        frame.preempted += [[self._name(seq), held + free, []] for seq, free, held in self.released]  # they gave way
        self.released.clear()

    def admit(self, scheduler: Traced, seq: engine.Sequence) -> None:
        """A sequence begins to run with the blocks that it can share: in a step, or as a fork between two steps."""
        manager, blocks = scheduler.block_manager, _real(itertools.chain(*_tables(seq)))
        self.before[seq] = [*map(list, _tables(seq))]
        shared = [block for block in blocks if manager.ref_counts[block] > 1]
        free = [block for block in blocks if block not in shared and block in manager.key_of_block]  # not swapped in
        if shared or free:
            others = [self._name(other) for other in scheduler.running
                      if not {*shared}.isdisjoint(itertools.chain(*_tables(other)))]
            num_tokens = min(seq.num_found_tokens, len(shared + free) * manager.block_size)
            self.next[scheduler.pool].found.append([self._name(seq), num_tokens, shared, others, free])

    def tell_step(self, scheduler: Traced, step: engine.SchedulerOutput) -> None:
        if not step.seqs:  # nothing can be computed
            return
        frame, self.next[scheduler.pool] = self.next[scheduler.pool], Frame("step", scheduler.pool)
        frame.step = self.numbers[step] = next(self.counter)
        frame.budget, frame.registered = scheduler.max_num_batched_tokens, step.cached
        num_tokens, holders = dict(zip(step.seqs, step.num_tokens)), dict[int, list[str]]()
        for seq in scheduler.running:
            name, tables, before = self._name(seq), _tables(seq), self.before[seq]
            frame.work.append(self._work(seq, num_tokens.get(seq, 0), step))
            if moved := [move for move in vars(step).get("swaps_in", ()) if move[1] in seq.block_table]:
                frame.swapped_in.append([name, *map(list, zip(*moved))])
            if gone := [block for old, table in zip(before, tables) for block, now in zip(old, table)
                        if now == NULL != block]:
                frame.slid_out.append([name, gone])
            if new := [block for old, table in zip(before, tables) for block in table[len(old):]]:
                frame.taken.append([name, new])
            if drafts := _drafts(seq):
                frame.drafted.append([name, drafts])
            if _is_beam(seq) and seq in step.sampled and (generated := (*seq.token_ids[seq.num_prompt_tokens:],)):
                frame.beams.append([name, generated[-1:], generated])
            for block in itertools.chain(*tables):
                holders.setdefault(block, []).append(name)
        for seq in sorted(scheduler.waiting + self.queue, key=engine.by_order):
            why = "waits behind it" if frame.waits else self._why_not(seq, scheduler, step)
            frame.waits.append([self._name(seq), why])
        for seq in step.preempted:
            there = _real(self.hosts.get(seq, ()))
            moved = [block for block, host in vars(step).get("swaps_out", ()) if host in there]
            frame.preempted.append([self._name(seq), moved or _real(itertools.chain(*self.before[seq])), there])
        frame.copied = [[block, copy, holders.get(copy, []), holders.get(block, [])] for block, copy in step.copies]
        self.tell(frame)

    def _work(self, seq: engine.Sequence, num_tokens: int, step: engine.SchedulerOutput) -> list:
        """The tokens that a running sequence computes in this step, as in Frame."""
        name, num_prompt_tokens, num_drafts = self._name(seq), seq.num_prompt_tokens, len(_drafts(seq))
        end, most = seq.num_computed_tokens, self.most_computed[name]
        start, self.most_computed[name] = end - num_tokens, max(most, end - num_drafts)
        if not num_tokens:
            kind = "waits for its token" if seq.num_new_tokens <= 0 else "waits: the token budget is spent"
        elif start < seq.num_found_tokens:  # the token's K and V are in the cache and are not written again
            kind = "again"
        elif num_drafts or num_tokens == 1 and start >= num_prompt_tokens:
            kind = "decode"
        elif start >= max(num_prompt_tokens, most):
            kind = "forced"
        else:
            kind = "recompute" if end > num_prompt_tokens or start < most else "prompt"
        return [name, kind, start, end, end if seq in step.sampled else 0, num_drafts, num_prompt_tokens]

    def _why_not(self, seq: engine.Sequence, scheduler: Traced, step: engine.SchedulerOutput) -> str:
        """A reason why the first waiting sequence was not admitted. The others stay behind this sequence."""
        manager = scheduler.block_manager
        if seq in step.preempted:
            why = "it was preempted in this step"
        elif len(scheduler.running) >= scheduler.max_num_seqs:
            why = f"no batch row is free, max_num_seqs is {scheduler.max_num_seqs}"
        elif (num_needed := manager.num_blocks_needed(seq, manager.find_prefix(seq)) + manager.watermark * bool(
                scheduler.running)) > manager.num_free_blocks:
            why = f"free blocks needed {num_needed}, there are {manager.num_free_blocks}"
        else:
            why = "too few blocks were free when its turn came" if step.budget else "the token budget is spent"
        return "waits" + " on the host" * (seq in self.hosts) + f": {why}"

    # ---- the results of a step, and what happens between two steps

    def tell_tokens(self, pool: int, step: engine.SchedulerOutput, before: dict[engine.Sequence, tuple]) -> None:
        """before: of those that had not ended (number of tokens, drafts, number of tokens that a grammar allowed)"""
        frame = Frame("tokens", pool, self.numbers.pop(step, None), bool(self.numbers), ended=self.take_ended())
        for seq, (start, drafts, num_allowed) in before.items():
            new = (*seq.token_ids[start:],)
            end = len(new) if num_allowed is None else 1
            right = sum(itertools.takewhile(bool, map(operator.eq, drafts, new)))
            if not _is_beam(seq):  # a beam gets its token when the search goes on
                frame.sampled.append([self._name(seq), new[:end], new and num_allowed, new[end:], right, len(drafts)])
        self.tell(frame)

    def tell_undone(self, pool: int, step: engine.SchedulerOutput) -> None:
        self.released.clear()
        if names := list(map(self._name, step.seqs + step.preempted)):
            self.next[pool].found.clear()
            self.tell(Frame("undone", pool, self.numbers.pop(step, None), undone=names))

    def take_ended(self) -> list[list]:
        released, self.released = self.released, []
        return [[self._name(seq), None if _is_beam(seq) else seq.finish_reason, seq.stop_reason, free, held]
                for seq, free, held in released if seq.order.arrival in self.letters]

    def _name(self, seq: engine.Sequence) -> str:
        several = seq.sampling.params.n > 1 or _is_beam(seq)
        return self.letters.get(seq.order.arrival, "?") + f"{seq.order.number}" * several


def letters(number: int) -> str:
    """A .. Z, AA, AB .."""
    return (letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _tables(seq: engine.Sequence) -> list[list[int]]:
    """Its block table, and those of other groups of layers (kinds)."""
    return [seq.block_table, *(part.block_table for part in vars(seq).get("parts", {}).values()
                               if not hasattr(part, "live"))]


def states_of(manager: Any) -> Any:
    """The slots of recurrent states (features/kinds/states.py), or None."""
    return vars(manager).get("kinds", {}).get("states")


def _real(table: Iterable[int]) -> list[int]:
    return [block for block in table if block != NULL]


# ---- What beams and drafts add to a sequence

def _is_beam(seq: engine.Sequence) -> bool:
    return seq.request_id.startswith("beam")


def _drafts(seq: engine.Sequence) -> tuple[int, ...]:
    return (*vars(seq).get("drafts", ()),)
