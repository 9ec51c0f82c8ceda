"""What --trace prints, held to what the scheduler and the block manager really did. A `Witness` takes that down by
other means than the trace: at every launch, and from inside the block manager."""
import io
import re
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch

import kernel
from engine import Sampled
from kernel import cdiv
from nanopaged import LLM, BeamSearchParams, SamplingParams, tiles
from nanopaged.cli.frames import letters, splits_of
from nanopaged.cli.trace import Trace, _blocks, _fit, _listing
from nanopaged.scheduling.additions import NULL
from nanopaged.tests.helpers import load

torch.set_num_threads(1)  # models this small gain nothing from more
GOLDEN = Path(__file__).parents[1] / "golden"
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
    lines = []
    Trace(llm, lines.append)
    return lines


def greedy(max_tokens=16, **settings) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **settings)


def name_of(seq, llm) -> str:
    several = seq.sampling.params.n > 1 or seq.request_id.startswith("beam")
    return chr(ord("A") + seq.order[1]) + (str(seq.order[2]) if several else "")


class Witness:
    """What happened in each launched step, taken down without the trace."""

    def __init__(self, llm):
        self.llm, self.manager, self.steps = llm, llm.scheduler.block_manager, []
        self.taken, self.evicted, self.freed = [], [], []
        self.tokens = {}  # name -> tokens sampled
        self._launch, self._take, self._release = llm.runner.launch, self.manager._pop_free_block, self.manager._decref
        llm.runner.launch, self.manager._pop_free_block, self.manager._decref = self.launch, self.take, self.release

    def take(self):
        block = next(iter(self.manager.free_queue))
        self.evicted += [block] if block in self.manager.key_of_block else []
        self.taken.append(self._take())
        assert self.taken[-1] == block
        return block

    def release(self, block):
        self._release(block)
        self.freed += [block] if block != NULL and self.manager.ref_counts[block] == 0 else []

    def launch(self, step):
        manager, scheduler = self.manager, self.llm.scheduler
        pool = "".join(("." if block in manager.key_of_block else "_") if count == 0 else "1" if count == 1 else "2"
                       for block, count in enumerate(manager.ref_counts))
        work = {name_of(seq, self.llm): (seq.num_computed_tokens - n, seq.num_computed_tokens, seq in step.sampled)
                for seq, n in zip(step.seqs, step.num_tokens)}
        tables = {name_of(seq, self.llm): ["-" if block == NULL else str(block) for block in seq.block_table]
                  for seq in scheduler.running}
        self.steps.append(SimpleNamespace(
            pool=pool, work=work, tables=tables, taken=self.taken, evicted=self.evicted, copies=list(step.copies),
            swaps_in=list(step.swaps_in), swaps_out=list(step.swaps_out), registered=list(step.cached),
            preempted=[name_of(seq, self.llm) for seq in step.preempted], waiting=len(scheduler.waiting),
            held={name_of(seq, self.llm): seq.num_hit_tokens for seq in scheduler.running}))
        self.taken, self.evicted = [], []
        read = self._launch(step)

        def read_and_note(*args):
            result = read(*args)
            for seq, token in zip(step.sampled, result.tokens):
                self.tokens.setdefault(name_of(seq, self.llm), []).append(token)
            return result

        return read_and_note


def sections(lines: list[str]) -> list[list[str]]:
    """The sections of the launched steps, each from its header on."""
    starts = [i for i, line in enumerate(lines) if line.startswith("step ")]
    ends = [next((j for j in range(i, len(lines)) if lines[j] == ""), len(lines)) for i in starts]
    return [lines[i:j] for i, j in zip(starts, ends)]


def texts(section: list[str], label: str) -> list[str]:
    return [line[14:] for line in section if line[2:13].rstrip() == label]


def numbers(section: list[str], label: str) -> list[int]:
    """The block ids behind a colon."""
    return [int(number) for text in texts(section, label) for number in text.split(": ")[1].split()]


def pairs(section: list[str], label: str) -> list[tuple[int, int]]:
    """The pairs of lines like "B: swapped out, 4 5 to host 0 1": (4, 0), (5, 1)."""
    found = [re.search(r"([\d ]+) to (?:host )?([\d ]+)", text) for text in texts(section, label)]
    return [(int(a), int(b)) for match in found if match
            for a, b in zip(match[1].split(), match[2].split(), strict=True)]


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)


def assert_lines_fit(lines: list[str]):
    for line in lines:
        assert columns(line) <= 100 and line.isprintable() and line == line.rstrip(), line


def assert_true(lines: list[str], witness: Witness):
    """Every step that was launched was printed, and all that is printed of a step is true."""
    assert_lines_fit(lines)
    printed = sections(lines)
    assert len(printed) == len(witness.steps) > 0
    for number, (section, step) in enumerate(zip(printed, witness.steps)):
        total = sum(end - start for start, end, _ in step.work.values())
        header = r"step (\d+): (\d+) of at most \d+ tokens, for (\d+) of (\d+) running sequences"
        numbers_there = [int(group) for group in re.fullmatch(header, section[0]).groups()]
        assert numbers_there == [number, total, len(step.work), len(step.tables)]
        assert_rows_true(section, step)
        items = [item.split() for text in texts(section, "taken") for item in text.split(", ")]
        taken = [int(block) for _, *blocks in items for block in blocks]
        moved = [copy for _, copy in step.copies] + [block for _, block in step.swaps_in]
        assert Counter(taken + moved) == Counter(step.taken)
        assert Counter(numbers(section, "evicted")) == Counter(step.evicted)
        assert numbers(section, "registered") == step.registered
        assert pairs(section, "copied") == step.copies
        assert Counter(pairs(section, "swapped in")) == Counter(step.swaps_in)
        assert pairs(section, "preempted") == step.swaps_out
        assert [text.split(":")[0] for text in texts(section, "preempted")] == step.preempted
        assert not step.waiting or any(" waits: " in line or " waits on the host: " in line for line in section)
    sampled = {}
    for line in lines:
        if line.startswith("  sampled ") and "best of" not in line:
            for item in re.sub(r"^in step \d+, read only now: ", "", line[14:]).split(", "):
                if re.fullmatch(r"\w+ \d+", item):
                    sampled.setdefault(item.split()[0], []).append(int(item.split()[1]))
    if sampled:
        assert sampled == {name: tokens[:len(sampled[name])] for name, tokens in witness.tokens.items()}


def assert_rows_true(section: list[str], step):
    """Each running sequence's work and block table are printed as they are, and so is the picture of the pool."""
    rows = {line.split()[0]: line for line in section[1:1 + len(step.tables)]}
    assert list(rows) == list(step.tables)
    for name, line in rows.items():
        work, table = re.fullmatch(r"  \w+ +(.*?) +\[(.*)\]", line).groups()
        marks = table.split()
        assert [mark.rstrip("c*") for mark in marks] == step.tables[name]
        for mark, block in zip(marks, step.tables[name]):
            assert block == "-" or ("*" in mark) == (step.pool[int(block)] == "2")
            assert ("c" in mark) == (block in {str(copy) for _, copy in step.copies})
        if name in step.work:
            start, end, samples = step.work[name]
            assert re.search(rf"(decode|token|prompt|recompute) {start}(\.\.{end - 1})?\b", work), work
            assert work.endswith(f" -> {end}") == samples
            assert ("again, for its logits" in work) == (start < step.held[name])
        else:
            assert "waits" in work
    [pool] = texts(section, "pool")[:1]
    picture = pool.split("  ")[0].replace(" ", "")
    kinds = "".join(char if char in "._" else "2" if char == "*" or char.islower() else "1" for char in picture)
    assert kinds == step.pool
    held = len(kinds) - kinds.count(".") - kinds.count("_")
    assert pool.endswith(f"{held} held ({kinds.count('2')} shared), {kinds.count('.')} free but cached, "
                         f"{kinds.count('_')} empty")
    for name, table in step.tables.items():
        assert all(picture[int(block)] in (name[0], name[0].lower(), "*") for block in table if block != "-")


# --------------------------------------------------------------------------------------------------
# Everything printed is so, and everything that happens is printed
# --------------------------------------------------------------------------------------------------

COMMON = [100 + i for i in range(10)]
TWO = [COMMON + [1, 2, 3], COMMON + [4, 5]]
MANY = [COMMON + [i] for i in range(3)] + [[i, i + 1, 120] for i in range(4)]
EVENTS = ("found", "taken", "evicted", "copied", "registered", "preempted", "swapped in", "slid out", "finished")
CASES = {  # engine options, prompts, sampling; and events that must come up
    "two prompts with a common beginning": (dict(), TWO, greedy(12), "found"),
    "blocks of 8": (dict(block_size=8), TWO, greedy(12), "found"),
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
    "lookahead": (dict(lookahead=1), TWO, greedy(8), "found"),
    "lookahead, swapping": (dict(lookahead=1, num_blocks=12, swap_space=0.001), MANY, greedy(12), "swapped in"),
    "one token a block": (dict(block_size=1, num_blocks=30), [[1, 2, 3, 4], [1, 2, 5]], greedy(10), "found"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_printed_is_so(case):
    options, prompts, params, *events = CASES[case]
    llm = small(**options)
    witness, lines = Witness(llm), traced(llm)
    llm.generate(prompts + prompts[:1], params)
    assert_true(lines, witness)
    assert set(events) <= {label for label in EVENTS if any(line.startswith(f"  {label} ") for line in lines)}
    assert lines[-1].startswith("  pool") and " 0 held (0 shared)" in lines[-1]


def test_beam_search():
    printed = []
    for options in dict(), dict(num_blocks=14), dict(num_blocks=14, swap_space=0.01, max_num_seqs=2):
        llm = small(**options)
        witness, lines = Witness(llm), traced(llm)
        llm.beam_search([COMMON + [1, 2, 3], COMMON], BeamSearchParams(beam_width=3, max_tokens=8))
        assert_true(lines, witness)
        beams = texts(sections(lines)[0], "beam")
        assert beams[0].startswith("A0 goes on with ")
        assert options or re.fullmatch(r"A2 goes on with \d+, as a fork of A0: shares( \d+){4}", beams[1])
        assert options or not any("retired" in line for line in lines)
        printed += lines
    for event in ("beam ends", "copied", "found", "waits for the other beams", "computes its tokens again"):
        assert any(event in line for line in printed), event


# --------------------------------------------------------------------------------------------------
# Single events
# --------------------------------------------------------------------------------------------------

PAIR = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
EVENTS_OF = {  # engine options, prompts of each call, sampling; and lines that are printed in this order
    "a prompt that is found whole": (dict(), [[COMMON[:8]]] * 2, greedy(2), [
        r"B           token 7 again, for its logits -> 8 \[0 1\]",
        r"found       B 8 tokens in 0 1 \(free, but still cached\)"]),
    "samples": (dict(), [[COMMON]], SamplingParams(n=3, seed=0, max_tokens=3), [
        r"arrives     A0 A1 A2, 10 prompt tokens: 100 101 102 103 104 105 106 107 108 109",
        r"A2          token 9 again, for its logits -> 10 \[0\* 1\* 2\*\]", r"pool        aaa_.*",
        r"found       A2 10 tokens in 0 1 2 \(shared with A0 A1\)", r"taken       A0 0 1 2",
        r"registered  can be shared now: 0 1", r"sampled     A0 \d+, A1 \d+, A2 \d+",
        r"A0          decode 10 -> 11 \[0\* 1\* 3c\]", r"pool        aaAAA_.*",
        r"copied      2 to 3, for A0 to write in; 2 is kept by A2 \(copy-on-write\)",
        r"copied      2 to 4, for A1 to write in; 2 is kept by A2 \(copy-on-write\)",
        r"finished    A0 \(length\), frees 3 \(all cached\), others hold 1 0",
        r"finished    A1 \(length\), frees 4 \(all cached\), others hold 1 0",
        r"finished    A2 \(length\), frees 2 1 0 \(all cached\)"]),
    "recompute": (dict(num_blocks=8), [PAIR], greedy(15), [
        r"B           waits: it was preempted in this step",
        r"preempted   B: gives back \d \d \d( \d)?, its tokens will be computed again",
        r"B           waits: free blocks needed \d, there are \d", r"B           recompute \d+\.\.\d+ -> .*"]),
    "swapping": (dict(num_blocks=8, swap_space=.001), [PAIR], greedy(15), [
        r"B           waits on the host: it was preempted in this step",
        r"preempted   B: swapped out, \d \d \d \d to host 0 1 2 3", r"swapped in  B: host \d.*"]),
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
    assert ("recompute" in "".join(lines)) == (case == "recompute")


def interrupted(first: tuple, second: tuple, **options) -> list[str]:
    """The trace of a request that a more urgent one preempts. A request: (prompt, tokens, priority)"""
    lines = traced(llm := small(scheduling_policy="priority", max_num_seqs=1, **options))
    for prompt, max_tokens, priority in (first, second):
        llm.add_request(prompt, greedy(max_tokens), priority=priority)
        llm.step()
    while llm.has_unfinished_requests():
        llm.step()
    return lines


def test_priorities():
    lines = interrupted(([1, 2, 3], 4, 5), ([4, 5, 6], 4, -1))
    assert "  arrives     A, priority 5, 3 prompt tokens: 1 2 3" in lines
    assert "  arrives     B, priority -1, 3 prompt tokens: 4 5 6" in lines
    second = sections(lines)[1]
    assert texts(second, "preempted") == ["A: gives back 0, its tokens will be computed again"]
    assert texts(second, "A") == ["waits: it was preempted in this step"]


def test_a_prompt_that_is_computed_again_is_told_from_one_that_goes_on():
    lines = interrupted((list(range(10)), 2, 1), ([4], 1, 0), max_num_batched_tokens=4, enable_prefix_caching=False)
    rows = [line.split("[")[0].split(" ", 4)[-1].strip() for line in lines if re.match(r"  A  .*\[", line)]
    assert rows == ["prompt 0..3 of 10", "recompute 0..3", "prompt 4..7 of 10", "prompt 8..9 of 10 -> 10",
                    "decode 10 -> 11"]


def test_aborts_of_running_and_waiting_requests():
    lines = traced(llm := small(max_num_seqs=1))
    a, b = llm.add_request(COMMON, greedy()), llm.add_request([1, 2], greedy())
    llm.step()
    llm.abort_request(b)
    llm.abort_request(a)
    llm.abort_request(a)
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


def test_a_token_sampled_for_nothing_is_said_to_be_dropped():
    lines = traced(llm := small(lookahead=1))
    a = llm.add_request([1, 2], greedy())
    llm.step()
    llm.abort_request(a)
    llm.step()
    assert lines[-2:] == ["no step: nothing can be computed now",
                          "  sampled     in step 0, read only now: A dropped, it had ended"]


def test_lookahead_names_the_step_that_sampled():
    lines = traced(llm := small(lookahead=1))
    llm.generate([1, 2, 3], greedy(3))
    sampled = [line[14:].split(":")[0] for line in lines if line.startswith("  sampled")]
    assert sampled == [f"in step {i}, read only now" for i in range(3)]
    assert "sampled" not in "".join(sections(lines)[0])
    llm.generate([[1, 2, 3], [4, 5, 6]], [greedy(1), greedy(3)])
    assert any(line.startswith("  B           waits for its token ") for line in lines)


def test_a_failed_step_is_undone():
    lines = traced(llm := small())
    launch, llm.runner.launch = llm.runner.launch, lambda step: 1 / 0
    llm.add_request([1, 2, 3], greedy(2))
    with pytest.raises(ZeroDivisionError):
        llm.step()
    assert lines[-1] == "  undone      step 0 failed, A will start over"
    llm.runner.launch = launch
    while llm.has_unfinished_requests():
        llm.step()
    assert any(line.startswith("  finished    A (length), frees ") for line in lines)


# --------------------------------------------------------------------------------------------------
# Attention
# --------------------------------------------------------------------------------------------------

def decode_once(llm: LLM, *lengths: int) -> list[str]:
    """The lines of a decode step after prompts of these lengths. Nothing is computed."""
    lines = traced(llm)
    for i, length in enumerate(lengths):
        llm.add_request([(i + j) % 1000 for j in range(length)], greedy(50))
    for _ in range(2):
        step = llm.scheduler.schedule()
        llm.scheduler.update(step, Sampled([7] * len(step.sampled)))
    return sections(lines)[1]


def test_where_the_kernel_splits_a_context():
    section = decode_once(small("shakespeare", num_blocks=300), 127)
    assert section and not texts(section, "attention")
    section = decode_once(small("shakespeare", num_blocks=300), 128, 20, 300)
    assert texts(section, "attention") == [
        "on a GPU (torch does not split): A 129 tokens in 2 splits of 128 (V2) and 1 more"]
    llm = small("shakespeare", num_blocks=300)
    llm.runner.kernels = kernel.TRITON
    section = decode_once(llm, 128, 20, 300)
    assert texts(section, "attention") == ["B in one piece (V1)",
                                           "A 129 tokens in 2 splits of 128 (V2), C 301 tokens in 3 splits of 128 (V2)"]
    llm = small("shakespeare", num_blocks=5000, max_num_batched_tokens=20000)
    llm.runner.kernels = kernel.TRITON  # 128 sequences and 2 kv heads keep the device busy without splits
    [text] = texts(decode_once(llm, *[130] * 128), "attention")
    assert text == "A 131 tokens in 2 splits of 128 in turn (V1) and 127 more"


def test_a_gpus_trace_says_at_the_first_decode_that_a_context_is_not_split():
    llm = load(num_blocks=300)
    llm.runner.kernels = kernel.TRITON
    lines = traced(llm)
    for length in (20, 126, 5):
        llm.add_request([length + i for i in range(length)], greedy(5))
    for _ in range(4):
        step = llm.scheduler.schedule()
        llm.scheduler.update(step, Sampled([7] * len(step.sampled)))
    assert [texts(section, "attention") for section in sections(lines)] == [
        [], ["A B C in one piece (V1)"], [], ["B 129 tokens in 2 splits of 128 (V2)"]]


def test_splits_follow_the_kernels_own_rule():
    function = getattr(kernel.split_length, "fn", kernel.split_length)
    names = dict(MIN_SPLIT=tiles.MIN_SPLIT, MID_SPLIT=tiles.MID_SPLIT, MAX_SPLITS=tiles.MAX_SPLITS)
    tl = SimpleNamespace(cdiv=cdiv, maximum=max, minimum=min)
    split_length = FunctionType(function.__code__, dict(tl=tl, **names))
    llm = small(num_blocks=8)
    for seq_len in (*range(1, 1100), *range(1100, 40_000, 97)):
        length = split_length(seq_len, 64)
        assert splits_of(llm, seq_len) == (cdiv(seq_len, length), length)
    config = SimpleNamespace(num_heads=8, num_kv_heads=2, head_dim=32, window=300)
    windowed = SimpleNamespace(runner=llm.runner, config=config)
    for seq_len in range(1, 3000, 7):
        count, length = splits_of(windowed, seq_len)
        assert count == len({position // length for position in range(max(0, seq_len - 300), seq_len)})


# --------------------------------------------------------------------------------------------------
# Lines
# --------------------------------------------------------------------------------------------------

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


# --------------------------------------------------------------------------------------------------
# An observer
# --------------------------------------------------------------------------------------------------

def test_outputs_are_the_same_with_and_without():
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=20)
    options = dict(num_blocks=12, swap_space=0.001, text=True)
    plain = small(**options).generate(MANY, params)
    lines = traced(llm := small(**options))
    assert llm.generate(MANY, params) == plain and any("preempted" in line for line in lines)


def test_close_leaves_the_scheduler_as_it_was(capsys):
    llm = small()
    observers = llm.scheduler.observers
    outer, inner = [], []
    first = Trace(llm, outer.append)
    second = Trace(llm, inner.append)
    llm.generate([1, 2, 3], greedy(1))
    assert inner[LEGEND:] == outer[LEGEND:] != []
    second.close()
    second.close()
    assert len(observers) == 1
    first.close()
    assert observers == []
    length = len(outer)
    llm.generate([1, 2, 3], greedy(1))
    assert len(outer) == len(inner) == length and capsys.readouterr() == ("", "")


def test_lines_go_to_stderr(capsys):
    trace = Trace(llm := small())
    llm.generate([1, 2, 3], greedy(1))
    trace.close()
    captured = capsys.readouterr()
    assert captured.out == "" and "\nstep 0: 3 of at most 8192 tokens" in captured.err


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream, environment, is_coloured", [
    (Terminal, dict(TERM="xterm", NO_COLOR=""), True), (io.StringIO, dict(TERM="xterm"), False),
    (Terminal, dict(TERM="dumb"), False), (Terminal, dict(TERM="xterm", NO_COLOR="1"), False)])
def test_colours_are_for_terminals(monkeypatch, stream, environment, is_coloured):
    """Without the escape sequences the lines are the same."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", shown := stream())
    llm, other = small(num_blocks=6), small(num_blocks=6)
    Trace(llm)
    expected = traced(other)
    for engine in (llm, other):
        engine.generate([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], greedy(12), use_tqdm=False)
    assert re.sub(r"\x1b\[\d+m", "", shown.getvalue()).splitlines() == expected
    coloured = {line for line in shown.getvalue().splitlines() if "\x1b" in line}
    assert bool(coloured) is is_coloured
    if is_coloured:
        assert {line.split("m")[0] for line in coloured} >= {f"\x1b[{color}" for color in (1, 31, 32, 36)}
        assert all(line.count("\x1b") == 2 for line in coloured)
