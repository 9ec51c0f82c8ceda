"""What --trace prints. A `Witness` holds each frame of a step to what the scheduler and the block manager really did,
which it takes down by other means: at every launch, and from inside the block manager."""
import io
import itertools
import re
import sys
import unicodedata
from collections import Counter
from functools import partial
from types import FunctionType, SimpleNamespace

import pytest

import kernel
from engine import Sampled
from kernel import cdiv
from nanopaged import LLM, BeamSearchParams, SamplingParams, engine, tiles
from nanopaged.features.cascade import Cascade
from nanopaged.features.frames import NULL, Frame, Frames, letters, splits_of
from nanopaged.features.trace import Trace, _blocks, _fit, _listing
from nanopaged.tests.helpers import load
from nanopaged.tests.test_cli import Screen

LEGEND = 5  # lines before the first step


def swaps(step, direction):
    return getattr(step, f"swaps_{direction}", [])


def small(model="qwen3", *, lookahead=0, text=False, **options) -> LLM:
    """An engine with few blocks. Without `text` it has no tokenizer, and the trace shows token ids, which can be read
    back. With it, the model is the bundled one."""
    options = dict(num_blocks=24, block_size=4, max_num_seqs=256) | options
    llm = load("shakespeare" if text else model, device="cpu", lookahead=lookahead, **options)
    llm.tokenizer = llm.tokenizer if text else None
    return llm


def traced(llm: LLM) -> list[str]:
    """The lines of the trace, as they come."""
    lines = []
    Trace(llm, lines.append)
    return lines


def greedy(max_tokens=16, **settings) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **settings)


def finish(llm: LLM) -> None:
    while llm.has_unfinished_requests():
        llm.step()


def cascading() -> LLM:
    """An engine whose trace is that of a GPU with cascade attention."""
    llm = small("shakespeare", num_blocks=300, block_size=16, max_num_batched_tokens=400)
    llm.runner.kernels, llm.runner.cascade = kernel.TRITON, Cascade(16, 64, 2, least_tokens=1)
    return llm


def plan(llm: LLM, prompts: list[list[int]], num_steps: int, max_tokens=200) -> list[list[str]]:
    """The sections of steps that are planned for these prompts, and not computed: every token sampled is 7. Each text
    has one token less than the one before it."""
    lines = traced(llm)
    for i, prompt in enumerate(prompts):
        llm.add_request(prompt, greedy(max_tokens - i))
    for _ in range(num_steps):
        step = llm.scheduler.schedule()
        llm.scheduler.update(step, Sampled([7] * len(step.sampled)))
    return sections(lines)


def name_of(seq, llm) -> str:
    several = seq.sampling.params.n > 1 or seq.request_id.startswith("beam")
    return letters(seq.order[1]) + (str(seq.order[2]) if several else "")


class Witness:
    """Notes the frames of an LLM, and compares each of a step with the engine when the step is launched."""

    def __init__(self, llm):
        self.llm, self.frames, self.states, self.known = llm, [], [], []
        self.sampled = {}  # name -> tokens
        self.source = Frames(llm, self.note)
        for gpu, (runner, one) in enumerate(zip(llm.runners, llm.engines)):
            taken, evicted = [], []
            self.watch(one.scheduler.block_manager, taken, evicted)
            runner.launch = partial(self.launch, gpu, one.scheduler, runner.launch, taken, evicted)

    def note(self, frame):
        self.frames.append(frame)
        self.states.append((self.source.tables, self.source.lens, self.source.cached))

    def watch(self, manager, taken, evicted):
        def take(pop=manager._pop_free_block):
            block = next(iter(manager.free_queue))
            evicted.extend([block] if block in manager.key_of_block else [])
            taken.append(pop())
            assert taken[-1] == block
            return block

        manager._pop_free_block = take

    def names(self, seqs):
        return [name_of(seq, self.llm) for seq in seqs]

    def launch(self, gpu, scheduler, launch, taken, evicted, step):
        frame, manager, names = self.frames[-1], scheduler.block_manager, self.names(scheduler.running)
        assert (frame.kind, frame.pool, frame.num_tokens) == ("step", gpu, sum(step.num_tokens))
        assert [name for name, *_ in frame.work] == names
        assert {name: tuple(row) for name, _, *row, _ in frame.work if row[1]} == {
            name_of(seq, self.llm): (seq.num_computed_tokens - count, seq.num_computed_tokens, seq in step.sampled)
            for seq, count in zip(step.seqs, step.num_tokens)}
        assert [name for name, kind, *_ in frame.work if kind == "again"] == self.names(
            seq for seq, count in zip(step.seqs, step.num_tokens)
            if seq.num_computed_tokens - count < seq.num_hit_tokens)
        assert [self.source.tables[name][:2] for name in names] == [[gpu, seq.block_table] for seq in scheduler.running]
        assert [self.source.lens[name] for name in names] == [seq.num_computed_tokens for seq in scheduler.running]
        assert {block for pool, block in self.source.cached if pool == gpu} == manager.key_of_block.keys()
        moved = [copy for _, copy in step.copies] + [block for _, block in swaps(step, "in")]
        assert sorted(moved + [block for _, blocks in frame.taken for block in blocks]) == sorted(taken)
        assert sorted(frame.evicted) == sorted(evicted) and frame.registered == step.cached
        assert [(block, copy) for block, copy, *_ in frame.copied] == step.copies
        assert {pair for _, *hosts in frame.swapped_in for pair in zip(*hosts)} == set(swaps(step, "in"))
        earlier = self.states[-2][0] if len(self.states) > 1 else {}
        assert frame.slid_out == [[name, block] for name, seq in zip(names, scheduler.running) if name in earlier
                                  for block, now in zip(earlier[name][1], seq.block_table) if now == NULL != block]
        assert [name for name, *_ in frame.preempted] == self.names(step.preempted)
        assert [pair for _, blocks, hosts in frame.preempted for pair in zip(blocks, hosts)] == swaps(step, "out")
        assert bool(frame.waits) >= bool(scheduler.waiting)
        self.known.append({name: seq.token_ids[:seq.num_computed_tokens]
                           for name, seq in zip(names, scheduler.running)})
        taken.clear()
        evicted.clear()
        read = launch(step)

        def read_and_note(*args):
            result = read(*args)
            for name, token in zip(self.names(step.sampled), result.tokens):
                self.sampled.setdefault(name, []).append(token)
            return result

        read_and_note.is_done = read.is_done
        return read_and_note

    def assert_all_told(self, num_steps):
        """Every step that was computed has a frame, and so has every token that was sampled; without a tokenizer."""
        assert num_steps == len({frame.step for frame in self.frames if frame.kind == "step"}) > 0
        told = {}
        for name, words, notes in itertools.chain(*(frame.sampled for frame in self.frames)):
            told.setdefault(name, []).extend(words if words and "best_of" not in notes else [])
        assert {name: tokens[:len(told[name])] for name, tokens in self.sampled.items() if told[name]} == {
            name: tokens for name, tokens in told.items() if tokens}


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


def assert_drawn(section: list[str], frame: Frame, cached: set[tuple[int, int]]):
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
    assert {block for block, kind in kinds.items() if kind == "."} == {str(block) for _, block in cached} - held.keys()
    assert counts == (f"{len(held)} held ({sum(count > 1 for count in held.values())} shared), {picture.count('.')} "
                      f"free but cached, {picture.count('_')} empty")


# ---- Everything printed is so, and everything that happens is printed

COMMON = [100 + i for i in range(10)]
TWO = [COMMON + [1, 2, 3], COMMON + [4, 5]]
MANY = [COMMON + [i] for i in range(3)] + [[i, i + 1, 120] for i in range(4)]
EVENTS = ("found", "taken", "evicted", "copied", "registered", "preempted", "swapped in", "slid out", "finished")
CASES = {  # engine options, prompts, sampling; and events that must come up
    "two prompts with a common beginning": (dict(), TWO, greedy(12), "found"),
    "recompute": (dict(num_blocks=12), MANY, greedy(12), "found", "evicted", "preempted"),
    "swapping": (dict(num_blocks=12, swap_space=0.01), MANY, greedy(12), "preempted", "swapped in"),
    "little room to swap": (dict(num_blocks=12, swap_space=0.0001), MANY, greedy(12), "preempted", "swapped in"),
    "samples": (dict(), [COMMON + [1]], SamplingParams(n=3, temperature=0.9, seed=1, max_tokens=16), "copied", "found"),
    "samples, few blocks": (dict(num_blocks=12), [COMMON], SamplingParams(n=4, temperature=0.9, seed=1, max_tokens=15),
                            "copied", "preempted", "evicted"),
    "prompts in chunks": (dict(max_num_batched_tokens=5), MANY, greedy(6)),
    "few batch rows": (dict(max_num_seqs=2), MANY, greedy(6), "found"),
    "no caching": (dict(enable_prefix_caching=False), MANY, greedy(6), "taken"),
    "a window": (dict(model="mistral", num_blocks=7), [list(range(40)), [3, 4, 5]], greedy(30), "slid out", "evicted"),
    "samples, a window": (dict(model="mistral", num_blocks=12), [list(range(21))], greedy(30, n=3), "slid out"),
    "samples, a window, few blocks": (dict(model="mistral", num_blocks=6, block_size=2), [list(range(9))],
                                      greedy(5, n=3), "slid out", "evicted"),
    "lookahead, swapping": (dict(lookahead=1, num_blocks=12, swap_space=0.001), MANY, greedy(12), "swapped in"),
    "one token a block": (dict(block_size=1, num_blocks=30), [[1, 2, 3, 4], [1, 2, 5]], greedy(10), "found"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_printed_is_so(case):
    options, prompts, params, *events = CASES[case]
    llm = small(**options)
    witness, lines = Witness(llm), traced(llm)
    llm.generate(prompts + prompts[:1], params)
    assert_lines_fit(lines)
    printed = sections(lines)
    witness.assert_all_told(len(printed))
    steps = [(frame, cached) for frame, (*_, cached) in zip(witness.frames, witness.states) if frame.kind == "step"]
    for section, (frame, cached) in zip(printed, steps):
        assert section[0].startswith(f"step {frame.step}: {frame.num_tokens} of at most ")
        assert_drawn(section, frame, cached)
    assert set(events) <= {label for label in EVENTS if any(line.startswith(f"  {label} ") for line in lines)}
    assert lines[-1].startswith("  pool") and " 0 held (0 shared)" in lines[-1]


def test_beam_search():
    printed = []
    for options in dict(), dict(num_blocks=14), dict(num_blocks=14, swap_space=0.01, max_num_seqs=2):
        llm = small(**options)
        witness, lines = Witness(llm), traced(llm)
        llm.beam_search([COMMON + [1, 2, 3], COMMON], BeamSearchParams(beam_width=3, max_tokens=8))
        assert_lines_fit(lines)
        witness.assert_all_told(len(sections(lines)))
        beams = texts(sections(lines)[0], "beam")
        assert beams[0].startswith("A0 goes on with ")
        assert options or re.fullmatch(r"A2 goes on with \d+, as a fork of A0: shares( \d+){4}", beams[1])
        assert options or not any("retired" in line for line in lines)
        printed += lines
    for event in ("beam ends", "copied", "found", "waits for the other beams", "computes its tokens again"):
        assert any(event in line for line in printed), event


# ---- Single events

EVENTS_OF = {  # engine options, prompts of each call, sampling; and lines in this order, beside those in the README
    "a prompt that is found whole": (dict(), [[COMMON[:8]]] * 2, greedy(2), [
        r"B           token 7 again, for its logits -> 8 \[0 1\]",
        r"found       B 8 tokens in 0 1 \(free, but still cached\)"]),
    "samples": (dict(), [[COMMON]], SamplingParams(n=3, seed=0, max_tokens=3), [
        r"arrives     A0 A1 A2, 10 prompt tokens: 100 101 102 103 104 105 106 107 108 109",
        r"registered  can be shared now: 0 1", r"found       A2 10 tokens in 0 1 2 \(shared with A0 A1\)",
        r"finished    A1 \(length\), frees 4 \(all cached\), others hold 1 0",
        r"finished    A2 \(length\), frees 2 1 0 \(all cached\)"]),
    "swapping": (dict(num_blocks=8, swap_space=.001), [[[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]], greedy(15), [
        r"B           waits on the host: it was preempted in this step"]),
    "few batch rows": (dict(max_num_seqs=1), [[[1, 2], [3, 4], [5, 6], [7]]], greedy(2), [
        r"B           waits: no batch row is free, max_num_seqs is 1", r"            behind it: C D"]),
    "chunks": (dict(max_num_batched_tokens=4), [[list(range(10, 20)), [1, 2, 3]]], greedy(2), [
        r"A           prompt 0\.\.3 of 10 \[0\]", r"B           waits: the token budget is spent",
        r"A           prompt 4\.\.7 of 10 \[0 1\]", r"A           prompt 8\.\.9 of 10 -> 10 \[0 1 2\]",
        r"B           prompt 0\.\.1 of 3        \[3\]"]),
    "a window": (dict(model="mistral", num_blocks=7), [[list(range(20))]], greedy(6), [
        r"A           decode 2\d -> 2\d \[- - - .*", r"slid out    of the window: A .*"]),
}


@pytest.mark.parametrize("case", EVENTS_OF)
def test_single_events(case):
    options, calls, params, expected = EVENTS_OF[case]
    lines = traced(llm := small(**options))
    for prompts in calls:
        llm.generate(prompts, params)
    rest = iter(lines)
    for pattern in expected:
        assert any(re.fullmatch("  " + pattern, line) for line in rest), pattern
    more = ", attention sees 8 tokens" * ("model" in options) + r", \d+ more on the host" * ("swap_space" in options)
    assert re.fullmatch(rf"a pool of {options.get('num_blocks', 24)} blocks of 4 tokens{more}", lines[0])


def test_a_more_urgent_request():
    """What of a prompt is computed again is told from what goes on."""
    lines = traced(llm := small(scheduling_policy="priority", max_num_seqs=1, max_num_batched_tokens=4,
                                enable_prefix_caching=False))
    for prompt, max_tokens, priority in ((list(range(10)), 2, 5), ([4], 1, -1)):
        llm.add_request(prompt, greedy(max_tokens), priority=priority)
        llm.step()
    finish(llm)
    assert "  arrives     A, priority 5, 10 prompt tokens: 0 1 2 3 4 5 6 7 8 9" in lines
    assert "  arrives     B, priority -1, 1 prompt tokens: 4" in lines
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
    for request_id in (b, a, a):
        llm.abort_request(request_id)
    assert lines[-2:] == ["  finished    B (abort)", "  finished    A (abort), frees 2 1 0 (all but 2 cached)"]


def test_why_a_sequence_finished():
    lines = traced(llm := small(text=True))
    params = [SamplingParams(temperature=0, max_tokens=9, stop=" are"), SamplingParams(temperature=0, max_tokens=2),
              SamplingParams(temperature=0, max_tokens=9, stop_token_ids=list(range(1000)))]
    llm.generate(["ROMEO: But soft, what light"] * 3, params)
    ends = [line[14:].split(",")[0] for line in lines if line.startswith("  finished ")]
    assert ends[0].startswith("C (stop: ") and ends[1:] == ["B (length)", "A (stop: ' are')"]
    llm.add_request("ROMEO:")
    llm.scheduler.update(llm.scheduler.schedule(), Sampled([-1]))  # no token could be drawn
    assert lines[-3] == "  sampled     D nothing" and lines[-2].startswith("  finished    D (error: ")


def test_lookahead_names_the_step_that_sampled():
    """Also of a token that was sampled for nothing."""
    lines = traced(llm := small(lookahead=1))
    a = llm.add_request([1, 2], greedy())
    llm.step()
    llm.abort_request(a)
    llm.step()
    assert lines[-2:] == ["no step: nothing can be computed now",
                          "  sampled     in step 0, read only now: A dropped, it had ended"]
    llm.generate([1, 2, 3], greedy(3))
    sampled = [line[14:].split(":")[0] for line in lines if line.startswith("  sampled")]
    assert sampled == [f"in step {i}, read only now" for i in range(4)]
    assert "sampled" not in "".join(sections(lines)[1])
    llm.generate([[1, 2, 3], [4, 5, 6]], [greedy(1), greedy(3)])
    assert any(re.match("  [A-Z]           waits for its token ", line) for line in lines)


def test_a_failed_step_is_undone():
    lines = traced(llm := small())
    launch, llm.runner.launch = llm.runner.launch, lambda step: 1 / 0
    llm.add_request([1, 2, 3], greedy(2))
    with pytest.raises(ZeroDivisionError):
        llm.step()
    assert lines[-1] == "  undone      step 0 failed, A will start over"
    llm.runner.launch = launch
    finish(llm)
    assert any(line.startswith("  finished    A (length), frees ") for line in lines)


# ---- Attention

@pytest.mark.parametrize("lengths, on_gpu, expected", [
    ([127], False, [[], []]),
    ([128, 20, 300], False, [[], ["on a GPU (torch does not split): A 129 tokens in 2 splits of 128 (V2) and 1 more"]]),
    ([128, 20, 300], True, [[], ["B in one piece (V1)",
                                 "A 129 tokens in 2 splits of 128 (V2), C 301 tokens in 3 splits of 128 (V2)"]]),
    # At the first decode a GPU's trace says that a context is not split.
    ([20, 126, 5], True, [[], ["A B C in one piece (V1)"], [], ["B 129 tokens in 2 splits of 128 (V2)"]]),
    # 128 sequences and 2 kv heads keep the device busy without splits.
    ([130] * 128, True, [[], ["A 131 tokens in 2 splits of 128 in turn (V1) and 127 more"]])])
def test_where_the_kernel_splits_a_context(lengths, on_gpu, expected):
    llm = small("shakespeare", num_blocks=1500, block_size=16, max_num_batched_tokens=20000)
    llm.runner.kernels = kernel.TRITON if on_gpu else llm.runner.kernels
    prompts = [[(i + j) % 1000 for j in range(length)] for i, length in enumerate(lengths)]
    assert [texts(section, "attention") for section in plan(llm, prompts, len(expected))] == expected


def test_a_gpus_trace_says_which_tokens_are_read_once():
    printed = plan(cascading(), [[*range(300 if i else 200), 7, i] for i in range(3)], 9, max_tokens=7)
    said = [line for section in printed for line in texts(section, "attention") if "cascade" in line]
    intro = "K and V that are read once for all (cascade): "
    assert said == [intro + "B C A tokens 0..127, B C tokens 128..255", intro + "B A tokens 0..191"]


def test_splits_follow_the_kernels_own_rule():
    function = getattr(kernel.split_length, "fn", kernel.split_length)
    names = dict(MIN_SPLIT=tiles.MIN_SPLIT, MID_SPLIT=tiles.MID_SPLIT, MAX_SPLITS=tiles.MAX_SPLITS)
    tl = SimpleNamespace(cdiv=cdiv, maximum=max, minimum=min)
    split_length = FunctionType(function.__code__, dict(tl=tl, **names))
    llm = small(num_blocks=8)
    for seq_len in (*range(1, 1100), *range(1100, 40_000, 97)):
        length = split_length(seq_len, 64)
        assert splits_of(llm, seq_len) == (cdiv(seq_len, length), length)
    config = SimpleNamespace(num_heads=8, num_kv_heads=2, head_dim=32, sliding_windows=[300])
    windowed = SimpleNamespace(runner=llm.runner, config=config)
    for seq_len in range(1, 3000, 7):
        count, length = splits_of(windowed, seq_len)
        assert count == len({position // length for position in range(max(0, seq_len - 300), seq_len)})


# ---- Lines

def test_no_line_is_longer_than_100_columns():
    """The cases are large pools, many sequences, long tables, and prompts that a terminal would not like."""
    llm = small(text=True, num_blocks=5000, block_size=2, max_num_seqs=200, max_num_batched_tokens=2000)
    lines = traced(llm)
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
    assert _blocks([3, 2, 1]) == "3 2 1" and _blocks(list(range(50))).endswith(" more")
    assert _listing(["a" * 30] * 3, ", ", 94) == ", ".join(["a" * 30] * 3)
    assert _listing(["a" * 30] * 3, ", ", 93) == f"{'a' * 30}, {'a' * 30} and 1 more"
    assert _listing(["a" * 30], ", ", 10) == "a" * 30 and _listing([], ", ", 10) == ""
    assert _fit("x" * 10, 10) == "x" * 10 and _fit("x" * 11, 10) == "x" * 7 + "..."
    assert _fit("\u4f60" * 5, 10) == "\u4f60" * 5 and _fit("\u4f60" * 6, 10) == "\u4f60" * 3 + "..."


# ---- An observer

def test_close_leaves_the_scheduler_as_it_was(capsys):
    llm, outer, inner = small(), [], []
    first, second = Trace(llm, outer.append), Trace(llm, inner.append)
    llm.generate([1, 2, 3], greedy(1))
    assert inner[LEGEND:] == outer[LEGEND:] != []
    for trace, num_left in ((second, 1), (second, 1), (first, 0)):
        trace.close()
        assert len(vars(llm.scheduler).get("watchers", [])) == num_left
    assert type(llm.scheduler) is engine.Scheduler
    before = outer + inner
    llm.generate([1, 2, 3], greedy(1))
    assert outer + inner == before and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("stream, term, no_color, is_coloured", [
    (Screen, "xterm", "", True), (io.StringIO, "xterm", "", False), (Screen, "dumb", "", False),
    (Screen, "xterm", "1", False)])
def test_colours_are_for_terminals(monkeypatch, stream, term, no_color, is_coloured):
    """Without the escape sequences the lines are the same."""
    monkeypatch.setenv("TERM", term), monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stderr", shown := stream())
    Trace(llm := small(num_blocks=6))
    expected = traced(llm)
    llm.generate([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], greedy(12), use_tqdm=False)
    assert re.sub(r"\x1b\[\d+m", "", shown.getvalue()).splitlines() == expected
    coloured = [line for line in shown.getvalue().splitlines() if "\x1b" in line]
    colors = {line.split("m")[0] for line in coloured}
    assert colors >= {f"\x1b[{color}" for color in (1, 31, 32, 36)} if is_coloured else not colors
    assert all(line.count("\x1b") == 2 for line in coloured)
