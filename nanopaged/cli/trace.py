"""The output of `--trace`: every step of the engine, for a reader who wants to watch the pool being paged.

A `Trace` is an observer. It wraps a few methods of one engine's scheduler. Before each call it copies the scheduler's
state (block tables, prefix cache, numbers of tokens), and after the call it prints the changes. The engine contains no
code for the trace, so the trace costs nothing when it is off. A step of two prompts with a common beginning:

    step 3: 2 of at most 8192 tokens, for 2 of 2 running sequences
      A           decode 13 -> 14 [0* 1* 2 4]
      B           decode 12 -> 13 [0* 1* 3 5]
      pool        **ABAB____ __________ ____  6 held (2 shared), 0 free but cached, 18 empty
      taken       B 5
      sampled     A ' me', B ';'

With data_parallel_size each step is one GPU's. Its section shows all pools, and where it admitted sequences to:

      placed      C on GPU 1: its next step has 24 tokens with it, 39 on GPU 0
      pool 0      AAAA______  4 held (0 shared), 0 free but cached, 6 empty
      pool 1      BBBCCC____  6 held (0 shared), 0 free but cached, 4 empty

Sequences are named A, B, C in the order of arrival. Samples of one prompt, and beams, are named A0, A1, A2. A line has
at most 100 columns: the first of many sequences or blocks are shown, and the others are counted.
"""
import itertools
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, NamedTuple

from nanopaged import engine, kernel, tiles
from nanopaged.api.beam import BeamSearch
from nanopaged.progress import plural

WIDTH = 100  # columns of a line
LABEL = 14  # columns of a line's label
MOST = 10  # lines of a kind in one step
NULL = engine.NULL
NO_SPLIT = "in one piece (V1)"
BOLD, RED, GREEN, YELLOW, CYAN = 1, 31, 32, 33, 36  # in a terminal's escape sequences
COLORS = {"found": GREEN, "registered": GREEN, "swapped in": GREEN, "copied": YELLOW, "evicted": RED, "preempted": RED,
          "swapped out": RED, "undone": RED, "sampled": CYAN}  # label -> its colour
Holders = dict[int, list[engine.Sequence]]  # held block -> the sequences whose tables list it


class State(NamedTuple):
    """The state of the scheduler and the block manager before a call."""
    keys: dict[int, Any]  # block -> its key in the prefix cache
    tables: dict[engine.Sequence, list[int]]  # running sequence -> its block table
    num_known: dict[engine.Sequence, int]  # running or waiting sequence -> the number of its known tokens
    host_tables: dict[engine.Sequence, list[int]]  # waiting sequence -> its blocks on the host
    num_allowed: dict[engine.Sequence, int]  # running sequence with a grammar -> the tokens that may come next
    drafts: dict[engine.Sequence, list[int]]  # running sequence -> its drafts that are not decided yet


class Trace:
    """Prints every step of an LLM until close().

    write: a function that takes each line without its line end (default: print to stderr)
    first: the Trace of the first pool; the others, which it makes, share its names and numbers
    """

    def __init__(self, llm: Any, write: Callable[[str], object] | None = None, first: "Trace | None" = None):
        self.llm = llm
        self.pools: list[Trace] = first.pools if first else []
        self.index = len(self.pools)
        self.pools.append(self)
        schedulers = getattr(llm.scheduler, "pools", [llm.scheduler])
        self.scheduler: engine.Scheduler = schedulers[self.index]
        self.manager: engine.BlockManager = self.scheduler.block_manager
        self.write = write or _print
        self.letters: dict[int, str] = first.letters if first else {}  # arrival -> the request's name
        self.numbers: dict[engine.SchedulerOutput, int] = {}  # launched step -> its number
        self.counter: Iterator[int] = first.counter if first else itertools.count()
        self.last: int | None = None  # the number of the step scheduled last
        self.num_computed: dict[tuple, int] = {}  # order of a sequence -> the largest number of tokens computed for it
        self.attention: dict[tuple, str] = {}  # order of a sequence -> the splits of its last decode step
        self.is_inside = False
        self.originals: list[tuple[Any, str, Any]] = []
        shows: dict[str, Callable[..., None]] = dict(schedule=self._step, update=self._tokens, finish=self._gone,
                                                     release=self._gone, undo=self._undone)
        for name, show in shows.items():
            self._watch(self.scheduler, name, show)
        self._watch(llm, "_branch", self._beams)
        if first:
            return
        while len(self.pools) < len(schedulers):
            type(self)(llm, self.write, self)
        self._legend()

    def _legend(self) -> None:
        num_host_blocks, window = (getattr(self.manager, name, 0) for name in ("num_host_blocks", "window"))
        several = f"on each of {len(self.pools)} GPUs, " * (len(self.pools) > 1)
        num_blocks, size = self.manager.num_blocks, self.manager.block_size
        self.write(f"{several}a pool of {num_blocks} {plural('block', num_blocks)} of {size} {plural('token', size)}"
                   + f", {num_host_blocks} more on the host" * (num_host_blocks > 0)
                   + f", attention sees {window} tokens" * (window > 0))
        self._say("A", "prompt 0..8 of 9 -> 9: tokens 0 to 8 are computed, then token 9 is sampled")
        self._say("[4 5* 6c -]", "block table: own block, shared block, a copy made in this step, out of the window")
        self._say("pool", "A: held by A (Z: by Z or AZ ..), a: by several of A0 A1 .., *: by several requests")
        self._say("", ".: free but still cached, for whoever comes with the same tokens, _: free and empty")

    def close(self) -> None:
        """Restore the methods of the scheduler and the LLM."""
        for trace in self.pools[1:][::-1]:
            trace.pools = []
            trace.close()
        while self.originals:
            watched, name, original = self.originals.pop()
            if original:
                setattr(watched, name, original)
            else:
                delattr(watched, name)

    def _watch(self, holder: Any, name: str, show: Callable[..., None]) -> None:
        """Replace a method by one that calls show(state before the call, result, *arguments) after each call."""
        method = getattr(holder, name)
        scheduler = self.scheduler

        @wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.is_inside:  # the scheduler calls its own method: the outer call prints the changes of both
                return method(*args, **kwargs)
            before = State(dict(self.manager.key_of_block), {seq: list(seq.block_table) for seq in scheduler.running},
                           {seq: len(seq.token_ids) for seq in scheduler.running + self.llm.scheduler.waiting},
                           {seq: list(seq.host_table) for seq in self.llm.scheduler.waiting},
                           {seq: seq.sampling.grammar.num_allowed()
                            for seq in scheduler.running if seq.sampling.grammar},
                           {seq: list(seq.drafts) for seq in scheduler.running})
            self.is_inside = True
            try:
                result = method(*args, **kwargs)
            finally:
                self.is_inside = False
            show(before, result, *args)
            self._note()
            return result

        self.originals.append((holder, name, vars(holder).get(name)))
        setattr(holder, name, watched)

    def _note(self) -> None:
        """The state after a call has been shown; nanopaged/cli/page.py wants to know it."""

    # ---- a step, when it is scheduled

    def _step(self, before: State, step: engine.SchedulerOutput) -> None:
        running = self.scheduler.running
        waiting = sorted(self.scheduler.waiting + getattr(self.scheduler, "queue", []), key=engine.by_order)
        budget = self.scheduler.max_num_batched_tokens
        spent = sum(step.num_tokens)
        arrived = [seq for seq in before.num_known if seq.order[1] not in self.letters]
        where = f" on GPU {self.index}" * (len(self.pools) > 1)
        self.last = None
        if where and not (running or waiting or arrived or getattr(self.scheduler, "placements", [])):
            return  # other GPUs have all that is under way
        self.write("")
        self._arrivals(arrived)
        if not step.seqs:
            self.write(f"no step{where}: nothing can be computed now")
            self._placements()
            return
        self.last = self.numbers[step] = next(self.counter)
        num_tokens = dict(zip(step.seqs, step.num_tokens))
        self.write(f"step {self.last}{where}: {spent} of at most {budget} tokens, "
                   f"for {len(step.seqs)} of {len(running)} running sequences")
        work = [self._work(seq, num_tokens[seq], step) if seq in num_tokens else self._pause(seq, spent == budget)
                for seq in running]
        self._rows(running, work, step)
        if waiting:
            self._queue(waiting, self._why_not(waiting[0], step, spent == budget))
        self._placements()
        for trace in self.pools:
            trace._pool()
        self._moves(before, step)
        self._items("draft", [self._drafts(seq) for seq in step.seqs if seq.drafts])
        self._attention(step)
        for seq in step.seqs:
            num_computed = seq.num_computed_tokens - len(seq.drafts)
            self.num_computed[seq.order] = max(num_computed, self.num_computed.get(seq.order, 0))

    def _drafts(self, seq: engine.Sequence) -> str:
        """The tokens that were guessed, and where in the text they followed before."""
        found = getattr(seq.drafter.proposer, "found", None)  # custom proposers have it or not
        where = "" if found is None else f" from token {found + len(seq.token_ids) - seq.drafter.start}"
        return f"{self._name(seq)} {self._text(seq.drafts)}{where}"

    def _rows(self, running: list[engine.Sequence], work: list[str], step: engine.SchedulerOutput) -> None:
        """The work and the block table of each running sequence."""
        column = max(map(len, work[:MOST]), default=0)
        self._lines([(self._name(seq), f"{text:<{column}} {self._table(seq, step, WIDTH - LABEL - 1 - column)}")
                     for seq, text in zip(running, work)])

    def _queue(self, waiting: list[engine.Sequence], why: str) -> None:
        self._say(self._name(waiting[0]), why)
        self._items("", [self._name(seq) for seq in waiting[1:]], "behind it: ", " ")

    def _placements(self) -> None:
        """The GPUs of the sequences that were placed before this step, and the reasons (data_parallel.py)."""
        lines, samples = [], None
        for seq, pool, offers in getattr(self.scheduler, "placements", []):
            has_samples = seq.samples is samples is not None or pool._run_here(seq.samples, but=seq)
            samples = seq.samples
            no_choice = ": its samples are there" if has_samples else ": the last sequence there gives way to it"
            why = ": its next step has " + ", ".join(
                [f"{offers[pool].num_tokens} tokens with it" if offers else ""]
                + [f"{offer.num_tokens} on GPU {other.index}" for other, offer in offers.items() if other is not pool])
            lines.append(("placed", f"{self._name(seq)} on GPU {pool.index}" + (why if offers else no_choice)))
        self._lines(lines)

    def _arrivals(self, seqs: list[engine.Sequence]) -> None:
        requests: dict[int, list[engine.Sequence]] = {}
        for seq in sorted(seqs, key=lambda seq: seq.order[1:]):
            requests.setdefault(seq.order[1], []).append(seq)
        lines = []
        for arrival, samples in requests.items():
            self.letters[arrival] = _letters(len(self.letters))
            prompt = samples[0].token_ids[:samples[0].num_prompt_tokens]
            priority = samples[0].order[0]
            lines.append(("arrives", self._names(samples) + f", priority {priority}" * (priority != 0)
                          + f", {len(prompt)} prompt tokens: {self._text(prompt)}"))
        self._lines(lines)

    def _work(self, seq: engine.Sequence, num_tokens: int, step: engine.SchedulerOutput) -> str:
        """The tokens that a sequence computes in this step."""
        end = seq.num_computed_tokens
        num_prompt_tokens = seq.num_prompt_tokens
        start = end - num_tokens
        if start < seq.num_hit_tokens:  # the token's K and V are in the cache and are not written again
            text = f"token {start} again, for its logits"
        elif seq.drafts:
            text = f"decode {start} and {len(seq.drafts)} drafts"
        elif num_tokens == 1 and start >= num_prompt_tokens:
            text = f"decode {start}"
        elif start >= max(num_prompt_tokens, self.num_computed.get(seq.order, 0)):
            text = f"forced {start}..{end - 1}"  # by a grammar, which leaves no choice about them
        elif end > num_prompt_tokens or start < self.num_computed.get(seq.order, 0):
            text = f"recompute {start}..{end - 1}"
        else:
            text = f"prompt {start}..{end - 1} of {num_prompt_tokens}"
        return text + f" -> {end}" * (seq in step.sampled)

    def _pause(self, seq: engine.Sequence, is_spent: bool) -> str:
        """The reason why a running sequence computes no token in this step."""
        if self._candidates(seq):
            return "waits for the other beams"
        if seq.num_new_tokens <= 0:
            return "waits for its token"
        return "waits: the token budget is spent" if is_spent else "waits"

    def _why_not(self, seq: engine.Sequence, step: engine.SchedulerOutput, is_spent: bool) -> str:
        """A reason why the first waiting sequence was not admitted. The others stay behind this sequence."""
        num_free = self.manager.num_free_blocks
        max_num_seqs = self.scheduler.max_num_seqs
        if seq in step.preempted:
            why = "it was preempted in this step"
        elif len(self.scheduler.running) >= max_num_seqs:
            why = f"no batch row is free, max_num_seqs is {max_num_seqs}"
        elif (num_needed := self.manager.num_blocks_needed(seq, self.manager.find_prefix(seq))) > num_free:
            why = f"free blocks needed {num_needed}, there are {num_free}"
        else:
            why = "the token budget is spent" if is_spent else "too few blocks were free when its turn came"
        return "waits" + " on the host" * bool(seq.host_table) + f": {why}"

    def _moves(self, before: State, step: engine.SchedulerOutput) -> None:
        """The events of blocks: found, swapped in, slid out, taken, evicted, copied, registered, preempted."""
        holders = self._holders()
        taken: list[str] = []
        slid: list[str] = []
        came = dict(step.swaps_in)  # host block -> block
        for seq in self.scheduler.running:
            old = before.tables.get(seq)
            table = seq.block_table
            name = self._name(seq)
            hosts = [host for host in before.host_tables.get(seq, ()) if host in came]
            moved = {NULL, *(came[host] for host in hosts)}
            num_old = len(old) if old is not None else engine.cdiv(seq.num_hit_tokens, self.manager.block_size)
            if old is None:  # the sequence was admitted in this step
                self._found(seq, [block for block in table[:num_old] if block not in moved], holders)
            if hosts:
                self._say("swapped in", f"{name}: host {_blocks(hosts)} to {_blocks([came[host] for host in hosts])}")
            slid += [f"{name} {block}" for block, now in zip(old or (), table) if now == NULL != block]
            new = [block for block in table[num_old:] if block not in moved]
            taken += [f"{name} {_blocks(new)}"] if new else []
        self._items("slid out", slid, "of the window: ")
        self._items("taken", taken)
        # An evicted block has lost its key. A block that keeps its place in a table has only got a new key.
        stays = {old for seq, table in before.tables.items() for old, now in zip(table, seq.block_table) if old == now}
        evicted = [f"{block}" for block, key in before.keys.items()
                   if self.manager.key_of_block.get(block) is not key and block not in stays]
        self._items("evicted", evicted, "reused, and no longer cached: ", " ")
        self._lines([("copied", f"{block} to {copy}, for {self._names(holders.get(copy, ()))} to write in; "
                      f"{block} is kept by {self._names(holders.get(block, ())) or 'nobody'} (copy-on-write)")
                     for block, copy in step.copies])
        self._items("registered", [f"{block}" for block in step.cached], "can be shared now: ", " ")
        went = {host: block for block, host in step.swaps_out}
        for seq in step.preempted[:MOST]:
            hosts = _real(seq.host_table)
            out = f"swapped out, {_blocks([went[host] for host in hosts])} to host {_blocks(hosts)}"
            back = f"gives back {_blocks(_real(before.tables.get(seq, ())))}, its tokens will be computed again"
            self._say("preempted", f"{self._name(seq)}: {out if hosts else back}")

    def _found(self, seq: engine.Sequence, blocks: list[int], holders: Holders) -> None:
        """The blocks that an admitted sequence found in the prefix cache."""
        shared = [block for block in blocks if len(holders[block]) > 1]
        cached = [block for block in blocks if len(holders[block]) == 1]
        others = dict.fromkeys(other for block in shared for other in holders[block] if other is not seq)
        where = [f"{_blocks(shared)} (shared with {self._names(others)})"] if shared else []
        where += [f"{_blocks(cached)} (free, but still cached)"] if cached else []
        num_tokens = min(seq.num_hit_tokens, len(blocks) * self.manager.block_size)
        self._items("found", where, f"{self._name(seq)} {num_tokens} tokens in ")

    def _attention(self, step: engine.SchedulerOutput) -> None:
        """The kernel's splits of a decoding sequence's context, printed at the first decode and whenever they change.

        Several programs may compute the splits side by side (vLLM's V2), or one program computes them in turn (V1, as
        without splits). If torch computes attention, a context without splits is not mentioned.
        """
        runner = self.llm.runner
        is_triton = runner.kernels is kernel.TRITON
        batch = engine.StepInput.of(step, self.manager.block_size)
        decodes = [seq for seq, count in zip(step.seqs, step.num_tokens) if count == 1 or seq.drafts]
        size = batch.num_tokens.count(1)
        longest = max(batch.seq_lens)
        shape = None
        if runner.fused:
            shape = runner.graph_shape(batch.num_tokens, batch.seq_lens)
        if shape:  # a CUDA graph is recorded for sequences of any length
            size = shape.num_seqs
            longest = runner.max_model_len
        num_contexts = size * self.llm.config.num_kv_heads
        whole: list[str] = []
        split: list[str] = []
        for seq in decodes:
            num_splits, length = splits_of(self.llm, seq.num_computed_tokens)
            how = NO_SPLIT
            if num_splits > 1:
                is_v2 = tiles.programs_per_context(num_contexts, tiles.split_bound(longest)) > 1
                how = f"in {num_splits} splits of {length}" + (" (V2)" if is_v2 else " in turn (V1)")
            if how != self.attention.get(seq.order, None if is_triton else NO_SPLIT):
                if num_splits > 1:
                    split.append(f"{self._name(seq)} {seq.num_computed_tokens} tokens {how}")
                else:
                    whole.append(self._name(seq))
            self.attention[seq.order] = how
        if whole:
            self._say("attention", f"{_listing(whole, ' ', 40)} {NO_SPLIT}")
        self._items("attention", split, "" if is_triton else "on a GPU (torch does not split): ")

    # ---- the results of a step

    def _tokens(self, before: State, _: Any, step: engine.SchedulerOutput, *__: Any) -> None:
        number = self.numbers.pop(step, None)
        sampled: list[str] = []
        for seq in dict.fromkeys(step.sampled):
            new = seq.token_ids[before.num_known.get(seq, len(seq.token_ids)):]
            what = self._text(new) if new else "nothing" if seq in before.num_known else "dropped, it had ended"
            if candidates := self._candidates(seq):
                what = f"{self._text([candidates[0][0]])} (best of {len(candidates)})"
            if new and seq in before.num_allowed:
                what = f"{self._text(new[:1])} (one of {before.num_allowed[seq]} that its grammar allows)"
                what += f", forced {self._text(new[1:])}" if len(new) > 1 else ""
            if drafts := before.drafts.get(seq):
                num_right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, new)))
                what += f" ({num_right} of {len(drafts)} drafts came true)"
            sampled.append(f"{self._name(seq)} {what}")
        when = f"in step {number}, read only now: " if number != self.last else ""
        self._items("sampled", sampled, when or f"in step {number}: " * (len(self.pools) > 1))
        alive = {*self.scheduler.running, *self.llm.scheduler.waiting}
        ended = [seq for seq in dict.fromkeys(step.sampled) if seq in before.num_known and seq not in alive]
        self._lines([("finished", self._end(seq) + self._freed(seq, before, ended[i + 1:]))
                     for i, seq in enumerate(ended)])
        if ended:
            self._pool()

    def _beams(self, before: State, branches: list[tuple], search: BeamSearch) -> None:
        dead = [seq for seq in before.num_known if self._is_beam_of(seq, search) and seq not in search.beams
                and seq.pool in (None, self.manager)]
        self._lines([("beam ends", self._name(beam) + self._freed(beam, before, dead[i + 1:]))
                     for i, beam in enumerate(dead)])
        for parent, child, token in branches:
            if child.pool not in (None, self.manager):
                continue
            fork = f"shares {_blocks(_real(child.block_table))}" if child.block_table else "computes its tokens again"
            self._say("beam", f"{self._name(child)} goes on with {self._text([token])}"
                      + f", as a fork of {self._name(parent)}: {fork}" * (child is not parent))

    def _gone(self, before: State, _: Any, seq: engine.Sequence, *reason: Any) -> None:
        if seq in before.num_known:  # otherwise the sequence had ended before this call
            is_finished = seq.finish_reason and not seq.request_id.startswith("beam")
            self._say("finished" if is_finished else "retired", self._end(seq) + self._freed(seq, before))

    def _undone(self, before: State, _: Any, step: engine.SchedulerOutput) -> None:
        number = self.numbers.pop(step, None)
        if step.seqs or step.preempted:
            what = "nothing can be computed" if number is None else f"step {number} failed"
            self._say("undone", f"{what}, {self._names(step.seqs + step.preempted)} will start over")

    def _end(self, seq: engine.Sequence) -> str:
        """The name of a sequence that has ended, and the reason."""
        reason = "" if seq.stop_reason is None else f": {_fit(repr(seq.stop_reason), 20)}"
        is_named = seq.finish_reason and not seq.request_id.startswith("beam")
        return self._name(seq) + (f" ({seq.finish_reason}{reason})" if is_named else "")

    def _freed(self, seq: engine.Sequence, before: State, later: Sequence[engine.Sequence] = ()) -> str:
        """The blocks that an ended sequence frees, and those that others hold. The sequences `later` end after it."""
        held_later = {block for other in later for block in before.tables.get(other, ())}
        blocks = _real(before.tables.get(seq, ()))[::-1]
        free = [block for block in blocks if not self.manager.ref_counts[block] and block not in held_later]
        held = [block for block in blocks if block not in free]
        lost = [block for block in free if block not in self.manager.key_of_block]
        cached = f"all but {_blocks(lost)}" if lost else "all"
        return (f", frees {_blocks(free)} ({cached if len(lost) < len(free) else 'none'} cached)" * bool(free)
                + f", others hold {_blocks(held)}" * bool(held))

    # ---- pictures and words

    def _pool(self) -> None:
        """A character for each block. A large pool's rows without a held block are left out."""
        holders = self._holders()
        count = self.manager.num_blocks
        row = 70  # blocks of a line
        cells = "".join(self._cell(block, holders.get(block)) for block in range(count))
        num_shared = sum(len(seqs) > 1 for seqs in holders.values())
        num_cached = cells.count(".")
        num_empty = cells.count("_")
        counts = f"{len(holders)} held ({num_shared} shared), {num_cached} free but cached, {num_empty} empty"
        label = f"pool {self.index}" if len(self.pools) > 1 else "pool"
        self._say(label, f"{_tens(cells)}  {counts}" if count <= 30 else counts)
        if count > 30:
            self._lines([(f"{start:>10}", _tens(cells[start:start + row])) for start in range(0, count, row)
                         if count <= row or cells[start:start + row].strip("._")], most=4)

    def _cell(self, block: int, seqs: list[engine.Sequence] | None) -> str:
        if not seqs:
            return "." if block in self.manager.key_of_block else "_"
        name, *others = {self.letters[seq.order[1]] for seq in seqs}
        return "*" if others else name[-1] if len(seqs) == 1 else name[-1].lower()

    def _table(self, seq: engine.Sequence, step: engine.SchedulerOutput, columns: int) -> str:
        """The block table in at most `columns` columns."""
        copies = {copy for _, copy in step.copies}
        ref_counts = self.manager.ref_counts
        marks = ["-" if block == NULL else f"{block}" + "c" * (block in copies) + "*" * (ref_counts[block] > 1)
                 for block in seq.block_table]
        if len(" ".join(marks)) > columns - 2:  # leave out blocks in the middle: new blocks are at the end
            marks[2:3] = [".."]
            while len(marks) > 3 and len(" ".join(marks)) > columns - 2:
                del marks[3]
        return f"[{' '.join(marks)}]"

    def _holders(self) -> Holders:
        holders: Holders = {}
        for seq in self.scheduler.running:
            for block in _real(seq.block_table):
                holders.setdefault(block, []).append(seq)
        return holders

    def _name(self, seq: engine.Sequence) -> str:
        is_one_of_several = seq.sampling.params.n > 1 or seq.request_id.startswith("beam")
        return self.letters.get(seq.order[1], "?") + f"{seq.order[2]}" * is_one_of_several

    def _candidates(self, seq: engine.Sequence) -> list[tuple] | None:
        """A paused beam's best next tokens, (token, log probability)."""
        return seq.listener.candidates.get(seq) if isinstance(seq.listener, BeamSearch) else None

    def _is_beam_of(self, seq: engine.Sequence, search: BeamSearch) -> bool:
        return seq.request_id == f"beam {search.arrival}"

    def _names(self, seqs: Iterable[engine.Sequence]) -> str:
        return _listing([self._name(seq) for seq in seqs], " ", 40)

    def _text(self, token_ids: list[int]) -> str:
        """Tokens as text in quotes, or as numbers if the LLM has no tokenizer."""
        text = self.llm.tokenizer and self.llm.tokenizer.decode(token_ids[:WIDTH], skip_special_tokens=False)
        return _fit(repr(text) if text else " ".join(map(str, token_ids)), 60)

    def _say(self, label: str, text: str) -> None:
        self.write(_fit(f"  {label:<{LABEL - 3}} {text}".rstrip(), WIDTH))

    def _items(self, label: str, items: list[str], before: str = "", separator: str = ", ") -> None:
        if items:
            self._say(label, before + _listing(items, separator, WIDTH - LABEL - len(before)))

    def _lines(self, lines: list[tuple[str, str]], most: int = MOST) -> None:
        for label, text in lines[:most] + ([("", f"and {len(lines) - most} more")] if len(lines) > most else []):
            self._say(label, text)


def splits_of(llm: Any, seq_len: int) -> tuple[int, int]:
    """The number of splits of a context of seq_len tokens, and their length: kernel.split_length in Python."""
    config = llm.config
    runner = llm.runner
    tile = tiles.tile_config("decode", config.num_heads // config.num_kv_heads, config.head_dim, runner.dtype.itemsize,
                             tiles.shared_memory(runner.device), runner.kv_dtype.itemsize)["TILE_N"]
    sixteenth = engine.cdiv(seq_len, 16 * tile) * tile
    least = engine.cdiv(seq_len, tiles.MAX_SPLITS * tile) * tile
    length = max(min(max(sixteenth, tiles.MIN_SPLIT), tiles.MID_SPLIT), least)
    num_outside = max(seq_len - config.window, 0) // length if config.window else 0  # splits that the window hides
    return engine.cdiv(seq_len, length) - num_outside, length


def _print(line: str) -> None:
    """Print a line on stderr: on a terminal a step's title in bold, and some labels in colour."""
    if line and sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR"):
        label, text = (line[:LABEL], line[LABEL:]) if line.startswith(" ") else (line, "")
        if color := COLORS.get(label.strip(), BOLD if not text else None):
            line = f"\x1b[{color}m{label}\x1b[0m{text}"
    print(line, file=sys.stderr, flush=True)


def _real(table: Iterable[int]) -> list[int]:
    return [block for block in table if block != NULL]


def _letters(number: int) -> str:
    """A .. Z, AA, AB .."""
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _tens(cells: str) -> str:
    return " ".join(cells[start:start + 10] for start in range(0, len(cells), 10))


def _blocks(blocks: list[int]) -> str:
    return _listing(list(map(str, blocks)), " ", 30)


def _listing(items: list[str], separator: str, columns: int) -> str:
    """The items that fit, at least one of them, and the number of the others."""
    ends = list(itertools.accumulate(_columns(item) + len(separator) for item in items))
    if len(items) <= 1 or ends[-1] <= columns + len(separator):
        return separator.join(items)
    count = max(1, sum(end <= columns - len(f" and {len(items)} more") + len(separator) for end in ends))
    return f"{separator.join(items[:count])} and {len(items) - count} more"


def _columns(text: str) -> int:
    """The width of a text in a terminal's columns: East Asian characters and most emoji take two columns."""
    return len(text) + sum(unicodedata.east_asian_width(char) in "WF" for char in text)


def _fit(text: str, columns: int) -> str:
    if _columns(text) <= columns:
        return text
    return text[:sum(end <= columns - 3 for end in itertools.accumulate(map(_columns, text)))] + "..."
