"""The output of `--trace`: every step of the engine, for a reader who wants to watch the pool being paged.

A `Trace` prints the frames of a run (frames.py), as they come. A step of two prompts with a common beginning:

    step 3: 2 of at most 8192 tokens, for 2 of 2 running sequences
      A           decode 13 -> 14 [0* 1* 2 4]
      B           decode 12 -> 13 [0* 1* 3 5]
      pool        **ABAB____ __________ ____  6 held (2 shared), 0 free but cached, 18 empty
      taken       B 5
      sampled     A ' me', B ';'

With data_parallel_size each step is one GPU's. Its section shows all pools, and where it admitted sequences to:

      placed      C on GPU 1
      pool 0      AAAA______  4 held (0 shared), 0 free but cached, 6 empty
      pool 1      BBBCCC____  6 held (0 shared), 0 free but cached, 4 empty

A line has at most 100 columns: the first of many sequences or blocks are shown, and the others are counted.
"""
import os
import sys
import textwrap
import unicodedata
from collections.abc import Callable
from functools import partial
from typing import Any

from nanopaged.features.frames import NULL, Frame, Frames, Words, holders_of
from nanopaged.progress import counted

WIDTH = 100  # columns of a line
LABEL = 14  # columns of a line's label
MOST = 10  # lines of a kind in one step
NOTES = {"best_of": " (best of {best_of})", "allowed": " (one of {allowed} that its grammar allows)",
         "forced": ", forced {forced}", "drafts": " ({right} of {drafts} drafts came true)"}  # of a sampled token
BOLD, RED, GREEN, YELLOW, CYAN = 1, 31, 32, 33, 36  # in a terminal's escape sequences
COLORS = {"found": GREEN, "registered": GREEN, "swapped in": GREEN, "copied": YELLOW, "evicted": RED, "preempted": RED,
          "undone": RED, "sampled": CYAN}  # label -> its colour


class Trace:
    """Prints every step of an LLM until close().

    write: a function that takes each line without its line end (default: print to stderr)
    """

    def __init__(self, llm: Any, write: Callable[[str], object] | None = None):
        self.write = write or _print
        self.frames = Frames(llm, self.show)
        self.close = self.frames.close
        self.run = run = self.frames.header()
        self.several = run["pools"] > 1
        self.num_prompt_tokens: dict[str, int] = {}
        self.write(f"on each of {run['pools']} GPUs, " * self.several
                   + f"a pool of {counted(run['blocks'], 'block')} of {counted(run['block_size'], 'token')}"
                   + f", {run['host_blocks']} more on the host" * (run["host_blocks"] > 0)
                   + f", attention sees {run['window']} tokens" * (run["window"] > 0))
        self._say("A", "prompt 0..8 of 9 -> 9: tokens 0 to 8 are computed, then token 9 is sampled")
        self._say("[4 5* 6c -]", "block table: own block, shared block, a copy made in this step, out of the window")
        self._say("pool", "A: held by A (Z: by Z or AZ ..), a: by several of A0 A1 .., *: by several requests")
        self._say("", ".: free but still cached, for whoever comes with the same tokens, _: free and empty")

    def show(self, frame: Frame) -> None:
        """Print what happened."""
        self.num_prompt_tokens |= {name: seq[2] for name, seq in frame.seqs.items()}
        self.holders = [holders_of({name: table for name, (where, table, _) in self.frames.tables.items()
                                    if where == pool}) for pool in range(self.run["pools"])]
        if frame.kind in ("step", "idle"):
            self._step(frame)
        self._tokens(frame)
        for name, words, parent, blocks in frame.beams:
            shares = f"shares {_blocks(blocks)}" if blocks else "computes its tokens again"
            fork = f", as a fork of {parent}: {shares}" if parent else ""
            self._say("beam", f"{name} goes on with {_text(words)}{fork}")
        if frame.undone:
            what = "nothing can be computed" if frame.step is None else f"step {frame.step} failed"
            self._say("undone", f"{what}, {_names(frame.undone)} will start over")

    # ---- a step

    def _step(self, frame: Frame) -> None:
        """An idle step has no more than arrivals and placements."""
        where = f" on GPU {frame.pool}" * self.several
        self.write("")
        self._lines([("arrives", _names(names) + f", priority {priority}" * (priority != 0)
                      + f", {count} prompt tokens: {_text(words)}") for names, priority, count, words in frame.arrived])
        num_computing = sum(end > 0 for _, _, _, end, *_ in frame.work)
        self.write(f"no step{where}: nothing can be computed now" if frame.kind == "idle" else
                   f"step {frame.step}{where}: {frame.num_tokens} of at most {frame.budget} tokens, "
                   f"for {num_computing} of {len(frame.work)} running sequences")
        work = [self._work(*row) for row in frame.work]
        column = max(map(len, work[:MOST]), default=0)
        self._lines([(row[0], f"{text:<{column}} {self._table(row[0], frame, WIDTH - LABEL - 1 - column)}")
                     for row, text in zip(frame.work, work)])
        if frame.waits:
            self._say(*frame.waits[0])
            self._items("", [name for name, _ in frame.waits[1:]], "behind it: ", " ")
        self._items("placed", [f"{name} on GPU {pool}" for name, pool in frame.placed])
        for pool in range(self.run["pools"] if frame.kind == "step" else 0):
            self._pool(pool)
        self._moves(frame)
        self._items("draft", [f"{name} {_text(words)}" + ("" if where is None else f" from token {where}")
                              for name, words, where, _ in frame.drafted])
        together = [f"{_names(names)} tokens {start}..{end - 1}" for names, start, end in frame.together or []]
        self._items("attention", together, "K and V that are read once for all (cascade): ")
        if whole := [name for name, _, num_splits, *_ in frame.attention if num_splits == 1]:
            self._say("attention", f"{_names(whole)} in one piece (V1)")
        self._items("attention", [f"{name} {count} tokens in {num_splits} splits of {length}"
                                  + (" (V2)" if is_v2 else " in turn (V1)")
                                  for name, count, num_splits, length, is_v2 in frame.attention if num_splits > 1],
                    "" if self.run["attention"] == "triton" else "on a GPU (torch does not split): ")

    def _work(self, name: str, kind: str, start: int, end: int, samples: bool, num_drafts: int) -> str:
        """The tokens that a sequence computes in this step."""
        if not end:
            return kind
        text = {"again": f"token {start} again, for its logits",
                "decode": f"decode {start}" + f" and {num_drafts} drafts" * (num_drafts > 0),
                "prompt": f"prompt {start}..{end - 1} of {self.num_prompt_tokens[name]}"}
        return text.get(kind, f"{kind} {start}..{end - 1}") + f" -> {end}" * samples

    def _moves(self, frame: Frame) -> None:
        """The events of blocks: found, swapped in, slid out, taken, evicted, copied, registered, preempted."""
        for name, num_tokens, shared, others, free in frame.found:
            where = [f"{_blocks(shared)} (shared with {_names(others)})"] * bool(shared)
            where += [f"{_blocks(free)} (free, but still cached)"] * bool(free)
            self._items("found", where, f"{name} {num_tokens} tokens in ")
        self._lines([("swapped in", f"{name}: host {_blocks(hosts)} to {_blocks(blocks)}")
                     for name, hosts, blocks in frame.swapped_in])
        self._items("slid out", [f"{name} {block}" for name, block in frame.slid_out], "of the window: ")
        self._items("taken", [f"{name} {_blocks(blocks)}" for name, blocks in frame.taken])
        self._items("evicted", frame.evicted, "reused, and no longer cached: ", " ")
        self._lines([("copied", f"{block} to {copy}, for {_names(writers)} to write in; "
                      f"{block} is kept by {_names(others) or 'nobody'} (copy-on-write)")
                     for block, copy, writers, others in frame.copied])
        self._items("registered", frame.registered, "can be shared now: ", " ")
        for name, blocks, hosts in frame.preempted[:MOST]:
            self._say("preempted", f"{name}: swapped out, {_blocks(blocks)} to host {_blocks(hosts)}" if hosts else
                      f"{name}: gives back {_blocks(blocks)}, its tokens will be computed again")

    # ---- the results of a step, and what happens between two steps

    def _tokens(self, frame: Frame) -> None:
        """What was sampled, and what has ended."""
        sampled = []
        for name, words, notes in frame.sampled:
            what = "dropped, it had ended" if "dropped" in notes else "nothing" if words is None else _text(words)
            texts = notes | {"forced": _text(notes.get("forced", ""))}
            what += "".join(text.format(**texts) for note, text in NOTES.items() if note in notes)
            sampled.append(f"{name} {what}")
        when = f"in step {frame.step}: " * self.several
        self._items("sampled", sampled, f"in step {frame.step}, read only now: " if frame.late else when)
        lines = []
        for name, how, reason, stop, free, lost, held in frame.ended:
            more = "" if stop is None else f": {_fit(repr(stop), 20)}"
            cached = "none" if len(lost) == len(free) else f"all but {_blocks(lost)}" if lost else "all"
            lines.append((how, name + (f" ({reason}{more})" if reason else "")
                          + f", frees {_blocks(free)} ({cached} cached)" * bool(free)
                          + f", others hold {_blocks(held)}" * bool(held)))
        self._lines(lines)
        if frame.ended and frame.kind == "tokens":
            self._pool(frame.pool)

    # ---- pictures and words

    def _pool(self, pool: int) -> None:
        """A character for each block. A large pool's rows without a held block are left out."""
        holders, count, row = self.holders[pool], self.run["blocks"], 70  # row: blocks of a line
        marks = ["." if (pool, block) in self.frames.cached else "_" for block in range(count)]
        for block, names in holders.items():
            request, *others = {name.rstrip("0123456789") for name in names}
            marks[block] = "*" if others else request[-1] if len(names) == 1 else request[-1].lower()
        cells = "".join(marks)
        num_shared = sum(len(names) > 1 for names in holders.values())
        counts = (f"{len(holders)} held ({num_shared} shared), {cells.count('.')} free but cached, "
                  f"{cells.count('_')} empty")
        self._say("pool" + f" {pool}" * self.several, f"{_tens(cells)}  {counts}" if count <= 30 else counts)
        if count > 30:
            self._lines([(f"{start:>10}", _tens(cells[start:start + row])) for start in range(0, count, row)
                         if count <= row or cells[start:start + row].strip("._")], most=4)

    def _table(self, name: str, frame: Frame, columns: int) -> str:
        """The block table in at most `columns` columns."""
        pool, table, _ = self.frames.tables[name]
        holders, copies = self.holders[pool], [copy for _, copy, *_ in frame.copied]
        marks = ["-" if block == NULL else f"{block}" + "c" * (block in copies) + "*" * (len(holders[block]) > 1)
                 for block in table]
        if len(" ".join(marks)) > columns - 2:  # leave out blocks in the middle: new blocks are at the end
            marks[2:3] = [".."]
            while len(marks) > 3 and len(" ".join(marks)) > columns - 2:
                del marks[3]
        return f"[{' '.join(marks)}]"

    def _say(self, label: str, text: str) -> None:
        self.write(_fit(f"  {label:<{LABEL - 3}} {text}".rstrip(), WIDTH))

    def _items(self, label: str, items: list, before: str = "", separator: str = ", ") -> None:
        if items:
            self._say(label, before + _listing(items, separator, WIDTH - LABEL - len(before)))

    def _lines(self, lines: list[tuple[str, str]], most: int = MOST) -> None:
        for line in lines[:most]:
            self._say(*line)
        if len(lines) > most:
            self._say("", f"and {len(lines) - most} more")


def _print(line: str) -> None:
    """Print a line on stderr: on a terminal a step's title in bold, and some labels in colour."""
    if line and sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR"):
        label, text = (line[:LABEL], line[LABEL:]) if line.startswith(" ") else (line, "")
        if color := COLORS.get(label.strip(), BOLD if not text else None):
            line = f"\x1b[{color}m{label}\x1b[0m{text}"
    print(line, file=sys.stderr, flush=True)


def _text(words: Words) -> str:
    """Tokens as text in quotes, or as numbers if the LLM has no tokenizer."""
    return _fit(repr(words) if isinstance(words, str) else " ".join(map(str, words)), 60)


def _tens(cells: str) -> str:
    return " ".join(textwrap.wrap(cells, 10))


def _listing(items: list, separator: str, columns: int) -> str:
    """The items that fit, at least one of them, and the number of the others."""
    words = list(map(str, items))
    text, count = separator.join(words), min(len(words), columns)
    if count <= 1 or _columns(text) <= columns:
        return text
    room = columns - len(f" and {len(words)} more")
    while count > 1 and _columns(separator.join(words[:count])) > room:
        count -= 1
    return f"{separator.join(words[:count])} and {len(words) - count} more"


_names = partial(_listing, separator=" ", columns=40)
_blocks = partial(_listing, separator=" ", columns=30)


def _columns(text: str) -> int:
    """The width of a text in a terminal's columns: East Asian characters and most emoji take two columns."""
    return len(text) + sum(unicodedata.east_asian_width(char) in "WF" for char in text)


def _fit(text: str, columns: int) -> str:
    if _columns(text) <= columns:
        return text
    while _columns(text) > columns - 3:
        text = text[:-1]
    return text + "..."
