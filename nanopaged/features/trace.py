"""The output of `--trace`: every step of the engine, for a reader who wants to watch the pool being paged.

A `Trace` prints the frames of a run (frames.py), as they come. A step of two prompts with a common beginning:

    step 3: 2 of at most 8192 tokens, for 2 of 2 running sequences
      A           decode 13 -> 14 [0* 1* 2 4]
      B           decode 12 -> 13 [0* 1* 3 5]
      pool        **ABAB____ __________ ____  6 held (2 shared), 0 free but cached, 18 empty
      taken       B 5
      sampled     A ' me', B ';'

With data_parallel_size each step is one GPU's, and shows all pools. A line has at most 100 columns: the first of many
sequences or blocks are shown, and the others are counted.
"""
import os
import re
import sys
import unicodedata
from collections.abc import Callable
from contextlib import closing
from typing import Any, ContextManager

from nanopaged.cli.status import counted
from nanopaged.features.frames import NULL, Frame, Frames

LABEL, WIDTH = 14, 100  # columns of a line's label, and of a line
MOST = 10  # lines of a kind in one step
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # of groups of layers
ROW = 70  # blocks in a line of a large pool
LEGEND = """
  A           prompt 0..8 of 9 -> 9: tokens 0 to 8 are computed, then token 9 is sampled
  [4 5* 6c -] block table: own block, shared block, a copy made in this step, out of the window
  pool        A: held by A (Z: by Z or AZ ..), a: by several of A0 A1 .., *: by several requests
              .: free but still cached, for whoever comes with the same tokens, _: free and empty"""
GROUP_LEGEND = """
  [0 1] [- 2] the block tables of all groups, those with a sliding window behind those without
  group       0: the block serves group 0, whose layers keep all, 1: it serves group 1, .."""
SLOT_LEGEND = """
  states      A: the slot of A's recurrent state, .: a snapshot, from which a text may go on, _: empty"""
# What is printed of events (of Frame): {2} is item 2. A part in [] is left out if its last item is empty; then what
# stands behind its | is printed.
TITLE = ("[on each of {0} GPUs, ]a pool of {1} of {2}[, {3} more on the host][, attention sees {4} tokens]"
         "[, {5} have blocks of their own]")
ARRIVED = "{0}[, priority {1}], {2} prompt tokens: {3}"
WORK = {"again": "token {2} again, for its logits", "decode": "decode {2}[ and {5} drafts]",
        "prompt": "prompt {2}..{7} of {6}", "recompute": "recompute {2}..{7}", "forced": "forced {2}..{7}"}
EVENTS = {
    "forked": "{0} after {1} tokens in {2} (shared with {3})",
    "found": "{0} {1} tokens[ in {2} (shared with {3})][ in {4} (free, but still cached)]",
    "swapped_in": "{0}: host {1} to {2}",
    "slid_out": "{0} {1}",
    "taken": "{0} {1}",
    "evicted": "no longer cached: {0}",
    "copied": "{0} to {1}, for {2} to write in; {0} is kept by [{3}|nobody] (copy-on-write)",
    "registered": "can be shared now: {0}",
    "preempted": "{0}: [swapped out, {1} to host {2}|gives back {1}, its tokens will be computed again]",
    "beams": "{0} goes on with {1}",
    "drafted": "{0} {1}",
    "sampled": "{0} [{1}|nothing][ (one of {2} that its grammar allows)][, forced {3}][ ({4} of {5} drafts came true)]",
    "ended": "{0}[ ({1})][: {2!r}][, frees {3}][, others hold {4}]",
    "undone": "{0} will start over"}
JOINED = "slid_out", "taken", "drafted", "sampled"  # events of these kinds share a line
BOLD, RED, GREEN, YELLOW, CYAN = 1, 31, 32, 33, 36  # in a terminal's escape sequences
COLORS = {"found": GREEN, "registered": GREEN, "swapped in": GREEN, "copied": YELLOW, "evicted": RED, "preempted": RED,
          "undone": RED, "sampled": CYAN}  # label -> its colour


def prepare(args: Any) -> Callable[[Any], ContextManager]:
    """For the command line, with --trace: the result prints what an LLM does meanwhile."""
    return lambda llm: closing(Trace(llm))


class Trace:
    """Prints every step of an LLM until close().

    write: a function that takes each line without its line end (default: print to stderr)
    """

    def __init__(self, llm: Any, write: Callable[[str], object] | None = None):
        self.write, self.tokenizer = write or _print, llm.tokenizer
        self.frames = Frames(llm, self.show)
        self.close = self.frames.close
        self.run = run = self.frames.header()
        self.several = run["pools"] > 1
        self.holders: dict[tuple[int, int], list[str]] = {}  # (pool, block) -> sequences
        self.slots: dict[int, dict[int, str]] = {}  # pool -> slots of recurrent states, as in Frame
        self.groups: dict[tuple[int, int], int] = {}  # (pool, block) -> the group of layers that it serves
        groups = len(run["groups"]) > 1 and counted(len(run["groups"]), "group") + " of layers"
        title = self._text(TITLE, [self.several and run["pools"], counted(run["blocks"], "block"), counted(
            run["block_size"], "token"), run["host_blocks"], run["window"], groups])
        for line in (title + LEGEND + GROUP_LEGEND * bool(groups) + SLOT_LEGEND * bool(run["slots"])).splitlines():
            self.write(line)

    def show(self, frame: Frame) -> None:
        """Print what happened. A step begins with a blank line, and what follows belongs to it."""
        self.holders, self.slots[frame.pool] = {}, frame.slots
        for name, (pool, table, _, *more) in self.frames.tables.items():
            for group, blocks in enumerate([table, *more]):
                for block in blocks:
                    self.holders.setdefault((pool, block), []).append(name)
                    self.groups[pool, block] = group
        if frame.kind == "step":
            self.write("")
        self._lines([("arrived", self._text(ARRIVED, event)) for event in frame.arrived])
        if frame.kind == "step":
            self._step(frame)
        for kind, template in EVENTS.items():
            events = vars(frame)[kind]
            if events and not isinstance(events[0], list):
                events = [[events]]  # blocks, or names
            texts = [self._text(template, event) for event in events]
            if kind in JOINED and texts:
                texts = [_listing(texts, ", ", WIDTH - LABEL)]
            when = f"in step {frame.step}: " * (kind == "sampled" and (frame.late or self.several))
            self._lines([(kind.replace("_", " "), when + text) for text in texts])
        if frame.kind == "tokens" and frame.ended:
            self._pool(frame.pool)

    def _step(self, frame: Frame) -> None:
        """Who computes what, with which block table; who waits; and the pools."""
        counts = [end - start for _, _, start, end, *_ in frame.work]
        self.write(f"step {frame.step}{f' on GPU {frame.pool}' * self.several}: {sum(counts)} of at most "
                   f"{frame.budget} tokens, for {sum(map(bool, counts))} of {len(counts)} running sequences")
        work = [self._text(WORK.get(row[1], "{1}") + "[ -> {4}]", [*row, row[3] - 1]) for row in frame.work]
        column = max(map(len, work[:MOST]))
        self._lines([(row[0], f"{text:<{column}} {self._table(row[0], frame, WIDTH - LABEL - 1 - column)}")
                     for row, text in zip(frame.work, work)])
        self._lines(frame.waits, 2)
        for pool in range(self.run["pools"]):
            self._pool(pool)

    # ---- pictures and words

    def _pool(self, pool: int) -> None:
        """A character for each block. A large pool's rows without a held block are left out."""
        cells = "".join(_cell(self.holders.get((pool, block)), block in self.frames.cached[pool])
                        for block in range(self.run["blocks"]))
        held = [names for (where, block), names in self.holders.items() if where == pool and block != NULL]
        counts = (f"{len(held)} held ({sum(len(names) > 1 for names in held)} shared), {cells.count('.')} free but "
                  f"cached, {cells.count('_')} empty")
        is_small = len(cells) <= 30
        self._lines([("pool" + f" {pool}" * self.several, f"{_tens(cells)}  {counts}" if is_small else counts)])
        starts = [] if is_small else [start for start in range(0, len(cells), ROW)
                                      if cells[start:start + ROW].strip("._")]
        self._lines([(f"{start:>10}", _tens(cells[start:start + ROW])) for start in starts], 4)
        if len(self.run["groups"]) > 1:
            serves = "".join(DIGITS[self.groups[pool, block] % len(DIGITS)] if cell not in "._" else "_"
                             for block, cell in enumerate(cells))
            rows = [serves] if is_small else [serves[start:start + ROW] for start in starts]
            self._lines([("group", _tens(row)) for row in rows], 4)
        if self.run["slots"]:
            slots = self.slots.get(pool, {})
            states = "".join(_cell([slots[slot]] if slots.get(slot) else None, slot in slots)
                             for slot in range(self.run["slots"]))
            starts = [start for start in range(0, len(states), ROW) if states[start:start + ROW].strip("_")]
            self._lines([("states" if start == 0 else f"{start:>10}", _tens(states[start:start + ROW]))
                         for start in starts], 4)

    def _table(self, name: str, frame: Frame, columns: int) -> str:
        """The block tables in at most `columns` columns."""
        pool, table, _, *more = self.frames.tables[name]
        copies, tables = [copy for _, copy, *_ in frame.copied], [table, *more]
        return " ".join(self._marks(pool, table, copies, (columns + 1) // len(tables) - 1) for table in tables)

    def _marks(self, pool: int, table: list[int], copies: list[int], columns: int) -> str:
        marks = ["-" if block == NULL else f"{block}" + "c" * (block in copies)
                 + "*" * (len(self.holders[pool, block]) > 1) for block in table]
        while len(marks) > 3 and len(" ".join(marks)) > columns - 2:  # leave out some in the middle: new ones come last
            marks[2:4] = [".."]
        return f"[{' '.join(marks)}]"

    def _text(self, template: str, event: list) -> str:
        items = [self._words(item) if isinstance(item, tuple) else _listing(item) if isinstance(item, list) else item
                 for item in event]
        return re.sub(r"\[([^]|]*\{(\d)[^]|]*)\|?([^]]*)\]", lambda part: part[1] if items[int(part[2])] else part[3],
                      template).format(*items)

    def _words(self, tokens: tuple[int, ...]) -> str:
        """Tokens as text in quotes, or as numbers if the LLM has no tokenizer."""
        tokens = tokens[:100]  # more do not fit into a line
        text = self.tokenizer and self.tokenizer.decode(tokens, skip_special_tokens=False)
        return _fit(repr(text) if text else " ".join(map(str, tokens)), 60)

    def _lines(self, lines: list, most: int = MOST) -> None:
        more = [("", f"and {len(lines) - most} more")] * (len(lines) > most)
        for label, text in lines[:most] + more:
            self.write(_fit(f"  {label:<{LABEL - 3}} {text}", WIDTH))


def _print(line: str) -> None:
    """Print a line on stderr: on a terminal a step's title in bold, and some labels in colour."""
    if line and sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR"):
        label, text = (line[:LABEL], line[LABEL:]) if line.startswith(" ") else (line, "")
        if color := COLORS.get(label.strip(), BOLD if not text else None):
            line = f"\x1b[{color}m{label}\x1b[0m{text}"
    print(line, file=sys.stderr, flush=True)


def _cell(names: list[str] | None, is_cached: bool) -> str:
    """The character of a block."""
    if not names:
        return "." if is_cached else "_"
    request, *others = {name.rstrip("0123456789") for name in names}
    return "*" if others else request[-1] if len(names) == 1 else request[-1].lower()


def _tens(cells: str) -> str:
    return " ".join(cells[start:start + 10] for start in range(0, len(cells), 10))


def _listing(items: list, separator: str = " ", columns: int = 40) -> str:
    """The items that fit, at least one of them, and the number of the others. Nothing if there are none."""
    words, text = list(map(str, items)), ""
    for count in range(min(len(words), columns), 0, -1):
        text = separator.join(words[:count]) + f" and {len(words) - count} more" * (count < len(words))
        if _columns(text) <= columns:
            break
    return text


def _columns(text: str) -> int:
    """The width of a text in a terminal's columns: East Asian characters and most emoji take two columns."""
    return len(text) + sum(unicodedata.east_asian_width(char) in "WF" for char in text)


def _fit(text: str, columns: int) -> str:
    if _columns(text) <= columns:
        return text
    while _columns(text) > columns - 3:
        text = text[:-1]
    return text + "..."
