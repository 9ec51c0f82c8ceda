"""What --trace prints. A `Witness` holds each frame of a step to what the scheduler and the block manager really did,
which it takes down by other means: at every launch, and from inside the block manager."""
import io
import re
import sys
import unicodedata
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest

import nanopaged
from engine import Sampled
from nanopaged import LLM, SamplingParams, engine
from nanopaged.features.frames import NULL, Frames, letters
from nanopaged.features.trace import Trace, _fit, _listing
from nanopaged.tests.helpers import complaint, load
from nanopaged.tests.test_cli import Screen

LEGEND = 5  # lines before the first step


def small(model="qwen3", *, lookahead=0, text=False, **options) -> LLM:
    """An engine with few blocks. Without `text` it has no tokenizer, and the trace shows token ids, which can be read
    back. With it, the model is the bundled one."""
    options = dict(num_blocks=24, block_size=4, max_num_seqs=256) | options
    llm = load("shakespeare" if text else model, device="cpu", lookahead=lookahead, **options)
    llm.tokenizer = llm.tokenizer if text else None
    return llm


def traced(llm: LLM) -> list[str]:
    """The lines of the trace, as they come."""
    Trace(llm, (lines := []).append)
    return lines


def greedy(max_tokens=16, **settings) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **settings)


def real(table):
    return [block for block in table if block != NULL]


class Witness:
    """Notes the frames of an LLM before they are shown, and compares each with the engine."""

    def __init__(self, llm, frames: Frames):
        self.llm, self.source, self.show, frames.show = llm, frames, frames.show, self.note
        self.frames, self.tables, self.known = [], [{}], []
        self.cached = [set() for _ in llm.engines]  # what the events add up to
        self.sampled = Counter()  # tokens that were read
        for gpu, (runner, one) in enumerate(zip(llm.runners, llm.engines)):
            self.watch(one.scheduler, did := SimpleNamespace(taken=[], evicted=[], found=[]))  # since the last launch
            runner.launch = partial(self.launch, gpu, one.scheduler, runner.launch, did)

    def name(self, seq):
        several = seq.sampling.params.n > 1 or seq.request_id.startswith("beam")
        return letters(seq.order.arrival) + (str(seq.order.number) if several else "")

    def watch(self, scheduler, did):
        """Note the blocks that are taken, evicted, and found."""
        manager = scheduler.block_manager

        def take(pop=manager._pop_free_block):
            did.taken.append(pop())
            return did.taken[-1]

        def evict(block, evict=manager.evict):
            did.evicted += [block] * (block in manager.key_of_block)
            evict(block)

        def start(seq, hit, start=manager.start):
            held, free = ([block for block in real(hit.blocks) if (manager.ref_counts[block] > 0) == is_held]
                          for is_held in (True, False))
            if held or free:
                others = [self.name(other) for other in scheduler.running if set(held) & set(other.block_table)]
                did.found.append([self.name(seq), held, others, free])
            start(seq, hit)

        manager._pop_free_block, manager.evict, manager.start = take, evict, start

    def note(self, frame):
        cached, before = self.cached[frame.pool], self.tables[-1]
        assert cached >= set(frame.evicted)
        self.cached[frame.pool] = cached - set(frame.evicted) | set(frame.registered)
        for name, _, _, free, held in frame.ended:
            assert sorted(free + held) == sorted(real(before.get(name, [0, []])[1]))
        self.frames.append(frame)
        self.tables.append(self.source.tables)
        self.show(frame)

    def launch(self, gpu, scheduler, launch, did, step):
        frame, manager = self.frames[-1], scheduler.block_manager
        running, counts = {self.name(seq): seq for seq in scheduler.running}, dict(zip(step.seqs, step.num_tokens))
        positions = dict(zip(step.sampled, step.positions))
        assert (frame.kind, frame.pool) == ("step", gpu)
        assert [(name, end - start, end, position) for name, _, start, end, position, *_ in frame.work] == [
            (name, counts.get(seq, 0), seq.num_computed_tokens, positions.get(seq, 0)) for name, seq in running.items()]
        assert [row[0] for row in frame.work if row[1] == "again"] == [name for name, seq in running.items() if
            seq in counts and seq.num_computed_tokens - counts[seq] < seq.num_found_tokens]
        assert all(self.source.tables[name][:2] == [gpu, seq.block_table] for name, seq in running.items())
        assert self.cached[gpu] == self.source.cached[gpu] == manager.key_of_block.keys()
        swaps_in, swaps_out = (vars(step).get(f"swaps_{way}", []) for way in ("in", "out"))
        moved = [copy for _, copy in step.copies] + [block for _, block in swaps_in]
        assert sorted(moved + [block for _, blocks in frame.taken for block in blocks]) == sorted(did.taken)
        assert frame.evicted == sorted(did.evicted) and frame.registered == step.cached
        assert [[name, held, others, free] for name, _, held, others, free in frame.forked + frame.found] == did.found
        assert [(block, copy) for block, copy, *_ in frame.copied] == step.copies
        assert all(holders == [name for name, seq in running.items() if block in seq.block_table]
                   for event in frame.copied for block, holders in zip(event, (event[3], event[2])))
        assert {pair for _, *hosts in frame.swapped_in for pair in zip(*hosts)} == set(swaps_in)
        slid_out = {name: [block for block, now in zip(self.tables[-2].get(name, [0, []])[1], seq.block_table)
                           if now == NULL != block] for name, seq in running.items()}
        assert dict(frame.slid_out) == {name: blocks for name, blocks in slid_out.items() if blocks}
        assert {self.name(seq) for seq in step.preempted} <= {name for name, *_ in frame.preempted}
        assert [pair for _, blocks, hosts in frame.preempted for pair in zip(blocks, hosts)] == swaps_out
        assert bool(frame.waits) >= bool(scheduler.waiting)
        assert all(tokens == (*running[name].token_ids[running[name].num_prompt_tokens:],) and last == tokens[-1:]
                   for name, last, tokens in frame.beams)
        self.known.append({name: seq.token_ids[:seq.num_computed_tokens] for name, seq in running.items()})
        for noted in vars(did).values():
            noted.clear()
        read = launch(step)

        def read_and_note(*args):
            result = read(*args)
            self.sampled.update(zip(map(self.name, step.sampled), result.tokens))
            return result

        read_and_note.is_done = read.is_done
        return read_and_note

    def assert_all_told(self, num_steps):
        """Every step that was computed has a frame, and every token that is told was sampled."""
        assert num_steps == len({frame.step for frame in self.frames if frame.kind == "step"}) > 0
        told = Counter((name, token) for frame in self.frames for name, tokens, *_ in frame.sampled for token in tokens)
        assert told <= self.sampled and (told or any(frame.beams for frame in self.frames))


def witnessed(llm) -> tuple[Witness, list[str]]:
    trace = Trace(llm, (lines := []).append)
    return Witness(llm, trace.frames), lines


def sections(lines: list[str]) -> list[list[str]]:
    """The sections of the launched steps, each from its header on."""
    starts = [i for i, line in enumerate(lines) if line.startswith("step ")]
    ends = [next((j for j in range(i, len(lines)) if lines[j] == ""), len(lines)) for i in starts]
    return [lines[i:j] for i, j in zip(starts, ends)]


def texts(section: list[str], label: str) -> list[str]:
    return [line[14:] for line in section if line[2:13].rstrip() == label]


def assert_lines_fit(lines: list[str]):
    for line in lines:
        columns = sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)
        assert columns <= 100 and line.isprintable() and line == line.rstrip(), line


def assert_drawn(section: list[str], frame, cached: set[int]):
    """The picture of the pool and the marks have the blocks of the tables that are printed."""
    tables = {name: texts(section, name)[0].split("[")[1].rstrip("]").split() for name, *_ in frame.work}
    held = Counter(mark.rstrip("c*") for marks in tables.values() for mark in marks if mark != "-")
    for name, marks in tables.items():
        assert ["*" in mark for mark in marks] == [held[mark.rstrip("c*")] > 1 for mark in marks]
        assert sum("c" in mark for mark in marks) == sum(name in copied[2] for copied in frame.copied)
    picture, _, counts = texts(section, "pool")[0].partition("  ")
    kinds = {str(block): char for block, char in enumerate(picture.replace(" ", ""))}
    assert all(held[block] == 0 if kind in "._" else (kind in "*abc") == (held[block] > 1)
               for block, kind in kinds.items())
    assert {block for block, kind in kinds.items() if kind == "."} == set(map(str, cached)) - held.keys()
    assert counts == (f"{len(held)} held ({sum(count > 1 for count in held.values())} shared), {picture.count('.')} "
                      f"free but cached, {picture.count('_')} empty")


# ---- Everything printed is so, and everything that happens is printed

COMMON = [100 + i for i in range(10)]
TWO = [COMMON + [1, 2, 3], COMMON + [4, 5]]
MANY = [COMMON + [i] for i in range(3)] + [[i, i + 1, 120] for i in range(4)]
CASES = {  # engine options, prompts, sampling; and lines that must come up, beside those in the README
    "two prompts with a common beginning": (dict(), TWO, greedy(12), "found .*"),
    "a prompt that is found whole": (dict(), [COMMON[:8]], greedy(2), r"B +token 7 again, for its logits -> 8 \[0 1\]",
                                     r"found       B 8 tokens in 0 1 \(free, but still cached\)"),
    "recompute": (dict(num_blocks=12), MANY, greedy(12), "found .*", "evicted .*", "preempted .*"),
    "swapping": (dict(num_blocks=12, swap_space=0.01), MANY, greedy(12), "preempted .*", "swapped in  .*",
                 r"\w +waits on the host: it was preempted in this step"),
    "little room to swap": (dict(num_blocks=12, swap_space=0.0001), MANY, greedy(12), "preempted .*", "swapped in .*"),
    "samples": (dict(), [COMMON], SamplingParams(n=3, temperature=0.9, seed=0, max_tokens=3), "copied .*",
                "arrived     A0 A1 A2, 10 prompt tokens: 100 101 102 103 104 105 106 107 108 109",
                "registered  can be shared now: 0 1", r"forked      A2 after 10 tokens in 0 1 2 \(shared with A0 A1\)",
                r"ended       A1 \(length\), frees 4, others hold 1 0", r"ended       A2 \(length\), frees 2 1 0"),
    "samples, few blocks": (dict(num_blocks=12), [COMMON], SamplingParams(n=4, temperature=0.9, seed=1, max_tokens=15),
                            "copied .*", "preempted .*", "evicted .*"),
    "samples, few rows": (dict(max_num_seqs=2), [COMMON] * 2, greedy(3, n=5), "forked .*"),
    "prompts in chunks": (dict(max_num_batched_tokens=4), [list(range(10, 20)), [1, 2, 3]], greedy(6),
                          r"A           prompt 0\.\.3 of 10 \[0\]", "B           waits: the token budget is spent",
                          r"A           prompt 8\.\.9 of 10 -> 10 \[0 1 2\]",
                          r"B           prompt 0\.\.1 of 3        \[3\]"),
    "few batch rows": (dict(max_num_seqs=2), MANY, greedy(6), "D           waits behind it", "            and 3 more",
                       "C           waits: no batch row is free, max_num_seqs is 2"),
    "no caching": (dict(enable_prefix_caching=False), MANY, greedy(6), "taken .*"),
    "a window": (dict(model="mistral", num_blocks=7), [list(range(40)), [3, 4, 5]], greedy(30), "evicted .*",
                 r"A           decode 4\d -> 4\d \[- - - .*", r"slid out    A \d+"),
    "samples, a window": (dict(model="mistral", num_blocks=12), [list(range(21))], greedy(30, n=3), "slid out .*"),
    "samples, a window, few blocks": (dict(model="mistral", num_blocks=6, block_size=2), [list(range(9))],
                                      greedy(5, n=3), "slid out .*", "evicted .*"),
    "lookahead, swapping": (dict(lookahead=1, num_blocks=12, swap_space=0.001), MANY, greedy(12), "swapped in .*"),
    "one token a block": (dict(block_size=1, num_blocks=30), [[1, 2, 3, 4], [1, 2, 5]], greedy(10), "found .*"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_printed_is_so(case):
    options, prompts, params, *events = CASES[case]
    witness, lines = witnessed(llm := small(**options))
    drawn, show = [], witness.show
    witness.show = lambda frame: (drawn.append((frame, set(witness.cached[0]))), show(frame))
    llm.generate(prompts, params)
    llm.generate(prompts[:1], params)
    assert_lines_fit(lines)
    printed = sections(lines)
    witness.assert_all_told(len(printed))
    for section, (frame, cached) in zip(printed, [each for each in drawn if each[0].kind == "step"]):
        assert section[0].startswith(f"step {frame.step}: {sum(row[3] - row[2] for row in frame.work)} of at most ")
        assert_drawn(section, frame, cached)
    for event in events:
        assert any(re.fullmatch("  " + event, line) for line in lines), event
    more = r", \d+ more on the host" * ("swap_space" in options) + ", attention sees 8 tokens" * ("model" in options)
    size = options.get("block_size", 4)
    assert re.fullmatch(rf"a pool of {options.get('num_blocks', 24)} blocks of {size} tokens?{more}", lines[0])
    assert lines[-1].startswith("  pool") and " 0 held (0 shared)" in lines[-1]


def test_beam_search():
    printed = []
    for options in dict(), dict(num_blocks=14), dict(num_blocks=14, swap_space=0.01, max_num_seqs=2):
        witness, lines = witnessed(llm := small(**options))
        llm.beam_search([COMMON + [1, 2, 3], COMMON], nanopaged.BeamSearchParams(beam_width=3, max_tokens=8))
        assert_lines_fit(lines)
        witness.assert_all_told(len(sections(lines)))
        second = sections(lines)[1]
        assert re.fullmatch(r"A0 goes on with \d+", texts(second, "beams")[0])
        assert options or re.fullmatch(r"A\d after 13 tokens in( \d+){4} \(shared with A0( \w\d)*\)",
                                       texts(second, "forked")[0])
        printed += lines
    for event in (r"ended       A\d, frees", "copied", "found", r"B\d +waits for its token",
                  r"preempted   \w\d: gives back"):
        assert any(re.match("  " + event, line) for line in printed), event


# ---- Single events

def test_a_more_urgent_request():
    """What of a prompt is computed again is told from what goes on."""
    lines = traced(llm := small(scheduling_policy="priority", max_num_seqs=1, max_num_batched_tokens=4,
                                enable_prefix_caching=False))
    for prompt, max_tokens, priority in ((list(range(10)), 2, 5), ([4], 1, -1)):
        llm.add_request(prompt, greedy(max_tokens), priority=priority)
        llm.step()
    while llm.has_unfinished_requests():
        llm.step()
    assert "  arrived     A, priority 5, 10 prompt tokens: 0 1 2 3 4 5 6 7 8 9" in lines
    assert "  arrived     B, priority -1, 1 prompt tokens: 4" in lines
    second = sections(lines)[1]
    assert texts(second, "preempted") == ["A: gives back 0, its tokens will be computed again"]
    assert texts(second, "A") == ["waits: it was preempted in this step"]
    rows = [line.split("[")[0].split(" ", 4)[-1].strip() for line in lines if re.match(r"  A  .*\[", line)]
    assert rows == ["prompt 0..3 of 10", "recompute 0..3", "prompt 4..7 of 10", "prompt 8..9 of 10 -> 10",
                    "decode 10 -> 11"]


def test_aborts_of_running_and_waiting_requests():
    lines = traced(llm := small(max_num_seqs=1))
    a, b = llm.add_request(COMMON, greedy()), llm.add_request([1, 2], greedy())
    llm.step()
    for request_id in (b, a, a, llm.add_request([3], greedy())):  # the last one is in no step
        llm.abort_request(request_id)
    assert lines[-2:] == ["  ended       B (abort)", "  ended       A (abort), frees 2 1 0"]


def test_why_a_sequence_finished():
    lines = traced(llm := small(text=True))
    params = [SamplingParams(temperature=0, max_tokens=9, stop=" are"), SamplingParams(temperature=0, max_tokens=2),
              SamplingParams(temperature=0, max_tokens=9, stop_token_ids=list(range(1000)))]
    llm.generate(["ROMEO: But soft, what light"] * 3, params)
    ends = [line[14:].split(",")[0] for line in lines if line.startswith("  ended ")]
    assert re.fullmatch(r"C \(stop\): \d+", ends[0]) and ends[1:] == ["B (length)", "A (stop): ' are'"]
    llm.add_request("ROMEO:")
    llm.scheduler.update(llm.scheduler.schedule(), Sampled([-1]))  # no token could be drawn
    assert lines[-3] == "  sampled     D nothing" and lines[-2].startswith("  ended       D (error): ")


def test_lookahead_names_the_step_that_sampled():
    """But for the last one."""
    lines = traced(llm := small(lookahead=1))
    llm.generate([[1, 2, 3], [4, 5, 6]], [greedy(1), greedy(3)])
    printed = sections(lines)
    assert [re.sub(r"[AB] \d+", "T", line) for line in texts(lines, "sampled")] == [
        "in step 0: T, T", "in step 1: T", "T"]
    assert not texts(printed[0], "sampled") and texts(printed[1], "A")[0].startswith("waits for its token ")


def test_a_failed_step_is_undone():
    lines = traced(llm := small())
    launch, llm.runner.launch = llm.runner.launch, lambda step: 1 / 0
    llm.add_request([1, 2, 3, 4], greedy(2))
    with pytest.raises(ZeroDivisionError):
        llm.step()
    assert lines[-2:] == ["  evicted     no longer cached: 0", "  undone      A will start over"]
    llm.runner.launch = launch
    while llm.has_unfinished_requests():
        llm.step()
    assert any(line.startswith("  ended       A (length), frees ") for line in lines)


# ---- Lines

def test_no_line_is_longer_than_100_columns():
    """The cases are large pools, many sequences, long tables, and prompts that a terminal would not like."""
    lines = traced(llm := small(text=True, num_blocks=5000, block_size=2, max_num_seqs=200,
                                max_num_batched_tokens=2000))
    prompts = ["\x00\x1b[31m\r\n\t\u202eABC" * 5, "\u4f60\u597d\uff0c\u4e16\u754c" * 12,
               "\U0001f600e\u0301\u2600\ufe0f" * 9, "x" * 400]
    prompts += [[i, 3, i] for i in range(296)]
    llm.generate(prompts, SamplingParams(seed=0, temperature=2.0, max_tokens=2))
    assert_lines_fit(lines)
    assert any("\u4f60\u597d" in line for line in lines) and any("\\x1b[31m" in line for line in lines)
    assert any(line.endswith("and 290 more") for line in lines)
    for section in sections(lines):
        rows = sum(bool(re.match(r" +\d+  [A-Za-z*._]{10} ", line)) for line in section)
        assert rows <= 2 * 4 and len(section) < 50  # the pool after scheduling, and when sequences have finished


def test_a_large_pool_shows_the_rows_that_are_held():
    lines = traced(llm := small("shakespeare", num_blocks=5000))
    llm.generate([list(range(300)), [5, 6]], greedy(2))
    section = sections(lines)[0]
    assert texts(section, "pool")[0] == "76 held (0 shared), 0 free but cached, 4924 empty"
    start = next(i for i, line in enumerate(section) if line.startswith("  pool")) + 1
    assert section[start] == "           0  " + " ".join(["A" * 10] * 7)
    assert section[start + 1] == "          70  " + " ".join(["AAAAAB____"] + ["_" * 10] * 6)
    assert section[start + 2].startswith("  taken")


def test_pieces():
    assert [letters(i) for i in (0, 25, 26, 701, 702)] == ["A", "Z", "AA", "ZZ", "AAA"]
    assert _listing([3, 2, 1]) == "3 2 1" and _listing(list(range(50))).endswith(" more")
    assert _listing(["a" * 30] * 3, ", ", 94) == ", ".join(["a" * 30] * 3)
    assert _listing(["a" * 30] * 3, ", ", 93) == f"{'a' * 30}, {'a' * 30} and 1 more"
    assert _listing(["a" * 30], ", ", 10) == "a" * 30 and _listing([], ", ", 10) == ""
    assert _fit("x" * 10, 10) == "x" * 10 and _fit("x" * 11, 10) == "x" * 7 + "..."
    assert _fit("\u4f60" * 5, 10) == "\u4f60" * 5 and _fit("\u4f60" * 6, 10) == "\u4f60" * 3 + "..."


# ---- An observer

def test_close_leaves_the_scheduler_as_it_was(capsys):
    trace = Trace(llm := small(), (lines := []).append)
    assert "close that one first" in complaint(Trace, llm)
    attributes = vars(llm.scheduler).keys()
    llm.generate([1, 2, 3], greedy(1))
    before = [*lines]
    for _ in range(2):
        trace.close()
        assert type(llm.scheduler) is engine.Scheduler and vars(llm.scheduler).keys() == attributes
        llm.generate([1, 2, 3], greedy(1))
    assert lines == before and len(lines) > LEGEND and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("stream, term, no_color, is_coloured", [
    (Screen, "xterm", "", True), (io.StringIO, "xterm", "", False), (Screen, "dumb", "", False),
    (Screen, "xterm", "1", False)])
def test_colours_are_for_terminals(monkeypatch, stream, term, no_color, is_coloured):
    """Without the escape sequences the lines are the same."""
    monkeypatch.setenv("TERM", term), monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stderr", shown := stream())
    trace, expected = Trace(llm := small(num_blocks=6)), []
    write = trace.write
    trace.write = lambda line: (expected.append(line), write(line))
    llm.generate([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], greedy(12), use_tqdm=False)
    assert re.sub(r"\x1b\[\d+m", "", shown.getvalue()).splitlines()[LEGEND:] == expected
    coloured = [line for line in shown.getvalue().splitlines() if "\x1b" in line]
    colors = {line.split("m")[0] for line in coloured}
    assert colors >= {f"\x1b[{color}" for color in (1, 31, 32, 36)} if is_coloured else not colors
    assert all(line.count("\x1b") == 2 for line in coloured)
