"""What a run did, as data: a frame for each change of the engine, which is the difference of two of its states.

`Traced` is put on the class of each scheduler, and tells `Frames` of each change. `Frames` takes a picture of the
sequences, compares it with the picture before, and gives a Frame to whoever shows it: trace.py prints frames, page.py
plays them. The engine computes the same with it and without it.

Sequences are named A, B, C in the order of arrival. Samples of one prompt, and beams, are named A0, A1, A2.
"""
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from nanopaged import engine, kernel, tiles
from nanopaged.features.beam import BeamSearch, BeamSequence
from nanopaged.tiles import widest_window

VERSION = 2  # of the frames in a file
NULL = -1  # in a block table: a block that left the sliding window (swapping.py)
Words = str | list[int]  # a text; token ids if the LLM has no tokenizer
MOST_WORDS = 100  # tokens of a text that a frame repeats
events = partial(field, default_factory=list)  # of one kind


@dataclass
class Frame:
    """A change, and its events. A file leaves out fields that are empty. Words that stand for blocks are block ids, and
    words that stand for sequences are their names."""
    kind: str  # "step", "idle": a step that computes nothing, "tokens", "ended", "beams", "undone"
    pool: int  # number of the GPU
    step: int | None  # its number; of "tokens": of the step that sampled them; of others: of the last one
    late: bool = False  # of "tokens": other steps were scheduled before they were read
    num_tokens: int = 0  # that the step computes
    budget: int = 0  # of tokens that it may compute
    arrived: list = events()  # [names, priority, number of prompt tokens, Words]
    # [name, kind, start, end, whether it samples, drafts] of each that runs; kind: "prompt", "decode", "again" (for its
    # logits, nothing is written), "recompute", "forced", or why it waits (end 0)
    work: list = events()
    waits: list = events()  # [name, why]
    placed: list = events()  # [name, pool]
    # [name, tokens, shared blocks, with those that held them at that moment, blocks that were free]
    found: list = events()
    swapped_in: list = events()  # [name, host blocks, blocks]
    slid_out: list = events()  # [name, block]
    taken: list = events()  # [name, blocks]
    evicted: list = events()  # block
    copied: list = events()  # [block, copy, holders of the copy, holders of the block]
    registered: list = events()  # block
    preempted: list = events()  # [name, blocks, host blocks that they go to]
    # [name, Words, the position where they stood before or None, the text of each draft as in `texts`]
    drafted: list = events()
    attention: list = events()  # [name, tokens, splits, tokens of a split, side by side]: if changed
    together: list | None = None  # if changed: [names, start, end], tokens that these read once
    # [name, Words or None, what else is known: {best_of, allowed, forced, drafts, right, dropped}]
    sampled: list = events()
    # [name, "finished", "retired" or "beam ends", finish reason, stop reason, freed blocks, those of them that are not
    # cached, blocks that others hold]
    ended: list = events()
    beams: list = events()  # [name, Words, parent or None, shared blocks]
    undone: list = events()  # name
    # The difference of the states
    # name -> [pool, block table, host blocks], -1 in a table: out of the window; None: it has none any more
    tables: dict = field(default_factory=dict)
    lens: dict = field(default_factory=dict)  # name -> tokens whose K and V are in its blocks; None: as above
    # name -> [tokens told before, the texts of those after, or the bytes of a token that ends within a character]
    texts: dict = field(default_factory=dict)
    cached: list = events()  # [pool, block, whether the prefix cache has it now]
    seqs: dict = field(default_factory=dict)  # new name -> [request, sample, prompt tokens, most tokens it may have]


class Traced(engine.Scheduler):
    """A Scheduler that calls each of its watchers after a change: watch(change, what the method of this name has
    changed, what was sampled). "begin": a step is going to be scheduled; "release": a beam gave up its blocks."""
    watchers: list[Callable[..., object]]
    is_changing = False

    @classmethod
    def watch(cls, scheduler: Any, watch: Callable[..., object]) -> None:
        """Put this class on that of the scheduler."""
        if not isinstance(scheduler, Traced):
            scheduler.__class__, scheduler.watchers = type("Traced", (Traced, type(scheduler)), {}), []
        scheduler.watchers.append(watch)

    def unwatch(self, watch: Callable[..., object]) -> None:
        """Take the class back with the last watcher."""
        self.watchers.remove(watch)
        if not self.watchers:
            del self.watchers
            self.__class__ = type(self).__bases__[1]

    def tell(self, *change: Any) -> None:
        for watch in self.watchers:
            watch(*change)

    def schedule(self) -> engine.SchedulerOutput:
        self.tell("begin")
        step = super().schedule()
        self.tell("schedule", step)
        return step

    def update(self, step: engine.SchedulerOutput, sampled: engine.Sampled) -> list:
        appended = super().update(step, sampled)
        self.tell("update", step, sampled)
        return appended

    def finish(self, seq: engine.Sequence, *reasons: Any) -> None:
        self.is_changing = True
        try:
            super().finish(seq, *reasons)
        finally:
            self.is_changing = False
        self.tell("finish", seq)

    def undo(self, step: engine.SchedulerOutput) -> None:
        self.is_changing = True
        try:
            super().undo(step)
        finally:
            self.is_changing = False
        self.tell("undo", step)

    def release(self, seq: engine.Sequence) -> None:
        super().release(seq)
        if not self.is_changing and seq.status is engine.Status.RUNNING:
            self.tell("release", seq)


class Seen(NamedTuple):
    """A sequence in a picture, running or waiting."""
    pool: int | None = None  # None: it waits for a GPU
    table: list[int] = []  # its block table
    host_table: list[int] = []
    num_known: int = 0  # tokens
    drafts: list[int] = []  # that are not decided yet
    num_allowed: int | None = None  # tokens that may come next, if it runs and has a grammar


class Picture(dict[engine.Sequence, Seen]):
    """The sequences that run and wait between two changes; another one has nothing."""

    def __missing__(self, seq: engine.Sequence) -> Seen:
        return Seen()


class Frames:
    """Calls show(frame) at every change of an LLM's engine until close()."""

    def __init__(self, llm: Any, show: Callable[[Frame], object]):
        self.llm, self.show = llm, show
        self.schedulers = [one.scheduler for one in llm.engines]
        self.managers = [scheduler.block_manager for scheduler in self.schedulers]
        self.letters: dict[int, str] = {}  # arrival -> the request's name
        self.numbers: dict[engine.SchedulerOutput, int] = {}  # launched step -> its number
        self.counter = itertools.count()
        self.last: list[int | None] = [None] * len(self.schedulers)  # the number of the pool's step scheduled last
        self.most_computed = Counter[tuple]()  # order of a sequence -> the most tokens computed for it
        self.splits: dict[tuple, tuple] = {}  # order of a sequence -> the splits of its last decode step
        self.together: dict[int, list] = {}  # pool -> the tokens that several sequences read once
        self.picture = self._take_picture()
        # The state that the frames so far add up to
        self.tables: dict[str, list] = {}
        self.lens: dict[str, int] = {}
        self.cached: Collection[tuple[int, int]] = set()  # (pool, block)
        # sequence -> (number of its tokens, its detokenizer)
        self.texts: WeakKeyDictionary[engine.Sequence, tuple[int, Any]] = WeakKeyDictionary()
        self.running = WeakSet[engine.Sequence](self.picture)  # sequences that a step was told of
        self.placed = WeakSet[engine.Sequence](self.picture)  # sequences whose pool is known
        self.watchers = [partial(self._observe, pool) for pool in range(len(self.schedulers))]
        for scheduler, watch in zip(self.schedulers, self.watchers):
            Traced.watch(scheduler, watch)

    def close(self) -> None:
        for scheduler, watch in zip(self.schedulers, self.watchers):
            scheduler.unwatch(watch)
        self.watchers = []

    def header(self) -> dict[str, Any]:
        """What stays the same over the run."""
        manager, config, runner = self.managers[0], self.llm.config, self.llm.runner
        values = 2 * config.num_layers * config.num_kv_heads * config.head_dim  # K and V of a token
        return dict(version=VERSION, model=self.llm.path.name, pools=len(self.schedulers), blocks=manager.num_blocks,
                    block_size=manager.block_size, host_blocks=vars(manager).get("num_host_blocks", 0),
                    window=vars(manager).get("window", 0),
                    max_num_seqs=self.schedulers[0].max_num_seqs, layers=config.num_layers,
                    bytes_per_token=values * runner.kv_dtype.itemsize,
                    attention="triton" if runner.kernels is kernel.TRITON else "torch")

    def _take_picture(self) -> Picture:
        picture = Picture()
        for pool, scheduler in enumerate(self.schedulers):
            host_tables = vars(scheduler.block_manager).get("host_tables", {})
            for seq in scheduler.running + scheduler.waiting:
                grammar = vars(seq).get("grammar") if seq.block_table else None
                picture[seq] = Seen(pool, list(seq.block_table), list(host_tables.get(seq, ())), len(seq.token_ids),
                                    list(vars(seq).get("drafts", ())), grammar and grammar.num_allowed())
        for seq in self.llm.scheduler.waiting:  # with a router, those that have no pool yet
            picture.setdefault(seq, Seen(num_known=len(seq.token_ids)))
        return picture

    def _observe(self, pool: int, change: str, *of: Any) -> None:
        before, self.picture = self.picture, self._take_picture()
        if beams := self._beams():
            self._tell(Frame("beams", pool, self.last[pool], beams=beams))
        make = getattr(self, f"_after_{change}", None)
        if make and (frame := make(pool, before, *of)):
            self._tell(frame)

    def _tell(self, frame: Frame) -> None:
        """Add the difference between the state and what was told of it."""
        tables = {self._name(seq): [seen.pool, seen.table, seen.host_table]
                  for seq, seen in self.picture.items() if seen.table or seen.host_table}
        lens = {self._name(seq): seq.num_computed_tokens for seq, seen in self.picture.items() if seen.table}
        cached = {(pool, block): None for pool, manager in enumerate(self.managers) for block in manager.key_of_block}
        frame.tables, frame.lens = _difference(self.tables, tables), _difference(self.lens, lens)
        frame.cached = [[*place, place in cached] for place in sorted(cached.keys() ^ self.cached)]
        self.tables, self.lens, self.cached = tables, lens, cached.keys()
        for seq in self.picture:
            if seq.order[1] in self.letters:
                self._tell_text(seq, frame)
        self.show(frame)

    def _tell_text(self, seq: engine.Sequence, frame: Frame) -> None:
        """The tokens that were not told before. A token that ends within a character is told as its bytes; the one that
        completes the character has it."""
        name = self._name(seq)
        if seq not in self.texts:
            self.texts[seq] = 0, self._detokenizer()
            frame.seqs[name] = [[*self.letters].index(seq.order[1]), seq.order[2], seq.num_prompt_tokens, seq.max_len]
        count, detokenizer = self.texts[seq]
        if new := seq.token_ids[count:]:
            frame.texts[name] = [count, self._pieces(detokenizer, new)]
            self.texts[seq] = count + len(new), detokenizer

    def _detokenizer(self) -> Any:
        return self.llm.tokenizer and self.llm.tokenizer.detokenizer(skip_special_tokens=False)

    def _pieces(self, detokenizer: Any, token_ids: list[int]) -> list[Words]:
        if not detokenizer:
            return [f"{token} " for token in token_ids]
        return [detokenizer.add([token]) or list(self._token_bytes[token]) or "" for token in token_ids]

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return self.llm.tokenizer.token_bytes()

    # ---- a step, when it is scheduled

    def _after_schedule(self, pool: int, before: Picture, step: engine.SchedulerOutput) -> Frame | None:
        scheduler, several = self.schedulers[pool], len(self.schedulers) > 1
        running, waiting = scheduler.running, list(scheduler.waiting)
        if several:
            waiting = sorted(waiting + self.llm.scheduler.queue.waiting, key=engine.by_order)
        self.last[pool] = None
        if several and not (running or waiting):
            return None  # other GPUs have all that is under way
        frame = Frame("step" if step.seqs else "idle", pool, None, budget=scheduler.max_num_batched_tokens)
        self._arrivals(frame)
        if several:
            new = [seq for seq, seen in self.picture.items() if seen.pool == pool and seq not in self.placed]
            frame.placed = [[self._name(seq), pool] for seq in sorted(new, key=engine.by_order)]
            self.placed.update(new)
        if not step.seqs:
            return frame
        frame.step = self.last[pool] = self.numbers[step] = next(self.counter)
        frame.num_tokens = sum(step.num_tokens)
        num_tokens = dict(zip(step.seqs, step.num_tokens))
        frame.work = [[self._name(seq), *self._work(seq, num_tokens.get(seq, 0), step)] for seq in running]
        frame.waits = [[self._name(seq), "waits behind it" if i else self._why_not(seq, scheduler, step)]
                       for i, seq in enumerate(waiting)]
        self._moves(pool, before, step, frame)
        self._attention(step, frame)
        for seq in step.seqs:
            if drafts := self.picture[seq].drafts:  # custom proposers say where they found them, or not
                found = getattr(seq.drafter.proposer, "found", None)
                where = None if found is None else found + len(seq.token_ids) - seq.drafter.start
                frame.drafted.append([self._name(seq), self._words(drafts), where,
                                      self._pieces(self._detokenizer(), drafts)])
            num_computed = seq.num_computed_tokens - len(drafts)
            self.most_computed[seq.order] = max(num_computed, self.most_computed[seq.order])
        return frame

    def _arrivals(self, frame: Frame) -> None:
        """New requests, with all samples, also those that fork later."""
        new = {seq.order[1]: seq for seq in self.picture if seq.order[1] not in self.letters}
        for arrival, seq in sorted(new.items()):
            self.letters[arrival] = letters(len(self.letters))
            prompt = seq.token_ids[:seq.num_prompt_tokens]
            names = list(map(self._name, self.llm.requests[seq.request_id].sequences))
            frame.arrived.append([names, seq.order[0], len(prompt), self._words(prompt)])

    def _work(self, seq: engine.Sequence, num_tokens: int, step: engine.SchedulerOutput) -> tuple:
        """The tokens that a running sequence computes in this step: (kind, first, end, whether it samples, drafts)."""
        end, num_prompt_tokens = seq.num_computed_tokens, seq.num_prompt_tokens
        start, most = end - num_tokens, self.most_computed[seq.order]
        if not num_tokens:
            why = (" for the other beams" if self._is_paused(seq) else " for its token" if seq.num_new_tokens <= 0 else
                   "" if step.budget else ": the token budget is spent")
            return f"waits{why}", 0, 0, False, 0
        if start < seq.num_hit_tokens:  # the token's K and V are in the cache and are not written again
            kind = "again"
        elif self.picture[seq].drafts or num_tokens == 1 and start >= num_prompt_tokens:
            kind = "decode"
        elif start >= max(num_prompt_tokens, most):
            kind = "forced"  # by a grammar, which leaves no choice about these tokens
        else:
            kind = "recompute" if end > num_prompt_tokens or start < most else "prompt"
        return kind, start, end, seq in step.sampled, len(self.picture[seq].drafts)

    def _why_not(self, seq: engine.Sequence, scheduler: Any, step: engine.SchedulerOutput) -> str:
        """A reason why the first waiting sequence was not admitted. The others stay behind this sequence."""
        manager = scheduler.block_manager
        if seq in step.preempted:
            why = "it was preempted in this step"
        elif len(scheduler.running) >= scheduler.max_num_seqs:
            why = f"no batch row is free, max_num_seqs is {scheduler.max_num_seqs}"
        elif (num_needed := manager.num_blocks_needed(seq, manager.find_prefix(seq))) > manager.num_free_blocks:
            why = f"free blocks needed {num_needed}, there are {manager.num_free_blocks}"
        else:
            why = "too few blocks were free when its turn came" if step.budget else "the token budget is spent"
        return "waits" + " on the host" * bool(self.picture[seq].host_table) + f": {why}"

    def _moves(self, pool: int, before: Picture, step: engine.SchedulerOutput, frame: Frame) -> None:
        """The events of blocks: found, swapped in, slid out, taken, evicted, copied, registered, preempted."""
        manager, running = self.managers[pool], self.schedulers[pool].running
        holders = holders_of({self._name(seq): seq.block_table for seq in running})
        # Samples have forked since the last step, as if admitted with the blocks of the prompt.
        forks = {seq for seq in running if seq.num_hit_tokens and before[seq].table and seq not in self.running}
        forks = {seq for seq in forks if not isinstance(seq, BeamSequence)}
        held_before = holders_of({self._name(seq): before[seq].table for seq in running})
        # and those admitted before the next one
        there = {self._name(seq) for seq in running if before[seq].table and seq not in forks}
        swaps_in, swaps_out = (vars(step).get(name, []) for name in ("swaps_in", "swaps_out"))
        came, went = dict(swaps_in), {host: block for block, host in swaps_out}
        for seq in running:
            name, table, (_, old, host_table, *_) = self._name(seq), seq.block_table, before[seq]
            hosts = [host for host in host_table if host in came]
            moved = [came[host] for host in hosts]
            num_old = len(old) or engine.cdiv(seq.num_hit_tokens, manager.block_size)
            given = [block for block in _real(table[:num_old]) if block not in moved]
            if given and (not old or seq in forks):  # the sequence was admitted in this step
                held = held_before if seq in forks else holders
                others = {block: [other for other in held.get(block, ()) if other in there] for block in given}
                frame.found.append([name, min(seq.num_hit_tokens, len(given) * manager.block_size),
                                    [block for block in given if others[block]],
                                    list(dict.fromkeys(itertools.chain(*others.values()))),
                                    [block for block in given if not others[block]]])
            there.add(name)
            self.running.add(seq)
            if hosts:
                frame.swapped_in.append([name, hosts, moved])
            frame.slid_out += [[name, block] for block, now in zip(old, table) if now == NULL != block]
            if new := table[num_old:]:
                frame.taken.append([name, new])
        reused = {block for _, block in step.copies + swaps_in}.union(*(blocks for _, blocks in frame.taken))
        frame.evicted = [block for gpu, block in self.cached if gpu == pool and block in reused]
        frame.copied = [[block, copy, holders.get(copy, []), holders.get(block, [])] for block, copy in step.copies]
        frame.registered = list(step.cached)
        for seq in step.preempted:
            hosts = _real(self.picture[seq].host_table)
            blocks = [went[host] for host in hosts] or _real(before[seq].table)
            frame.preempted.append([self._name(seq), blocks, hosts])

    def _attention(self, step: engine.SchedulerOutput, frame: Frame) -> None:
        """The kernel's splits of a decoding sequence's context, at the first decode and whenever they change.

        Several programs may compute the splits side by side (vLLM's V2), or one program computes them in turn (V1, as
        without splits). If torch computes attention, a context without splits is not mentioned.
        """
        runner, whole = self.llm.runners[frame.pool], (1, 0, False)
        batch = runner.step_input.of(step, self.managers[0].block_size, runner.cascade)
        size, longest = batch.num_tokens.count(1), max(batch.seq_lens)
        shape = runner.graph_shape(batch.num_tokens, batch.seq_lens) if runner.lookahead else None
        if shape:  # a CUDA graph is recorded for sequences of any length
            size, longest = shape.num_seqs, runner.max_model_len
        for seq, count in zip(step.seqs, step.num_tokens):
            if count == 1 or self.picture[seq].drafts:
                num_splits, length = splits_of(self.llm, seq.num_computed_tokens)
                num_programs = tiles.programs_per_context(size * self.llm.config.num_kv_heads,
                                                          tiles.split_bound(longest))
                how = (num_splits, length, num_programs > 1 or bool(batch.cascade)) if num_splits > 1 else whole
                if how != self.splits.get(seq.order, None if runner.kernels is kernel.TRITON else whole):
                    frame.attention.append([self._name(seq), seq.num_computed_tokens, *how])
                self.splits[seq.order] = how
        together = [[list(dict.fromkeys(map(self._name, batch.seqs[first:first + count]))), start, end]
                    for first, count, start, end in zip(*[iter(batch.cascade)] * 4)]
        if together != self.together.get(frame.pool, []):
            self.together[frame.pool] = frame.together = together

    # ---- the results of a step, and what happens between two steps

    def _after_update(self, pool: int, before: Picture, step: engine.SchedulerOutput, drawn: engine.Sampled) -> Frame:
        number = self.numbers.pop(step, None)
        frame = Frame("tokens", pool, number, late=number != self.last[pool])
        sampled = list(dict.fromkeys(step.sampled))  # once each: with drafts a sequence samples several tokens
        for seq in sampled:
            seen, notes = before[seq], dict[str, Any]()
            new = known = seq.token_ids[seen.num_known:]
            if seq not in before:
                new, notes["dropped"] = [], True  # it had ended
            elif isinstance(seq, BeamSequence) and drawn.logprobs:
                candidates = drawn.logprobs[step.sampled.index(seq)][2]
                new, notes["best_of"] = [candidates[0]], len(candidates)
            elif known and seen.num_allowed is not None:
                new, notes["allowed"] = known[:1], seen.num_allowed
                if forced := known[1:]:
                    notes["forced"] = self._words(forced)
            if seen.drafts:
                notes["right"] = sum(itertools.takewhile(bool, map(operator.eq, seen.drafts, known)))
                notes["drafts"] = len(seen.drafts)
            frame.sampled.append([self._name(seq), self._words(new) if new else None, notes])
        ended = [seq for seq in sampled if seq in before and seq.finish_reason]
        frame.ended = [self._end(pool, seq, before, ended[i + 1:]) for i, seq in enumerate(ended)]
        for seq in ended:
            self._tell_text(seq, frame)  # its last tokens: it is in no queue any more
        return frame

    def _beams(self) -> list[list]:
        """The beams that have got a token that was not told, those of a search in its order: best first."""
        searches = [one for one in self.llm.requests.values() if isinstance(one, BeamSearch)
                    and one.arrival in self.letters]
        beams = []
        for child in itertools.chain(*(search.sequences for search in searches)):
            count, _ = self.texts.get(child, (child.num_prompt_tokens, None))
            if count < len(child.token_ids):
                parent = None if child in self.texts else next(
                    self._name(seq) for seq, (count, _) in self.texts.items()
                    if seq.request_id == child.request_id and seq.token_ids[:count] == child.token_ids[:-1])
                beams.append([self._name(child), self._words(child.token_ids[-1:]), parent, _real(child.block_table)])
        return beams

    def _after_finish(self, pool: int, before: Picture, seq: engine.Sequence) -> Frame | None:
        return Frame("ended", pool, self.last[pool], ended=[self._end(pool, seq, before)]) if seq in before else None

    _after_release = _after_finish

    def _after_undo(self, pool: int, _: Picture, step: engine.SchedulerOutput) -> Frame | None:
        names = [self._name(seq) for seq in step.seqs + step.preempted]
        return Frame("undone", pool, self.numbers.pop(step, None), undone=names) if names else None

    def _end(self, pool: int, seq: engine.Sequence, before: Picture, later: Iterable[engine.Sequence] = ()) -> list:
        """Why a sequence has ended, the blocks that it frees, those of them that cannot be found any more, and those
        that others hold. The sequences `later` end after it."""
        manager = self.managers[pool]
        held_later = {block for other in later for block in before[other].table}
        blocks = _real(before[seq].table)[::-1]
        free = [block for block in blocks if not manager.ref_counts[block] and block not in held_later]
        how = "retired" if not seq.finish_reason else "beam ends" if _is_beam(seq) else "finished"
        reasons = (seq.finish_reason, seq.stop_reason) if how == "finished" else (None, None)
        return [self._name(seq), how, *reasons, free, [block for block in free if block not in manager.key_of_block],
                [block for block in blocks if block not in free]]

    # ---- names and words

    def _name(self, seq: engine.Sequence) -> str:
        return self.letters.get(seq.order[1], "?") + f"{seq.order[2]}" * (seq.sampling.params.n > 1 or _is_beam(seq))

    def _words(self, token_ids: list[int]) -> Words:
        text = self.llm.tokenizer and self.llm.tokenizer.decode(token_ids[:MOST_WORDS], skip_special_tokens=False)
        return text or token_ids[:MOST_WORDS]

    def _is_paused(self, seq: engine.Sequence) -> bool:
        search = self.llm.requests.get(seq.request_id)
        return isinstance(search, BeamSearch) and seq in search.candidates


def splits_of(llm: Any, seq_len: int) -> tuple[int, int]:
    """The number of splits of a context of seq_len tokens, and their length."""
    config, runner = llm.config, llm.runner
    tile = tiles.tile_config("decode", config.num_heads // config.num_kv_heads, config.head_dim, runner.dtype.itemsize,
                             tiles.shared_memory(runner.device), runner.kv_dtype.itemsize)["TILE_N"]
    length = tiles.split_length(seq_len, tile)
    window = widest_window(config)
    num_outside = max(seq_len - window, 0) // length if window else 0  # splits that the window hides
    return engine.cdiv(seq_len, length) - num_outside, length


def letters(number: int) -> str:
    """A .. Z, AA, AB .."""
    return (letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def holders_of(tables: dict[Any, list[int]]) -> dict[int, list]:
    """Held block -> those whose block tables list it."""
    holders: dict[int, list] = {}
    for owner, table in tables.items():
        for block in _real(table):
            holders.setdefault(block, []).append(owner)
    return holders


def _is_beam(seq: engine.Sequence) -> bool:
    return seq.request_id.startswith("beam")


def _real(table: Iterable[int]) -> list[int]:
    return [block for block in table if block != NULL]


def _difference(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The entries that are new or different, and None for those that are gone."""
    return {name: now.get(name) for name in before | now if before.get(name) != now.get(name)}
