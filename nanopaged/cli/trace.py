"""What `--trace` prints: every step of the engine, for a reader who wants to watch the pool being paged.

A `Trace` is an observer. It wraps a few methods of one engine's scheduler, takes down the books before each call (block
tables, ref_counts, what is cached), and prints what the call has changed. The engine knows nothing of it, so it costs
nothing when it is off. A step of two prompts with a common beginning:

    step 3: 2 of at most 8192 tokens, for 2 of 2 running sequences
      A           decode 13 -> 14 [0* 1* 2 4]
      B           decode 12 -> 13 [0* 1* 3 5]
      pool        **ABAB____ __________ ____  6 held (2 shared), 0 free but cached, 18 empty
      taken       B 5
      sampled     A ' me', B ';'

Sequences are called A, B, C in the order of arrival, samples of one prompt and beams A0, A1, A2. No line has more than
100 columns; of many sequences or blocks the first are shown and the others counted.
"""
import itertools
import sys
import unicodedata
from functools import wraps
from typing import Any, Callable, NamedTuple

from nanopaged import engine, kernel
from nanopaged.api.beam import BeamSearch
from nanopaged.arithmetic import cdiv
from nanopaged import tiles

WIDTH, LABEL = 100, 14  # columns of a line, and of what stands before its text
MOST = 10  # lines of a kind in one step
NULL = engine.NULL


class Books(NamedTuple):
    """What the scheduler and the block manager had written down before a call."""
    keys: dict[int, tuple]  # block -> its key in the prefix cache
    tables: dict  # running sequence -> its block table
    num_known: dict  # running or waiting sequence -> how many of its tokens are known
    host_tables: dict  # waiting sequence -> its blocks on the host


class Trace:
    """Prints every step of an LLM from now on, until close().

    write: takes each line, without its end (default: to stderr)
    """

    def __init__(self, llm, write: Callable[[str], None] | None = None):
        self.llm, self.scheduler, self.manager = llm, llm.scheduler, llm.scheduler.block_manager
        self.write = write or (lambda line: print(line, file=sys.stderr, flush=True))
        self.letters: dict[int, str] = {}  # arrival -> the request's name
        self.numbers: dict = {}  # launched step -> its number
        self.counter, self.last = itertools.count(), None  # the number of the step that was scheduled last
        self.num_computed: dict[tuple, int] = {}  # order of a sequence -> the most tokens that were ever computed of it
        self.attention: dict[tuple, str] = {}  # order of a sequence -> how its attention was computed last
        self.is_inside, self.originals = False, []
        for name, show in dict(schedule=self._step, update=self._tokens, finish=self._gone, release=self._gone,
                               undo=self._undone).items():
            self._watch(self.scheduler, name, show)
        self._watch(llm, "_branch", self._beams)
        self.write(f"a pool of {self.manager.num_blocks} blocks of {self.manager.block_size} tokens"
                   + f", {self.manager.num_host_blocks} more on the host" * (self.manager.num_host_blocks > 0)
                   + f", attention sees {self.manager.window} tokens" * (self.manager.window > 0))
        self._say("A", "prompt 0..8 of 9 -> 9: tokens 0 to 8 are computed, then token 9 is sampled")
        self._say("[4 5* 6c -]", "block table: own block, shared block, a copy made in this step, out of the window")
        self._say("pool", "A: held by A (Z: by Z or AZ ..), a: by several of A0 A1 .., *: by several requests")
        self._say("", ".: free but still cached, for whoever comes with the same tokens, _: free and empty")

    def close(self) -> None:
        """Leave scheduler and LLM as they were."""
        while self.originals:
            watched, name, original = self.originals.pop()
            setattr(watched, name, original) if original else delattr(watched, name)

    def _watch(self, holder: Any, name: str, show: Callable) -> None:
        method, scheduler = getattr(holder, name), self.scheduler

        @wraps(method)
        def watched(*args, **kwargs):
            if self.is_inside:  # the scheduler calls itself: part of what the outer call does
                return method(*args, **kwargs)
            before = Books(dict(self.manager.key_of_block), {seq: list(seq.block_table) for seq in scheduler.running},
                           {seq: len(seq.token_ids) for seq in scheduler.running + scheduler.waiting},
                           {seq: list(seq.host_table) for seq in scheduler.waiting})
            self.is_inside = True
            try:
                result = method(*args, **kwargs)
            finally:
                self.is_inside = False
            show(before, result, *args)
            return result

        self.originals.append((holder, name, vars(holder).get(name)))
        setattr(holder, name, watched)

    # ---- a step, when it is scheduled

    def _step(self, before: Books, step) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        budget, spent = self.scheduler.max_num_batched_tokens, sum(step.num_tokens)
        self.write("")
        self._arrivals([seq for seq in before.num_known if seq.order[1] not in self.letters])
        self.last = None
        if not step.seqs:
            return self.write("no step: nothing can be computed now")
        self.last = self.numbers[step] = next(self.counter)
        num_tokens = dict(zip(step.seqs, step.num_tokens))
        self.write(f"step {self.last}: {spent} of at most {budget} tokens, "
                   f"for {len(step.seqs)} of {len(running)} running sequences")
        work = [self._work(seq, num_tokens[seq], step) if seq in num_tokens else self._pause(seq, spent == budget)
                for seq in running]
        column = max(map(len, work[:MOST]), default=0)
        self._lines([(self._name(seq), f"{text:<{column}} {self._table(seq, step, WIDTH - LABEL - 1 - column)}")
                     for seq, text in zip(running, work)])
        if waiting:
            self._say(self._name(waiting[0]), self._why_not(waiting[0], step, spent == budget))
            self._items("", [self._name(seq) for seq in waiting[1:]], "behind it: ", " ")
        self._pool()
        self._moves(before, step)
        self._attention(step)
        for seq in step.seqs:
            self.num_computed[seq.order] = max(seq.num_computed_tokens, self.num_computed.get(seq.order, 0))

    def _arrivals(self, seqs: list) -> None:
        requests: dict[int, list] = {}
        for seq in sorted(seqs, key=lambda seq: seq.order[1:]):
            requests.setdefault(seq.order[1], []).append(seq)
        lines = []
        for arrival, samples in requests.items():
            self.letters[arrival] = _letters(len(self.letters))
            prompt, priority = samples[0].token_ids[:samples[0].num_prompt_tokens], samples[0].order[0]
            lines.append(("arrives", self._names(samples) + f", priority {priority}" * (priority != 0)
                          + f", {len(prompt)} prompt tokens: {self._text(prompt)}"))
        self._lines(lines)

    def _work(self, seq, num_tokens: int, step) -> str:
        end, num_prompt_tokens = seq.num_computed_tokens, seq.num_prompt_tokens
        start = end - num_tokens
        if start < seq.num_hit_tokens:  # its K and V are there, and are not written again
            text = f"token {start} again, for its logits"
        elif num_tokens == 1 and start >= num_prompt_tokens:
            text = f"decode {start}"
        elif end > num_prompt_tokens or start < self.num_computed.get(seq.order, 0):
            text = f"recompute {start}..{end - 1}"
        else:
            text = f"prompt {start}..{end - 1} of {num_prompt_tokens}"
        return text + f" -> {end}" * (seq in step.sampled)

    def _pause(self, seq, is_spent: bool) -> str:
        """Why a running sequence computes nothing."""
        if self._candidates(seq):
            return "waits for the other beams"
        if seq.num_new_tokens <= 0:
            return "waits for its token"
        return "waits: the token budget is spent" if is_spent else "waits"

    def _why_not(self, seq, step, is_spent: bool) -> str:
        """Why the first waiting sequence was not admitted. Nobody overtakes it."""
        num_free, seats = self.manager.num_free_blocks, self.scheduler.max_num_seqs
        if seq in step.preempted:
            why = "it was preempted in this step"
        elif len(self.scheduler.running) >= seats:
            why = f"no seat is free, max_num_seqs is {seats}"
        elif seq.min_free_blocks > num_free:
            why = f"free blocks needed {seq.min_free_blocks}, there are {num_free}"
        else:
            why = "the token budget is spent" if is_spent else "too few blocks were free when its turn came"
        return "waits" + " on the host" * bool(seq.host_table) + f": {why}"

    def _moves(self, before: Books, step) -> None:
        """What happened to blocks: found, swapped in, slid out, taken, evicted, copied, registered, preempted."""
        holders, taken, slid = self._holders(), [], []
        came = dict(step.swaps_in)  # host block -> block
        for seq in self.scheduler.running:
            old, table, name = before.tables.get(seq), seq.block_table, self._name(seq)
            hosts = [host for host in before.host_tables.get(seq, ()) if host in came]
            moved = {NULL, *(came[host] for host in hosts)}
            num_old = len(old) if old is not None else cdiv(seq.num_hit_tokens, self.manager.block_size)
            if old is None:  # it was admitted in this step
                self._found(seq, [block for block in table[:num_old] if block not in moved], holders)
            if hosts:
                self._say("swapped in", f"{name}: host {_blocks(hosts)} to {_blocks([came[host] for host in hosts])}")
            slid += [f"{name} {block}" for block, now in zip(old or (), table) if now == NULL != block]
            new = [block for block in table[num_old:] if block not in moved]
            taken += [f"{name} {_blocks(new)}"] if new else []
        self._items("slid out", slid, "of the window: ")
        self._items("taken", taken)
        # A key that has gone, but for a block that stays where it is: that one was only cached anew.
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

    def _found(self, seq, blocks: list[int], holders: dict) -> None:
        """The blocks of an admitted sequence that were there already."""
        shared, cached = ([block for block in blocks if (len(holders[block]) > 1) is want] for want in (True, False))
        others = dict.fromkeys(other for block in shared for other in holders[block] if other is not seq)
        where = [f"{_blocks(shared)} (shared with {self._names(others)})"] if shared else []
        where += [f"{_blocks(cached)} (free, but still cached)"] if cached else []
        num_tokens = min(seq.num_hit_tokens, len(blocks) * self.manager.block_size)
        self._items("found", where, f"{self._name(seq)} {num_tokens} tokens in ")

    def _attention(self, step) -> None:
        """Where the kernel begins to cut a decoding sequence's context into splits: side by side (vLLM's V2), or in
        turn in one program (V1, as without splits)."""
        runner, decodes = self.llm.runner, [seq for seq, count in zip(step.seqs, step.num_tokens) if count == 1]
        size, longest = len(decodes), max(seq.num_computed_tokens for seq in step.seqs)
        shape = None
        if runner.fused:
            shape = runner.graph_shape(step.num_tokens, [seq.num_computed_tokens for seq in step.seqs])
        if shape:  # recorded for sequences of any length
            size, longest = shape.num_seqs, runner.max_model_len
        num_contexts, changed = size * self.llm.config.num_kv_heads, []
        for seq in decodes:
            num_splits, length = splits_of(self.llm, seq.num_computed_tokens)
            how = "in one piece (V1)"
            if num_splits > 1:
                is_v2 = tiles.programs_per_context(num_contexts, tiles.split_bound(longest)) > 1
                how = f"in {num_splits} splits of {length}" + (" (V2)" if is_v2 else " in turn (V1)")
            if how != self.attention.get(seq.order, "in one piece (V1)"):
                changed.append(f"{self._name(seq)} {seq.num_computed_tokens} tokens {how}")
            self.attention[seq.order] = how
        where = "" if runner.kernels is kernel.TRITON else "on a GPU (torch does not split): "
        self._items("attention", changed, where)

    # ---- what comes of it

    def _tokens(self, before: Books, _, step, *__) -> None:
        number, sampled = self.numbers.pop(step, None), []
        for seq in step.sampled:
            new = seq.token_ids[before.num_known.get(seq, len(seq.token_ids)):]
            what = self._text(new) if new else "nothing" if seq in before.num_known else "dropped, it had ended"
            if candidates := self._candidates(seq):
                what = f"{self._text([candidates[0][0]])} (best of {len(candidates)})"
            sampled.append(f"{self._name(seq)} {what}")
        self._items("sampled", sampled, f"in step {number}, read only now: " if number != self.last else "")
        alive = {*self.scheduler.running, *self.scheduler.waiting}
        ended = [seq for seq in step.sampled if seq in before.num_known and seq not in alive]
        self._lines([("finished", self._end(seq) + self._freed(seq, before, ended[i + 1:]))
                     for i, seq in enumerate(ended)])
        if ended:
            self._pool()

    def _beams(self, before: Books, branches: list[tuple], search: BeamSearch) -> None:
        dead = [seq for seq in before.num_known if self._is_beam_of(seq, search) and seq not in search.beams]
        self._lines([("beam ends", self._name(beam) + self._freed(beam, before, dead[i + 1:]))
                     for i, beam in enumerate(dead)])
        for parent, child, token in branches:
            fork = f"shares {_blocks(_real(child.block_table))}" if child.block_table else "computes its tokens again"
            self._say("beam", f"{self._name(child)} goes on with {self._text([token])}"
                      + f", as a fork of {self._name(parent)}: {fork}" * (child is not parent))

    def _gone(self, before: Books, _, seq, *reason) -> None:
        if seq in before.num_known:  # else it had gone already
            is_finished = seq.finish_reason and not seq.request_id.startswith("beam")
            self._say("finished" if is_finished else "retired", self._end(seq) + self._freed(seq, before))

    def _undone(self, before: Books, _, step) -> None:
        number = self.numbers.pop(step, None)
        if step.seqs or step.preempted:
            what = "nothing can be computed" if number is None else f"step {number} failed"
            self._say("undone", f"{what}, {self._names(step.seqs + step.preempted)} will start over")

    def _end(self, seq) -> str:
        reason = "" if seq.stop_reason is None else f": {_fit(repr(seq.stop_reason), 20)}"
        is_named = seq.finish_reason and not seq.request_id.startswith("beam")
        return self._name(seq) + (f" ({seq.finish_reason}{reason})" if is_named else "")

    def _freed(self, seq, before: Books, later=()) -> str:
        """What became of the blocks of a sequence that has gone, and the `later` ones after it."""
        held_later = {block for other in later for block in before.tables.get(other, ())}
        blocks = _real(before.tables.get(seq, ()))[::-1]
        free = [block for block in blocks if not self.manager.ref_counts[block] and block not in held_later]
        held, lost = [b for b in blocks if b not in free], [b for b in free if b not in self.manager.key_of_block]
        cached = f"all but {_blocks(lost)}" if lost else "all"
        return (f", frees {_blocks(free)} ({cached if len(lost) < len(free) else 'none'} cached)" * bool(free)
                + f", others hold {_blocks(held)}" * bool(held))

    # ---- pictures and words

    def _pool(self) -> None:
        """A character for each block. Of a large pool, rows that nobody holds a block of are left out."""
        holders, count, row = self._holders(), self.manager.num_blocks, 70
        cells = "".join(self._cell(block, holders.get(block)) for block in range(count))
        num_shared = sum(len(seqs) > 1 for seqs in holders.values())
        num_cached, num_empty = cells.count("."), cells.count("_")
        counts = f"{len(holders)} held ({num_shared} shared), {num_cached} free but cached, {num_empty} empty"
        self._say("pool", f"{_tens(cells)}  {counts}" if count <= 30 else counts)
        if count > 30:
            self._lines([(f"{start:>10}", _tens(cells[start:start + row])) for start in range(0, count, row)
                         if count <= row or cells[start:start + row].strip("._")], most=4)

    def _cell(self, block: int, seqs: list | None) -> str:
        if not seqs:
            return "." if block in self.manager.key_of_block else "_"
        name, *others = {self.letters[seq.order[1]] for seq in seqs}
        return "*" if others else name[-1] if len(seqs) == 1 else name[-1].lower()

    def _table(self, seq, step, columns: int) -> str:
        copies, ref_counts = {copy for _, copy in step.copies}, self.manager.ref_counts
        marks = ["-" if block == NULL else f"{block}" + "c" * (block in copies) + "*" * (ref_counts[block] > 1)
                 for block in seq.block_table]
        if len(" ".join(marks)) > columns - 2:  # leave some out: what is new is at the end
            marks[2:3] = [".."]
            while len(marks) > 3 and len(" ".join(marks)) > columns - 2:
                del marks[3]
        return f"[{' '.join(marks)}]"

    def _holders(self) -> dict[int, list]:
        """Held block -> the sequences whose tables list it."""
        holders: dict[int, list] = {}
        for seq in self.scheduler.running:
            for block in _real(seq.block_table):
                holders.setdefault(block, []).append(seq)
        return holders

    def _name(self, seq) -> str:
        is_one_of_several = seq.sampling.params.n > 1 or seq.request_id.startswith("beam")
        return self.letters.get(seq.order[1], "?") + f"{seq.order[2]}" * is_one_of_several

    def _candidates(self, seq) -> list[tuple] | None:
        """A paused beam's best next tokens, (token, log probability)."""
        return seq.listener.candidates.get(seq) if isinstance(seq.listener, BeamSearch) else None

    def _is_beam_of(self, seq, search: BeamSearch) -> bool:
        return seq.request_id == f"beam {search.arrival}"

    def _names(self, seqs) -> str:
        return _listing([self._name(seq) for seq in seqs], " ", 40)

    def _text(self, token_ids: list[int]) -> str:
        """Tokens as text in quotes, without a tokenizer as numbers."""
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


def splits_of(llm, seq_len: int) -> tuple[int, int]:
    """How many splits the kernel cuts a context of so many tokens into, and their length: kernel.split_length in Python."""
    c, runner = llm.config, llm.runner
    tile = tiles.tile_config("decode", c.num_heads // c.num_kv_heads, c.head_dim, runner.dtype.itemsize,
                              tiles.shared_memory(runner.device), runner.kv_dtype.itemsize)["TILE_N"]
    sixteenth, least = cdiv(seq_len, 16 * tile) * tile, cdiv(seq_len, tiles.MAX_SPLITS * tile) * tile
    length = max(min(max(sixteenth, tiles.MIN_SPLIT), tiles.MID_SPLIT), least)
    return cdiv(seq_len, length) - (max(seq_len - c.window, 0) // length if c.window else 0), length


def _real(table) -> list[int]:
    return [block for block in table if block != NULL]


def _letters(number: int) -> str:
    """A .. Z, AA, AB .."""
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _tens(cells: str) -> str:
    return " ".join(cells[start:start + 10] for start in range(0, len(cells), 10))


def _blocks(blocks: list[int]) -> str:
    return _listing(list(map(str, blocks)), " ", 30)


def _listing(items: list[str], separator: str, columns: int) -> str:
    """As many items as fit, at least one, and how many do not."""
    ends = list(itertools.accumulate(_columns(item) + len(separator) for item in items))
    if len(items) <= 1 or ends[-1] <= columns + len(separator):
        return separator.join(items)
    count = max(1, sum(end <= columns - len(f" and {len(items)} more") + len(separator) for end in ends))
    return f"{separator.join(items[:count])} and {len(items) - count} more"


def _columns(text: str) -> int:
    """Columns of a terminal: East Asian characters and most emoji take two."""
    return len(text) + sum(unicodedata.east_asian_width(char) in "WF" for char in text)


def _fit(text: str, columns: int) -> str:
    if _columns(text) <= columns:
        return text
    return text[:sum(end <= columns - 3 for end in itertools.accumulate(map(_columns, text)))] + "..."
