"""Tests of the three chapters: kernel.py, engine.py, model.py. What lies around them is tested in nanopaged/tests/.

On a machine without a GPU the kernel runs in Triton's interpreter, in float32 and float16; with one, the same tests
run on it, in bfloat16 too. Reference outputs in nanopaged/golden/ were computed by Hugging Face transformers
(nanopaged/golden/make_models.py).
"""
import gc
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest
import torch

import bench
import engine
import kernel
import model
from engine import NULL, BlockManager, Sampled, Scheduler, Sequence, Status
from kernel import cdiv, paged_attention, paged_attention_reference, store_kv
from model import activate, rope_frequencies
from nanopaged import LLM, BeamSearchParams, SamplingParams, optional_triton, tiles
from nanopaged.api import llm as llm_module
from nanopaged.api.beam import BeamSearch
from nanopaged.weights.checkpoint import read_safetensors, read_tensors
from nanopaged.device.fused import add_partials_and_norm, compile_rows, fuse, num_partial_products, partial_products
from nanopaged.device.logits import encode_bad_words
from nanopaged.device import warmup
from nanopaged.device.graphs import GraphRunner
from nanopaged.device.runner import Runner, pick_dtype
from nanopaged.device.sampler import pick
from nanopaged.weights.families import read_model_config

torch.set_num_threads(1)  # models this small gain nothing from more, and on a busy machine threads wait for each other
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
GOLDEN = Path(__file__).parent / "nanopaged" / "golden"
VARIANTS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
needs_kernel = pytest.mark.skipif(kernel.triton is None or not (CUDA or find_spec("numpy")),
                                  reason="the kernel needs Triton and a GPU, or numpy for Triton's interpreter")
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU; the same behaviour is tested in the interpreter")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


# --------------------------------------------------------------------------------------------------
# The kernel
# --------------------------------------------------------------------------------------------------

def paged_problem(query_lens, seq_lens, *, heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32, seed=0):
    """Random paged K and V in shuffled blocks. Every slot that no sequence owns is NaN, and so is every table entry
    behind a sequence's last block a block of NaN: whoever reads one of them shows it."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [cdiv(n, block_size) for n in seq_lens]
    pool = torch.full((2, sum(num_blocks) + 2, block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    shuffled = torch.randperm(sum(num_blocks) + 2, generator=generator).tolist()
    tables = torch.full((len(seq_lens), max(num_blocks) + 3), shuffled.pop(), dtype=torch.int32)
    for i, seq_len in enumerate(seq_lens):
        for j in range(num_blocks[i]):
            tables[i, j] = block = shuffled.pop()
            used = min(block_size, seq_len - j * block_size)
            pool[:, block, :used] = torch.randn(2, used, kv_heads, head_dim, generator=generator).to(dtype)
    q = torch.randn(sum(query_lens), heads, head_dim, generator=generator).to(dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return [x.to(DEVICE) for x in (q, pool[0], pool[1], tables, lens, starts)]


def reference(q, k_cache, v_cache, tables, lens, starts, scale, window):
    """Attention in float64, a loop over tokens: nothing in common with either implementation but the definition."""
    out = torch.zeros_like(q, dtype=torch.float64)
    q, k_cache, v_cache = q.double(), k_cache.double(), v_cache.double()
    group, block_size = q.shape[1] // k_cache.shape[2], k_cache.shape[1]
    for i, seq_len in enumerate(lens.tolist()):
        begin, end = starts[i].item(), starts[i + 1].item()
        slots = [(tables[i, t // block_size].item(), t % block_size) for t in range(seq_len)]
        if begin == end:
            continue
        k = torch.stack([k_cache[slot] for slot in slots]).repeat_interleave(group, 1)  # [seq_len, heads, head_dim]
        v = torch.stack([v_cache[slot] for slot in slots]).repeat_interleave(group, 1)
        for row in range(begin, end):
            position = seq_len - (end - row)
            seen = slice(max(0, position - window + 1) if window else 0, position + 1)
            weights = torch.softmax(torch.einsum("hd,thd->ht", q[row], k[seen]) * scale, -1)
            out[row] = torch.einsum("ht,thd->hd", weights, v[seen])
    return out


def run_attention(attention, problem, window=0, **kwargs):
    q, *_, lens, starts = problem
    out = torch.full_like(q, 7.0)  # a row that is not written keeps this
    return attention(*problem, q.shape[-1] ** -0.5, max_query_len=max(starts.diff().tolist()),
                     max_seq_len=max(lens.tolist()), sliding_window=window, out=out, **kwargs)


MIXED = ([1, 5, 1, 20], [7, 9, 40, 33])  # decode, a whole prompt's tail, decode, a chunk; query_lens and seq_lens
ATTENTION_CASES = {
    "one token": (([1], [1]), {}),
    "decode": (([1, 1, 1], [5, 16, 33]), {}),
    "prefill": (([3, 17], [3, 17]), {}),
    "mixed batch": (MIXED, {}),
    "splits": (([1, 1], [1100, 513]), {}),
    "splits under a window": (([1, 1], [1100, 100]), dict(window=600)),
    "long prefill": (([70], [90]), dict(heads=2, kv_heads=1)),
    "window shorter than the chunk": (MIXED, dict(window=4)),
    "window of one": (MIXED, dict(window=1)),
    "block size 1": (MIXED, dict(block_size=1)),
    "block size 48": (([1, 50], [70, 60]), dict(block_size=48)),
    "block size 64": (([1, 70], [70, 75]), dict(block_size=64)),
    "block size 256": (([1, 5], [300, 260]), dict(block_size=256)),
    "group of 1": (MIXED, dict(heads=2)),
    "group of 3": (MIXED, dict(heads=3, kv_heads=1)),
    "group of 7": (MIXED, dict(heads=7, kv_heads=1)),
    "group of 8": (MIXED, dict(heads=8, kv_heads=1)),
    "group of 20": (MIXED, dict(heads=20, kv_heads=1)),
    "group of 80": (MIXED, dict(heads=80, kv_heads=1)),
    "head_dim 8": (MIXED, dict(head_dim=8)),
    "head_dim 64": (MIXED, dict(head_dim=64)),
    "head_dim 80": (MIXED, dict(head_dim=80)),
    "head_dim 96": (MIXED, dict(head_dim=96)),
    "head_dim 128": (MIXED, dict(head_dim=128)),
    "head_dim 256": (MIXED, dict(head_dim=256)),
    "padding rows": (([1, 0, 4, 0], [7, 0, 6, 0]), {}),
}
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * CUDA  # the interpreter computes bfloat16 wrongly
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


# float16 takes the same path as float32 in the interpreter, whatever the shape: two shapes are enough there.
@pytest.mark.parametrize("case, dtype", [(case, dtype) for case in ATTENTION_CASES for dtype in DTYPES
                                         if CUDA or dtype is torch.float32 or case in ("mixed batch", "splits")])
@pytest.mark.parametrize("attention", [pytest.param(paged_attention, marks=needs_kernel), paged_attention_reference])
def test_attention_equals_float64(attention, case, dtype):
    (query_lens, seq_lens), options = ATTENTION_CASES[case]
    options = dict(options)
    window = options.pop("window", 0)
    problem = paged_problem(query_lens, seq_lens, dtype=dtype, **options)
    out = run_attention(attention, problem, window)
    expected = reference(*problem, problem[0].shape[-1] ** -0.5, window)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@needs_kernel
def test_cache_strides_are_read():
    """The pool's memory order is the caller's choice: here heads come before slots, and layers lie between blocks."""
    problem = paged_problem(*MIXED)
    expected = run_attention(paged_attention, problem)
    for i in (1, 2):
        blocks, slots, heads, dim = problem[i].shape
        other = torch.full((blocks, 3, heads, slots, dim), float("nan"), device=DEVICE)[:, 1].transpose(1, 2)
        problem[i] = other.copy_(problem[i])
    assert torch.equal(run_attention(paged_attention, problem), expected)
    assert relative_error(run_attention(paged_attention_reference, problem), expected) < 1e-5


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_attention_does_not_depend_on_the_batch(dtype, monkeypatch):
    """A sequence's result is the same bits alone and among others, and whatever the bounds that size the grid."""
    query_lens, seq_lens = [1, 6, 1, 1], [300, 40, 17, 1030]
    problem = paged_problem(query_lens, seq_lens, dtype=dtype)
    together = run_attention(paged_attention, problem)
    for programs in (1, 3):  # that share a context's splits, as they would in a batch of another size
        monkeypatch.setattr(kernel, "programs_per_context", lambda *_: programs)
        assert torch.equal(run_attention(paged_attention, problem), together)
    monkeypatch.undo()
    q, k_cache, v_cache, tables, lens, starts = problem
    for i in range(len(seq_lens)):
        rows = slice(starts[i], starts[i + 1])
        alone = paged_attention(q[rows], k_cache, v_cache, tables[i:i + 1], lens[i:i + 1],
                                (starts[i:i + 2] - starts[i]).int(), q.shape[-1] ** -0.5,
                                max_query_len=query_lens[i], max_seq_len=4000)
        assert torch.equal(together[rows], alone)


@needs_kernel
@pytest.mark.parametrize("window, fp8", [(600, False), (0, True)], ids=["window", "fp8"])
def test_programs_that_share_a_context_give_the_same_bits(window, fp8, monkeypatch):
    """Splits before the window are neither computed nor merged: whatever is in their place, even NaN, does not show."""
    if fp8 and CUDA and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8")
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape, **kwargs: (
        new_empty(x, *shape, **kwargs).fill_(math.nan) if x.is_floating_point() else new_empty(x, *shape, **kwargs)))
    problem = paged_problem([1, 1], [1030, 300])
    if fp8:
        problem[1:3] = [cache.nan_to_num().to(torch.float8_e4m3fn) for cache in problem[1:3]]
    results = []
    for programs in (1, 8):
        monkeypatch.setattr(kernel, "programs_per_context", lambda *_: programs)
        results.append(run_attention(paged_attention, problem, window))
    assert all(torch.equal(result, results[0]) for result in results) and results[0].isfinite().all()


@pytest.mark.parametrize("shared_memory", [64, 99, 227])
def test_stages_do_not_change_the_tile(shared_memory):
    """The order of additions hangs on it."""
    for group, head_dim, element, cache in itertools.product((1, 7, 40), (64, 128, 256), (2, 4), (1, 2)):
        three, four = (tiles.tile_config("decode", group, head_dim, element, shared_memory * 1024, min(cache, element), stages)
                       for stages in (3, 4))
        assert (three["TILE_M"], three["TILE_N"]) == (four["TILE_M"], four["TILE_N"])


@pytest.mark.parametrize("capability, cuda, interpreted, expected", [
    ((9, 0), "13.0", False, True), ((8, 9), "13.0", False, False), ((9, 4), None, False, False), ((9, 0), "13.0", True, False)])
def test_kernels_are_launched_early_where_that_exists(capability, cuda, interpreted, expected, monkeypatch):
    """From Hopper on; not on AMD's, whose device type is "cuda" too, nor in the interpreter."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(optional_triton, "INTERPRETED", interpreted)
    options = kernel.launch_options.__wrapped__(torch.device("cuda"))
    assert options["PDL"] == options.get("launch_pdl", False) == (expected and kernel.gdc_wait is not None)


def test_an_fp8_cache_of_odd_heads_is_refused():
    q, *caches, tables, lens, starts = paged_problem([1], [5], head_dim=7)
    with pytest.raises(ValueError, match="head_dim 7"):
        paged_attention(q, *(cache.nan_to_num().to(torch.float8_e4m3fn) for cache in caches), tables, lens, starts, 1.0,
                        max_query_len=1, max_seq_len=5)


@needs_kernel
def test_padding_is_not_written():
    problem = paged_problem([1, 0, 4, 0], [7, 0, 6, 0])
    problem[0] = torch.cat([problem[0], torch.full_like(problem[0][:3], float("nan"))])  # rows that belong to nobody
    tiles = torch.tensor([[2, 0], [-1, 0], [-1, 3]], dtype=torch.int32, device=DEVICE)
    assert kernel.tokens_per_tile(2, 32, torch.float32, problem[0].device) > 4, "the work list above is for one tile of sequence 2"
    out = run_attention(paged_attention, problem, query_tiles=tiles)
    assert torch.equal(out[5:], torch.full_like(out[5:], 7.0))
    assert relative_error(out[:5], reference(*problem, 32 ** -0.5, 0)[:5]) < 1e-5


def test_a_decode_step_in_torch_is_one_call(monkeypatch):
    """However many sequences there are, and however long: no loop over them."""
    calls, attend = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: calls.append(1) or attend(*args, **kwargs))
    run_attention(paged_attention_reference, paged_problem([1] * 9, [5, 16, 33, 1, 70, 12, 8, 9, 40]))
    assert len(calls) == 1


def test_store_kv_writes_the_slots_and_nothing_else():
    k, v = torch.randn(5, 3, 24, device=DEVICE), torch.randn(5, 3, 24, device=DEVICE)
    k_cache, v_cache = torch.full((2, 4, 8, 3, 24), 9.0, device=DEVICE)
    slots = torch.tensor([17, -1, 0, 31, -1], device=DEVICE)
    store_kv(k, v, k_cache, v_cache, slots)
    store_kv(k, v, k_cache, v_cache, torch.full_like(slots, -1))
    for new, cache in ((k, k_cache), (v, v_cache)):
        expected = torch.full((32, 3, 24), 9.0, device=DEVICE)
        expected[[17, 0, 31]] = new[[0, 2, 3]]
        assert torch.equal(cache.view(32, 3, 24), expected)


@needs_gpu
def test_a_pool_of_more_than_2_to_the_31_elements():
    """Offsets into a large pool need 64 bits: the last blocks are used, and the first hold what an overflow would read."""
    problem = paged_problem([1, 40], [300, 70], heads=8, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    q, k_cache, v_cache, tables, lens, starts = problem
    expected = run_attention(paged_attention, problem)
    num_blocks = 2**31 // k_cache[0].numel() + 1000
    shift = num_blocks - len(k_cache)
    for i, cache in ((1, k_cache), (2, v_cache)):
        problem[i] = torch.full((num_blocks, *cache.shape[1:]), float("nan"), dtype=cache.dtype, device=DEVICE)
        problem[i][shift:] = cache
    problem[3] = tables + shift
    assert torch.equal(run_attention(paged_attention, problem), expected)
    last_slot = num_blocks * 16 - 1
    store_kv(q[:1, :8], q[:1, :8], problem[1], problem[2], torch.tensor([last_slot], device=DEVICE))
    assert torch.equal(problem[1][-1, -1], q[0, :8])


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
def test_the_kernels_compile_and_fit_the_devices_shared_memory():
    """The interpreter accepts what the compiler does not. Every configuration: python -m nanopaged.tests.compile_kernels"""
    run = subprocess.run([sys.executable, "-m", "nanopaged.tests.compile_kernels", "--quick"], cwd=Path(__file__).parent,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
def test_triton_imported_without_its_interpreter_gets_a_sentence():
    """Triton reads the variable when another package, such as transformers, imports it first."""
    code = f"import triton, nanopaged; nanopaged.LLM({str(GOLDEN / 'qwen3')!r}, device='cpu', attention='triton')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert "ValueError: the Triton kernel needs" in run.stderr and "TRITON_INTERPRET=1 before" in run.stderr


@needs_kernel
def test_the_work_list_starts_with_the_tiles_of_the_longest_context():
    tiles = kernel.make_query_tiles([1, 40, 9, 20], [500, 40, 9, 100], 16).tolist()
    assert tiles == [[3, 1], [3, 0], [1, 2], [1, 1], [1, 0], [2, 0]]


# --------------------------------------------------------------------------------------------------
# BlockManager and Scheduler, with a fake model
# --------------------------------------------------------------------------------------------------

ARRIVALS = count()


def sequence(token_ids, max_new=10, max_model_len=10**6, priority=0, **fields):
    return Sequence(list(token_ids), (priority, next(ARRIVALS), 0), min(len(token_ids) + max_new, max_model_len), **fields)


def siblings(n, *args, **kwargs):
    """n samples of one prompt."""
    seqs = [sequence(*args, **kwargs) for _ in range(n)]
    for seq in seqs:
        seq.siblings = seqs[0].siblings
    return seqs


def check_books(scheduler):
    """What the block manager promises, after every step."""
    manager, num_holders = scheduler.block_manager, Counter()
    host_blocks = list(manager.free_host_blocks) + [host_block for host_block, _ in manager.step.swaps_in]
    for seq in scheduler.running + scheduler.waiting:
        held = [block for block in seq.block_table if block != NULL]
        assert len(set(held)) == len(held) and len(held) <= manager.max_blocks_per_seq
        assert seq.block_table[seq.num_null_blocks:] == held  # only the first entries are NULL
        assert not held or seq.status is Status.RUNNING
        assert bool(seq.host_table) == (seq.status is Status.SWAPPED)
        num_holders.update(held)
        host_blocks += [block for block in seq.host_table if block != NULL]
    assert sorted(host_blocks) == list(range(manager.num_host_blocks))
    for block in range(manager.num_blocks):
        assert manager.ref_counts[block] == num_holders[block]
        assert (block in manager.free_queue) == (manager.ref_counts[block] == 0)
    for key, (block, _) in manager.prefix_cache.items():
        assert manager.key_of_block[block] == key
    assert len(manager.prefix_cache) == len(manager.key_of_block)
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert sorted([seq.row for seq in scheduler.running] + scheduler.free_rows) == list(range(scheduler.max_num_seqs))
    for queue in (scheduler.running, scheduler.waiting):
        assert [seq.order for seq in queue] == sorted(seq.order for seq in queue)


class FakeModel:
    """Writes into each slot what a real model's K and V would depend on: all tokens up to there. So the contents of
    every block can be checked, and a block that is overwritten, shared wrongly or found by mistake shows."""

    def __init__(self, scheduler, lookahead=0):
        self.scheduler, self.slots, self.host, self.num_computed = scheduler, {}, {}, 0
        self.events = Counter()
        self.lookahead, self.launched = lookahead, deque()
        self.unread = {}  # sequence -> tokens that were sampled and not told to the scheduler yet

    def slot(self, seq, position):
        size = self.scheduler.block_manager.block_size
        assert seq.block_table[position // size] != NULL
        return seq.block_table[position // size] * size + position % size

    def move_blocks(self, step):
        """Out to the host, copies, in from the host, as the runner does it."""
        size = self.scheduler.block_manager.block_size
        for source, target, moves in ((self.slots, self.host, step.swaps_out), (self.slots, self.slots, step.copies),
                                      (self.host, self.slots, step.swaps_in)):
            contents = [[source.get(block * size + i) for i in range(size)] for block, _ in moves]
            for (_, block), content in zip(moves, contents):
                target.update((block * size + i, value) for i, value in enumerate(content))

    def tokens(self, seq):
        return seq.token_ids + self.unread.get(seq, [])

    def step(self, fail=False):
        step = self.scheduler.schedule()
        assert sum(step.num_tokens) <= self.scheduler.max_num_batched_tokens
        if fail:
            self.scheduler.undo(step)
            while self.launched:
                self.update()
            return step
        if step.seqs:
            self.launch(step)
        else:  # as Engine does it
            self.scheduler.undo(step)
            if not self.launched:
                for seq in list(self.scheduler.running):
                    self.scheduler.release(seq)
        if len(self.launched) > self.lookahead or not step.seqs:
            self.update()
        return step

    def launch(self, step):
        self.num_computed += sum(step.num_tokens)
        manager = self.scheduler.block_manager
        self.events.update(copies=len(step.copies), swaps_in=len(step.swaps_in), swaps_out=len(step.swaps_out),
                           preempted=len(step.preempted), nulls=sum(seq.num_null_blocks for seq in step.seqs))
        moved = [block for _, block in step.swaps_in + step.copies]
        assert len(set(moved)) == len(moved)  # a GPU would write them in any order
        self.move_blocks(step)
        for seq, num_tokens in zip(step.seqs, step.num_tokens):
            assert num_tokens > 0
            for position in range(seq.num_computed_tokens - num_tokens, seq.num_computed_tokens):
                if position >= seq.num_hit_tokens:
                    block = seq.block_table[position // manager.block_size]
                    # Others may list the block already, if they were admitted in this step: then they want just this.
                    assert manager.ref_counts[block] == 1 or any(
                        block in other.block_table and other in step.seqs for other in self.scheduler.running if other is not seq)
                    self.slots[self.slot(seq, position)] = tuple(self.tokens(seq)[:position + 1])
        for seq, num_tokens in zip(step.seqs, step.num_tokens):
            oldest = max(0, seq.num_computed_tokens - num_tokens - manager.window + 1) if manager.window else 0
            for position in range(oldest, seq.num_computed_tokens):
                assert self.slots[self.slot(seq, position)] == tuple(self.tokens(seq)[:position + 1])
        # A small vocabulary, so that different sequences often generate the same text.
        sampled = [sum(self.tokens(seq)) * 31 % 3 for seq in step.sampled]
        for seq, token in zip(step.sampled, sampled):
            self.unread.setdefault(seq, []).append(token)
        self.launched.append((step, sampled))

    def update(self):
        if self.launched:
            step, sampled = self.launched.popleft()
            for seq in step.sampled:
                self.unread[seq].pop(0)
            self.scheduler.update(step, Sampled(sampled, [(0.0, 1, [token], [0.0]) for token in sampled]))

    def run(self, *seqs, limit=10_000):
        for seq in seqs:
            self.scheduler.add(seq)
        for _ in range(limit):
            if not (self.scheduler.running or self.scheduler.waiting or self.launched):
                return
            self.step()
            check_books(self.scheduler)
        raise AssertionError("the scheduler makes no progress")


def fake(num_blocks=64, block_size=4, max_num_seqs=256, max_num_batched_tokens=8192, caching=True, lookahead=0, window=0,
         num_host_blocks=0):
    manager = BlockManager(num_blocks, block_size, caching, window, num_host_blocks)
    return FakeModel(Scheduler(manager, max_num_seqs, max_num_batched_tokens), lookahead)


def test_a_sequence_runs_to_its_end_and_gives_everything_back():
    model = fake()
    seq = sequence(range(10), max_new=7)
    model.run(seq)
    assert len(seq.token_ids) == 17 and seq.finish_reason == "length"
    assert model.scheduler.block_manager.num_free_blocks == 64
    assert model.num_computed == 16  # nothing follows the last token, so it is never computed


def test_identical_prompts_share_blocks_within_one_step():
    model = fake()
    first, second = sequence(range(10)), sequence(range(10))
    model.scheduler.add(first)
    model.scheduler.add(second)
    step = model.step()
    assert step.num_tokens == [10, 2]  # two full blocks of four are shared, the tail is each one's own
    assert first.block_table[:2] == second.block_table[:2] and first.block_table[2] != second.block_table[2]


def test_a_fully_cached_prompt_computes_one_token_and_writes_nothing():
    model = fake()
    model.run(sequence(range(8), max_new=1))
    seq = sequence(range(8), max_new=1)
    model.scheduler.add(seq)
    step = model.step()
    assert step.num_tokens == [1] and seq.num_cached_tokens == 8


def test_an_identity_is_the_exact_prefix_not_the_blocks_own_tokens():
    model = fake()
    model.run(sequence([1, 2, 3, 4, 5, 6, 7, 8], max_new=1))
    other = sequence([9, 9, 9, 9, 5, 6, 7, 8, 1], max_new=1)
    model.run(other)
    assert other.num_cached_tokens == 0


def test_an_evicted_blocks_identity_dies_with_its_reuse():
    model = fake(num_blocks=4)
    model.run(sequence([1] * 8, max_new=1))
    model.run(sequence([2] * 15, max_new=1))  # takes all four blocks
    again = sequence([1] * 8, max_new=1)
    model.run(again)
    assert again.num_cached_tokens == 0


def test_freed_blocks_are_reused_oldest_first_tail_before_head():
    model = fake(num_blocks=8)
    seq = sequence([5] * 12, max_new=1)
    model.run(seq)
    table = list(model.scheduler.block_manager.free_queue)[-3:]
    assert [model.scheduler.block_manager.key_of_block[block][0] != 0 for block in table] == [True, True, False]  # head is last
    longer = sequence([5] * 8 + [6] * 8, max_new=1)  # needs two new blocks; five were never used and go first
    model.run(longer)
    assert longer.num_cached_tokens == 8
    head = sequence([5] * 12, max_new=1)
    model.run(head)
    assert head.num_cached_tokens == 12


def test_two_holders_of_equal_tokens_in_different_blocks():
    """Both generate the same text at the same time, so both fill a block with the same tokens: one is shared
    from then on, the other stays private, and both may end in any order."""
    model = fake()
    first, second = sequence([0] * 3, max_new=9), sequence([0] * 3, max_new=6)
    model.run(first, second)
    third = sequence(first.token_ids[:8] + [2], max_new=1)
    model.run(third)
    assert third.num_cached_tokens == 8


def test_a_cached_block_does_not_outlive_its_predecessor():
    """A block is found through the one before it; when that one is evicted, a new one with the same tokens has a new
    identity, and what used to follow is not attached to it by accident."""
    manager = BlockManager(3, 2)
    scheduler = Scheduler(manager, 8, 64)
    model = FakeModel(scheduler)
    model.run(sequence([1, 1, 2, 2], max_new=1))
    first_block = manager.prefix_cache[0, (1, 1)][0]
    manager.uncache([first_block])
    seq = sequence([1, 1, 2, 2, 3], max_new=1)
    model.run(seq)
    assert seq.num_cached_tokens == 0


def test_decode_does_not_stall_behind_a_newer_prompt():
    model = fake(num_blocks=100, max_num_batched_tokens=16)
    old = sequence([1] * 4, max_new=50)
    model.scheduler.add(old)
    model.step()
    model.scheduler.add(sequence([2] * 200, max_new=2))
    for _ in range(13):
        before = len(old.token_ids)
        step = model.step()
        assert len(old.token_ids) == before + 1 and sum(step.num_tokens) == 16


def test_a_step_mixes_decode_chunks_and_new_prompts_within_its_budget():
    model = fake(max_num_batched_tokens=12)
    a, b, c = sequence([1] * 3), sequence([2] * 20), sequence([3] * 5)
    for seq in (a, b, c):
        model.scheduler.add(seq)
    assert model.step().num_tokens == [3, 9]
    assert model.step().num_tokens == [1, 11]  # b's prompt is done
    assert model.step().num_tokens == [1, 1, 5]


def test_max_num_seqs_is_kept():
    model = fake(max_num_seqs=3)
    seqs = [sequence([i] * 5) for i in range(10)]
    model.run(*seqs)  # check_books looks after every step
    assert all(len(seq.token_ids) == 15 for seq in seqs)


def test_preemption_takes_from_the_back_and_the_first_goes_on():
    model = fake(num_blocks=6)
    seqs = [sequence([i] * 7, max_new=13) for i in range(3)]
    for seq in seqs:
        model.scheduler.add(seq)
    preempted = []
    while model.scheduler.running or model.scheduler.waiting:
        step = model.step()
        check_books(model.scheduler)
        preempted += step.preempted
        if seqs[0].status is not Status.FINISHED:
            assert seqs[0] in step.seqs
    assert preempted and seqs[0] not in preempted
    assert all(len(seq.token_ids) == 20 for seq in seqs)


def test_priority_goes_before_arrival_when_seats_or_blocks_are_short():
    for shortage in (dict(max_num_seqs=2), dict(num_blocks=6), dict(max_num_batched_tokens=8)):
        model = fake(**shortage)
        for i in range(3):
            model.scheduler.add(sequence([i] * 8, max_new=8, priority=1))
        for _ in range(3):
            model.step()
        urgent = sequence([9] * 8, priority=0)
        model.scheduler.add(urgent)
        assert urgent in model.step().seqs
        model.run()


def test_a_blocked_head_of_the_queue_is_not_looked_up_again(monkeypatch):
    model = fake(num_blocks=8)
    lookups = []
    find_prefix = BlockManager.find_prefix
    monkeypatch.setattr(BlockManager, "find_prefix", lambda self, seq: lookups.append(seq) or find_prefix(self, seq))
    model.scheduler.add(sequence([1] * 15, max_new=12))
    blocked = sequence([2] * 24, max_new=6)
    model.scheduler.add(blocked)
    for _ in range(10):
        model.step()
    assert lookups.count(blocked) == 1
    model.run()
    assert len(blocked.token_ids) == 30


def test_a_blocked_sample_is_admitted_as_soon_as_it_can_share_the_prompt():
    """The first of two samples has most of the pool; the others fit as soon as they can share its blocks."""
    model = fake(num_blocks=24, caching=False)
    seqs = siblings(3, range(60), max_new=5)
    seqs[0].max_chunk = 40
    for seq in seqs:
        model.scheduler.add(seq)
    assert model.step().num_tokens == [40]  # 14 blocks are left, and the prompt needs 15
    assert model.step().num_tokens == [20, 1, 1]
    model.run()
    assert model.num_computed == 60 + 2 + 3 * 4


def test_a_blocked_prompt_is_admitted_as_soon_as_the_cache_has_it():
    model = fake(num_blocks=12, max_num_batched_tokens=16)
    first, second = sequence([1] * 40, max_new=4), sequence([1] * 40, max_new=4)
    model.scheduler.add(first)
    model.step()
    model.scheduler.add(second)  # needs 10 blocks, of which it can share what there is
    num_steps = next(i for i in count(1) if second in model.step().seqs)
    assert num_steps <= 2 and first.status is Status.RUNNING
    model.run()


def test_a_failed_step_is_undone():
    model = fake()
    seqs = [sequence([1] * 9), sequence([1] * 9)]
    for seq in seqs:
        model.scheduler.add(seq)
    model.step(fail=True)
    check_books(model.scheduler)
    assert not model.scheduler.block_manager.prefix_cache  # what was never written is never found
    assert model.scheduler.block_manager.num_free_blocks == 64
    model.run()
    assert all(len(seq.token_ids) == 19 for seq in seqs)


def test_block_operations_do_not_depend_on_the_pool():
    """O(1): the same work touches the same blocks in a pool of 100 and of 100,000, and only those."""
    for num_blocks in (100, 100_000):
        model = fake(num_blocks=num_blocks)
        seqs = [sequence([i] * 9, max_new=3) for i in range(4)]
        for seq in seqs:
            model.scheduler.add(seq)
        step = model.scheduler.schedule()
        assert [block for seq in step.seqs for block in seq.block_table] == list(range(12))


def test_samples_of_a_prompt_compute_it_once_and_copy_the_block_that_they_write():
    for caching in (True, False):
        model = fake(caching=caching)
        seqs = siblings(3, range(10), max_new=5)
        for seq in seqs:
            model.scheduler.add(seq)
        step = model.step()
        assert step.num_tokens == [10, 1, 1]  # the others want the last token's logits, and write nothing
        assert seqs[0].block_table == seqs[1].block_table == seqs[2].block_table
        last = seqs[0].block_table[2]
        step = model.step()  # two write into a copy, the last one into the original
        assert [block for block, _ in step.copies] == [last, last]
        assert seqs[2].block_table[2] == last and len({seq.block_table[2] for seq in seqs}) == 3
        assert seqs[0].block_table[:2] == seqs[1].block_table[:2] == seqs[2].block_table[:2]
        model.run()
        assert model.num_computed == 10 + 2 + 3 * 4


def test_a_prompt_of_whole_blocks_needs_no_copy():
    model = fake()
    for seq in siblings(4, range(8), max_new=3):
        model.scheduler.add(seq)
    model.run()
    assert model.events["copies"] == 0


def test_a_preempted_sequence_moves_to_the_host_and_computes_nothing_again():
    model = fake(num_blocks=6, num_host_blocks=20, caching=False)
    seqs = [sequence([i] * 7, max_new=13) for i in range(3)]
    model.run(*seqs)
    assert model.events["swaps_out"] == model.events["swaps_in"] > 0
    assert model.num_computed == 3 * 19  # every token once
    short = fake(num_blocks=6, num_host_blocks=1)  # no room there: recompute
    short.run(*[sequence([i] * 7, max_new=13) for i in range(3)])
    assert short.events["preempted"] > 0 and short.events["swaps_out"] == 0 and short.num_computed > 3 * 19


def test_a_swapped_sequence_takes_from_the_cache_what_is_still_there():
    model = fake(num_blocks=6, num_host_blocks=20)
    seqs = [sequence([i] * 8, max_new=12) for i in range(3)]
    model.run(*seqs)
    assert 0 < model.events["swaps_in"] < model.events["swaps_out"]


@pytest.mark.parametrize("block_size, window, chunk", [(1, 5, 3), (4, 8, 8192), (4, 7, 3), (16, 5, 20)])
def test_a_window_bounds_the_blocks_of_a_sequence_of_any_length(block_size, window, chunk):
    num_blocks = cdiv(window + min(chunk, 40), block_size) + 1
    model = fake(num_blocks, block_size, max_num_batched_tokens=chunk, window=window)
    seq = sequence([i % 3 for i in range(200)], max_new=50)  # far more than the pool holds
    model.scheduler.add(seq)
    while seq.status is not Status.FINISHED:
        step = model.step()
        check_books(model.scheduler)
        held = sum(block != NULL for block in seq.block_table)
        assert held <= cdiv(window + sum(step.num_tokens), block_size) + 1
    assert len(seq.token_ids) == 250 and model.scheduler.block_manager.num_free_blocks == num_blocks


def test_the_cache_counts_what_it_saves():
    model = fake()
    model.run(sequence(range(10), max_new=1))
    model.run(sequence(range(10), max_new=1), sequence([7] * 10, max_new=1))
    manager = model.scheduler.block_manager
    assert (manager.num_prompt_tokens, manager.num_cached_tokens) == (30, 8)


@pytest.mark.parametrize("shortage", [dict(max_num_seqs=4), dict(num_blocks=14), dict(num_blocks=14, num_host_blocks=9)], ids=str)
def test_a_flood_of_low_priority_never_delays_an_urgent_request_by_more_than_a_step(shortage):
    model = fake(**shortage)
    for i in range(30):
        model.scheduler.add(sequence([i] * 8, max_new=8, priority=5))
    for round in range(10):
        model.step()
        urgent = sequence([40 + round] * 8, max_new=2, priority=0)
        model.scheduler.add(urgent)
        assert urgent in model.step().seqs
        model.step()
        assert urgent.status is Status.FINISHED


def test_an_idle_engine_checks_its_books():
    model = fake()
    model.run(sequence(range(9)))
    model.scheduler.block_manager.check_idle()
    model.scheduler.block_manager.ref_counts[3] += 1
    with pytest.raises(RuntimeError, match="idle"):
        model.scheduler.block_manager.check_idle()


class RandomGroup:
    """Beams that go on at random, in place of a BeamGroup: a search's blocks do not depend on the model."""

    def __init__(self, width, max_tokens, rng):
        self.beam_width, self.max_tokens, self.rng, self.num_tokens = width, max_tokens, rng, 0

    def extend(self, candidates):
        self.num_tokens += 1
        count = self.beam_width if self.num_tokens < self.max_tokens else 0
        return [(self.rng.randrange(len(candidates)), self.rng.randint(0, 2)) for _ in range(count)]


NUM_RANDOM_OPERATIONS = int(os.environ.get("NUM_RANDOM_OPERATIONS", 20_000))  # the long mode: as many as you have time for


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_every_promise(seed):
    """Adds, steps, failing steps, samples, beams, priorities and aborts in every state, on tiny pools with and without a
    host pool and a window; prompts are cut from few texts, so prefixes are shared, evicted and generated all the time.
    FakeModel checks every slot, check_books the rest."""
    rng, events = random.Random(seed), Counter()
    for _ in range(NUM_RANDOM_OPERATIONS // 4 // 250):
        random_operations(250, rng, events)
    assert all(events[name] > 0 for name in ("copies", "swaps_in", "swaps_out", "preempted", "nulls", "finished", "branches")), events


def random_operations(count, rng, events):
    block_size, max_len = rng.choice([1, 2, 3, 4, 8]), rng.choice([20, 40])
    window = rng.choice([0, 0, 1, 5, 11])
    num_blocks = cdiv(window or max_len, block_size) + 2 + rng.randint(0, 20)
    model = fake(num_blocks, block_size, rng.choice([1, 3, 8]), rng.choice([1, 5, 30]), rng.random() < 0.8, rng.choice([0, 1]), window,
                 rng.choice([0, 5, 50]))
    texts = [[rng.randint(0, 2) for _ in range(max_len)] for _ in range(3)]
    scheduler, alive, searches = model.scheduler, [], []
    for _ in range(count):
        action = rng.random()
        prompt = rng.choice(texts)[:rng.randint(1, max_len - 1)]
        if action < 0.30 and len(alive) < 20:
            priority, new = rng.choice([0, 0, 1]), rng.randint(1, 20)
            for seq in siblings(rng.choice([1, 1, 2, 4]), prompt, new, max_len, priority):
                alive.append(seq)
                scheduler.add(seq)
        elif action < 0.33 and len(searches) < 3:
            group = RandomGroup(rng.randint(1, 4), max_len - len(prompt), rng)
            searches.append(BeamSearch(None, prompt, group, next(ARRIVALS), 1, scheduler))
        elif action < 0.37 and alive:
            scheduler.finish(rng.choice(alive), "abort")
        elif action < 0.38 and searches:
            searches.pop(rng.randrange(len(searches))).stop()
        else:
            model.step(fail=action > 0.97)
            for search in searches:
                if search.can_branch:
                    search.branch()
                    assert len(search.beams) + len(search.free_numbers) == search.group.beam_width
                    events["branches"] += bool(search.beams)
        check_books(scheduler)
        events["finished"] += sum(seq.status is Status.FINISHED for seq in alive)
        alive = [seq for seq in alive if seq.status is not Status.FINISHED]
        searches = [search for search in searches if search.beams]
    for search in searches:
        search.stop()
    model.run()
    scheduler.block_manager.check_idle()
    events.update(model.events)


# --------------------------------------------------------------------------------------------------
# The model against reference outputs
# --------------------------------------------------------------------------------------------------

def load(variant="shakespeare", **options):
    """An engine in float32, where outputs do not depend on batch and chunk sizes."""
    model = variant if variant == "shakespeare" else str(GOLDEN / variant)
    return LLM(model, **dict(dtype="float32", block_size=16, max_num_seqs=64, num_blocks=4096 // options.get("block_size", 16)) | options)


def expectations(variant):
    """prompts, continuations, logits: what transformers computed."""
    file = (Path(__file__).parent / "nanopaged" / variant if variant == "shakespeare" else GOLDEN / variant)
    expected = read_safetensors(file / "expected.safetensors")
    expected = dict(expected)
    indices = range(sum(name.startswith("prompt.") for name in expected))
    return tuple([expected[f"{kind}.{i}"] for i in indices] for kind in ("prompt", "continuation", "logits"))


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def prompt_logits(llm, prompt):
    """Logits of every position of a prompt: each of its beginnings is a prompt of its own."""
    captured, runner = [], llm.runner

    def capturing(compute):
        def call(*args):
            tokens, logits = compute(*args)
            captured.append(logits.clone())
            return tokens, logits
        return call

    compute, runner._compute = runner._compute, capturing(runner._compute)
    llm.generate([prompt[:n + 1] for n in range(len(prompt))], SamplingParams(temperature=0, max_tokens=1))
    runner._compute = compute
    return torch.cat(captured)


@pytest.mark.parametrize("variant", VARIANTS + ["shakespeare"])
def test_logits_equal_transformers(variant):
    prompts, _, logits = expectations(variant)
    llm = load(variant, enable_prefix_caching=False)
    for prompt, expected in zip(prompts, logits):
        assert relative_error(prompt_logits(llm, prompt.tolist()).cpu(), expected) < 1e-4


@pytest.mark.parametrize("variant", VARIANTS + ["shakespeare"])
def test_greedy_continuations_equal_transformers(variant):
    prompts, continuations, _ = expectations(variant)
    llm = load(variant)
    params = SamplingParams(temperature=0, max_tokens=len(continuations[0]), ignore_eos=True)
    outputs = llm.generate([prompt.tolist() for prompt in prompts], params)
    assert tokens_of(outputs) == [continuation.tolist() for continuation in continuations]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)


def test_the_torch_path_on_any_device():
    prompts, continuations, _ = expectations("qwen3")
    outputs = load("qwen3", attention="torch").generate([prompt.tolist() for prompt in prompts], GREEDY)
    assert tokens_of(outputs) == [continuation.tolist()[:24] for continuation in continuations]


class RecordingKernel:
    """Notes in which of its forms the kernel is launched, and launches it; not in the interpreter, which would take seconds."""

    def __init__(self, kernel, forms):
        self.kernel, self.forms = kernel, forms

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.forms.add((self.kernel.__name__, *sorted(constants.items())))
            if CUDA:
                self.kernel[grid](*args, **constants)
        return launch


@needs_kernel
@pytest.mark.parametrize("variant, options", [("qwen3", {}), ("mistral", dict(sliding_window=100)), ("qwen3", dict(max_num_seqs=1))], ids=str)
def test_kernels_are_compiled_before_the_first_request(tmp_path, monkeypatch, variant, options):
    config, max_num_seqs = json.loads((GOLDEN / variant / "config.json").read_text()), options.get("max_num_seqs", 8)
    (tmp_path / "config.json").write_text(json.dumps(
        config | dict(max_position_embeddings=512, num_hidden_layers=1, layer_types=None) | options))
    forms = set()
    for name in ("paged_attention_kernel", "merge_splits_kernel", "rotate_and_store_kernel"):
        monkeypatch.setattr(kernel, name, RecordingKernel(getattr(kernel, name), forms))
    monkeypatch.setattr(tiles, "MANY_CONTEXTS", 8)
    llm = LLM(str(tmp_path), load_format="dummy", attention="triton", dtype="float32", num_blocks=64, max_num_seqs=max_num_seqs,
              enforce_eager=True)
    monkeypatch.setattr(llm.runner, "sampler", lambda logits, batch: torch.ones(len(logits), dtype=torch.int64, device=DEVICE))
    forms.clear()
    warmup.compile_kernels(llm.runner)
    compiled = set(forms)
    forms.clear()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate([[7] * 130], params)
    llm.generate([[8, i] for i in range(max_num_seqs)], params)
    assert {form[0] for form in forms} == {"paged_attention_kernel", "rotate_and_store_kernel", "merge_splits_kernel"}
    assert {dict(form[1:]).get("NO_SPLIT") for form in forms} == {True, False, None}
    assert all(dict(form[1:])["enable_fp_fusion"] for form in forms)  # Triton's default differs between versions
    assert forms <= compiled


def test_a_second_model_is_compiled_for_its_own_sizes(monkeypatch):
    graphs, compile = [], torch.compile

    def compiler(graph, _):
        inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        graphs.append({tuple(size if type(size) is int else "rows" for size in x.shape) for x in inputs if torch.is_tensor(x)})
        return graph

    monkeypatch.setattr(torch, "compile", lambda function, dynamic, options: compile(function, dynamic=dynamic, backend=compiler))
    for width, eps in ((64, 1e-6), (96, 1e-5)):
        norm, activation, draw = compile_rows(add_partials_and_norm, 2), compile_rows(activate, 1), compile_rows(pick, 4)
        for rows in (5, 9):  # as many rows as one likes
            x, weight, whole = torch.randn(rows, width), torch.nn.Parameter(torch.ones(width)), torch.ones(rows, dtype=torch.int64)
            norm(x, x + 1, weight, None, eps)
            activation(x, "silu", True)
            draw(x, whole.float(), whole, whole)
        # Nothing but the number of rows varies. (eps would be a tensor, too, of shape ().)
        assert graphs == [{("rows", width), (width,)}, {("rows", width)}, {("rows", width), ("rows",)}]
        graphs.clear()


@needs_kernel
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_triton_path_equals_transformers(variant):
    prompts, continuations, _ = expectations(variant)
    llm = load(variant, attention="triton")
    num_prompts, num_new = (len(prompts), 8) if CUDA else (2, 2)  # the interpreter takes a second for 30 tokens
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    outputs = llm.generate([prompt.tolist() for prompt in prompts[:num_prompts]], params)
    assert tokens_of(outputs) == [continuation.tolist()[:num_new] for continuation in continuations[:num_prompts]]


# --------------------------------------------------------------------------------------------------
# Equality of outputs: how the work is cut never shows in the text
# --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("variant", ["gpt2", "mistral", "qwen3"])
@pytest.mark.parametrize("options", [
    dict(enforce_eager=True), dict(lookahead=1), dict(lookahead=1, max_num_batched_tokens=7, block_size=1),
    dict(lookahead=1, num_blocks=9, block_size=8),
    dict(block_size=1), dict(block_size=64), dict(max_num_batched_tokens=1), dict(max_num_batched_tokens=7),
    dict(max_num_seqs=1), dict(max_num_seqs=2, max_num_batched_tokens=20), dict(enable_prefix_caching=False),
    dict(num_blocks=9, block_size=8), dict(num_blocks=65, block_size=1, max_num_batched_tokens=7),
    dict(num_blocks=10, block_size=8, enable_prefix_caching=False),
], ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()))
def test_outputs_do_not_depend_on_how_the_work_is_cut(variant, options):
    prompts, continuations, _ = expectations(variant)
    lookahead = options.get("lookahead")
    llm = load(variant, **{name: value for name, value in options.items() if name != "lookahead"})
    llm.engine.lookahead = llm.engine.lookahead if lookahead is None else lookahead  # what CUDA graphs come with, here without them
    preemptions = []
    preempt = llm.scheduler._preempt
    llm.scheduler._preempt = lambda step: preemptions.append(1) or preempt(step)
    prompts = [prompt.tolist() for prompt in prompts] * 2
    assert tokens_of(llm.generate(prompts, GREEDY)) == [c.tolist() for c in continuations] * 2
    assert llm.scheduler.block_manager.num_free_blocks == llm.scheduler.block_manager.num_blocks
    if "num_blocks" in options and not llm.scheduler.block_manager.window:  # such a pool holds little more than the longest sequence
        assert len(preemptions) >= 3


def test_outputs_are_the_same_alone_in_a_batch_and_from_the_cache():
    llm = load("llama3")
    prompts, continuations, _ = expectations("llama3")
    for prompt, continuation in zip(prompts, continuations):
        for _ in range(2):  # the second time its blocks are in the cache
            output = llm.generate(prompt.tolist(), GREEDY)[0]
            assert output.outputs[0].token_ids == continuation.tolist()
    assert output.num_cached_tokens == len(prompt) // 16 * 16
    block = llm.scheduler.block_manager.block_size
    whole = prompt.tolist() + continuation.tolist()[:block - len(prompt) % block]  # ends at the end of a block
    output = llm.generate(whole, GREEDY)[0]
    assert len(whole) % block == 0 and output.num_cached_tokens == len(whole)
    expected = load("llama3", enable_prefix_caching=False).generate(whole, GREEDY)[0]
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    for i in range(80):  # push everything out
        llm.generate([[i + 10] * 60], SamplingParams(max_tokens=1))
    output = llm.generate(whole, GREEDY)[0]
    assert output.num_cached_tokens == 0 and output.outputs[0].token_ids == expected.outputs[0].token_ids


class PretendedGraph:
    """In place of a CUDA graph on a CPU: does again what was done while it was recorded."""
    recording = None

    def __init__(self):
        self.steps = []

    def pool(self):
        pass

    def replay(self):
        for step, (logits, tokens) in self.steps:
            new_logits, new_tokens = step()
            assert new_logits.data_ptr() == logits.data_ptr()
            tokens.copy_(new_tokens)

    @classmethod
    @contextmanager
    def record(cls, graph, pool=None, stream=None):
        cls.recording = graph
        yield
        cls.recording = None


def record_graphs(llm, monkeypatch):
    """What the engine does at its start on a GPU, with pretended graphs on a CPU; returns the list of shapes replayed."""
    runner, replayed = llm.runner, []
    if not CUDA:
        runner.__class__, runner.graphs = GraphRunner, {}
        static_step = runner._static_step

        def recorded(shape):
            outputs = static_step(shape)
            if PretendedGraph.recording:
                PretendedGraph.recording.steps.append((lambda: static_step(shape), outputs))
            return outputs

        monkeypatch.setattr(runner, "_static_step", recorded)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
        monkeypatch.setattr(torch.cuda, "graph", PretendedGraph.record)
        runner.record()
        llm.engine.lookahead = 1
    replay = runner._replay
    monkeypatch.setattr(runner, "_replay", lambda shape, *args: replayed.append(shape) or replay(shape, *args))
    return replayed


@pytest.mark.parametrize("variant", ["gpt2", "mistral", "qwen3"])
@pytest.mark.parametrize("options", [{}, dict(max_num_batched_tokens=7), dict(max_num_seqs=2, max_num_batched_tokens=20),
                                     dict(num_blocks=9, block_size=8), dict(enable_prefix_caching=False)], ids=str)
def test_outputs_of_replayed_steps(monkeypatch, variant, options):
    """Steps with prompts and without, padded and full, whose sequences all sample or not."""
    monkeypatch.setattr("nanopaged.device.graphs.TOKEN_SIZES", [4, 16, 32])
    monkeypatch.setattr("nanopaged.device.graphs.DECODE_SIZES", [1, 2, 4])
    prompts, continuations, _ = expectations(variant)
    llm = load(variant, **dict(max_num_batched_tokens=100) | options)
    replayed = record_graphs(llm, monkeypatch)
    monkeypatch.setattr(Runner, "_compute", None)  # nothing is launched kernel by kernel
    prompts = [prompt.tolist() for prompt in prompts] * 2
    assert tokens_of(llm.generate(prompts, GREEDY)) == [c.tolist() for c in continuations] * 2
    assert {shape.num_tiles > 0 for shape in replayed} == {True, False}
    drawn = SamplingParams(temperature=1.0, top_k=20, seed=1, max_tokens=9, repetition_penalty=1.1, logprobs=2)
    seen = [tokens_of(llm.generate(prompts, params)) for params in (drawn, SamplingParams(seed=2, max_tokens=9))]
    monkeypatch.undo()
    monkeypatch.setattr(llm.runner, "graphs", {})
    assert seen == [tokens_of(llm.generate(prompts, params)) for params in (drawn, SamplingParams(seed=2, max_tokens=9))]


def test_the_last_layer_attends_only_for_what_samples():
    llm, rows = load("qwen3", max_num_batched_tokens=32, enable_prefix_caching=False, enforce_eager=True), []
    kernels, layers = llm.runner.kernels, llm.config.num_layers

    def attention(q, *args, **kwargs):
        rows.append(len(q))
        return kernels.attention(q, *args, **kwargs)

    llm.runner.kernels = kernels._replace(attention=attention)
    for prompt_logprobs, expected in (
            (None, [32] * (layers - 1) + [8] * (layers - 1) + [1] + [1] * layers),
            # With logits for all: what samples is computed by itself all the same, so that its bits are.
            (0, [32] * layers + [8] * (layers - 1) + [1, 8] + [1] * layers)):
        rows.clear()
        llm.generate(list(range(40)), SamplingParams(max_tokens=2, prompt_logprobs=prompt_logprobs, ignore_eos=True))
        assert rows == expected
    rows.clear()
    for prompt in ([5], [6], [7, 8]):  # nor does it depend on how many others there are
        llm.add_request(prompt, SamplingParams(max_tokens=1))
    llm.step()
    assert rows == [4] * (layers - 1) + [3]


def test_which_steps_are_replayed(monkeypatch):
    llm = load(max_num_batched_tokens=8192, max_num_seqs=128)
    if not CUDA:  # they are not replayed here
        monkeypatch.setattr(GraphRunner, "_static_step", lambda self, shape: (torch.empty(0), torch.empty(0)))
    record_graphs(llm, monkeypatch)
    shape = llm.runner.graph_shape
    assert shape([1] * 5, [100] * 5) == (8, 8, 0) and shape([1] * 128, [20] * 128)[:2] == (128, 128)
    assert shape([1] * 129, [20] * 129) is None
    assert shape([1, 3], [100, 3])[:2] == (64, 16) and shape([65], [65])[:2] == (256, 16)
    assert shape([1] * 16 + [3], [20] * 17)[:2] == (64, 64) and shape([1] * 100 + [30], [30] * 101)[:2] == (256, 128)
    assert shape([1030], [1030])[:2] == (2048, 16)  # launching takes longer than computing so much padding
    assert shape([2049], [2049]) is None and shape([3600], [3600])[:2] == (4096, 16)  # and so much, not
    assert shape([8192], [8192])[:2] == (8192, 16)
    # Few long contexts are cut among programs.
    few, many = [1] * 15 + [20], [1] * 70 + [20]
    assert shape(few, [5000] * 16)[:2] == (64, 16) and shape(many, [4096] * 71)[:2] == (256, 128)
    assert shape(many, [5000] * 71) is None


def test_chunks_that_sample_nothing_get_no_logits():
    llm, rows = load("qwen3", max_num_batched_tokens=8, enforce_eager=True), []
    forward = llm.runner.model.forward
    llm.runner.model.forward = lambda *args: rows.append(forward(*args)) or rows[-1]
    llm.generate([[7] * 50, [8] * 30], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert sum(len(logits) for logits in rows) == 6 and min(len(logits) for logits in rows) == 0


def test_a_request_draws_the_same_numbers_in_any_batch():
    llm = load()
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=20)
    filtered = SamplingParams(temperature=0.9, top_k=30, top_p=0.9, min_p=0.01, seed=8, max_tokens=20)
    alone = [tokens_of(llm.generate("To be, or", p))[0] for p in (params, filtered)]
    greedy = SamplingParams(temperature=0, max_tokens=9)
    among = llm.generate(["KING:", "To be, or", "A", "To be, or"], [greedy, params, filtered, filtered])
    assert [tokens_of(among)[1], tokens_of(among)[3]] == alone
    tight = load(num_blocks=5, block_size=8)
    assert [tokens_of(tight.generate(["To be, or"] * 3, [params, filtered, params]))[i] for i in (0, 1)] == alone
    assert tokens_of(llm.generate("To be, or", SamplingParams(temperature=1.0, seed=9, max_tokens=20)))[0] != alone[0]


def test_n_samples_are_requests_with_seeds_of_their_own():
    llm = load()
    samples = llm.generate("KING:", SamplingParams(n=3, seed=5, max_tokens=12))[0].outputs
    assert [sample.index for sample in samples] == [0, 1, 2]
    for j, sample in enumerate(samples):
        assert sample.token_ids == tokens_of(llm.generate("KING:", SamplingParams(seed=5 + j, max_tokens=12)))[0]
    assert len({sample.text for sample in samples}) == 3


# --------------------------------------------------------------------------------------------------
# What a paged pool makes possible, with real models
# --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [{}, dict(enable_prefix_caching=False), dict(max_num_seqs=3), dict(num_blocks=20, block_size=4),
                                     dict(num_blocks=20, block_size=4, swap_space=0.01)], ids=str)
def test_sample_j_equals_a_request_of_its_own_with_seed_s_plus_j(options):
    prompt = list(range(40, 51))
    alone = [tokens_of(load().generate(prompt, SamplingParams(temperature=0.9, seed=7 + j, max_tokens=20)))[0] for j in range(6)]
    output = load(**options).generate(prompt, SamplingParams(n=6, temperature=0.9, seed=7, max_tokens=20))[0]
    assert [sample.token_ids for sample in output.outputs] == alone


@pytest.mark.parametrize("variant", ["mistral", "qwen2"])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_swapping_changes_no_output(variant, caching):
    prompts, continuations, _ = expectations(variant)
    prompts = [prompt.tolist() for prompt in prompts] * 3
    swapped = 0
    llm = load(variant, num_blocks=max(cdiv(len(p) + len(c), 4) for p, c in zip(prompts, continuations)) + 3, block_size=4,
               swap_space=0.05, enable_prefix_caching=caching)
    launch = llm.runner.launch

    def count(step):
        nonlocal swapped
        swapped += len(step.swaps_in)
        return launch(step)

    llm.runner.launch = count
    params = SamplingParams(temperature=0, max_tokens=len(continuations[0]), ignore_eos=True)
    assert tokens_of(llm.generate(prompts, params)) == [c.tolist() for c in continuations] * 3
    assert swapped > 0 or llm.scheduler.block_manager.window
    llm.scheduler.block_manager.check_idle()


def test_an_fp8_cache_changes_the_loss_by_less_than_a_percent():
    """Of the bundled model, on a piece of the last tenth of tinyshakespeare, which it was not trained on."""
    held_out = load().get_tokenizer().encode((GOLDEN.parent / "shakespeare" / "held_out.txt").read_text())
    prompts = [held_out[start:start + 400] for start in range(0, len(held_out) - 400, 400)]
    losses, outputs = {}, {}
    for dtype in ("auto", "fp8"):
        llm = load(kv_cache_dtype=dtype)
        outputs[dtype] = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0))
        tokens = [list(entry.values())[0].logprob for output in outputs[dtype] for entry in output.prompt_logprobs[1:]]
        losses[dtype] = -sum(tokens) / len(tokens)
    assert len(prompts) > 5 and 2.6 < losses["auto"] < 3.3  # nats per token; training.json says 3.20 of the whole tenth
    assert losses["fp8"] == pytest.approx(losses["auto"], rel=0.01) and losses["fp8"] != losses["auto"]
    assert llm.runner.block_bytes * 4 == load().runner.block_bytes  # float32 here; half of bfloat16
    assert all(k_scale > 0 and v_scale > 0 for _, _, k_scale, v_scale in llm.runner.kv_cache)


@needs_kernel
@pytest.mark.parametrize("case", ["decode", "mixed batch", "splits", "block size 64", "group of 3", "head_dim 80", "window shorter than the chunk",
                                  "head_dim 8", "block size 1", "splits under a window", "padding rows"])
@pytest.mark.skipif(CUDA and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8")
def test_attention_over_an_fp8_cache(case):
    """Both paths read the same numbers: the kernel against float64 over what the cache holds."""
    (query_lens, seq_lens), options = ATTENTION_CASES[case]
    options = dict(options)
    window = options.pop("window", 0)
    q, k_cache, v_cache, *rest = paged_problem(query_lens, seq_lens, dtype=torch.float16, **options)
    k8, v8 = [(cache / scale).to(torch.float8_e4m3fn) for cache, scale in ((k_cache, 0.25), (v_cache, 2.0))]
    expected = reference(q, k8.to(torch.float16) * 0.25, v8.to(torch.float16) * 2.0, *rest, q.shape[-1] ** -0.5, window)
    for attention in (paged_attention, paged_attention_reference):
        out = run_attention(attention, [q, k8, v8, *rest], window, k_scale=0.25, v_scale=2.0)
        assert relative_error(out, expected) < 3e-3


@pytest.mark.skipif(CUDA and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8")
def test_an_fp8_cache_is_filled_with_scaled_numbers_and_cut_off_at_448():
    k, v = torch.randn(2, 5, 2, 16, device=DEVICE) * 3
    k[0, 0, 0], v[1, 1, 1] = 1e6, -1e6
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 16, device=DEVICE).to(torch.float8_e4m3fn)
    store_kv(k, v, k_cache, v_cache, torch.tensor([0, 3, -1, 7, 11], device=DEVICE), 0.5, 4.0)
    for cache, new, scale in ((k_cache, k, 0.5), (v_cache, v, 4.0)):
        stored = cache.float().flatten(0, 1)
        expected = (new / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert torch.equal(stored[[0, 3, 7, 11]], expected[[0, 1, 3, 4]])
        assert not stored[[1, 2, 4, 5, 6]].any()


def test_a_window_lets_a_text_be_longer_than_the_pool():
    """The mistral golden's window is 8 tokens; with room for every token as reference."""
    prompt = [i * 7 % 200 for i in range(60)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = tokens_of(load("mistral").generate(prompt, params))
    for options in (dict(num_blocks=5, block_size=4), dict(num_blocks=12, block_size=1), dict(num_blocks=3, block_size=16)):
        llm = load("mistral", **options)
        assert llm.max_model_len > options["num_blocks"] * options["block_size"]
        assert tokens_of(llm.generate([prompt, prompt], params)) == expected * 2


BEAM_CASES = json.loads((GOLDEN / "beam" / "expected.json").read_text())["cases"]


@pytest.mark.parametrize("model", sorted({case["model"] for case in BEAM_CASES}))
@pytest.mark.parametrize("options", [{}, dict(num_blocks=14, block_size=4), dict(num_blocks=14, block_size=4, swap_space=0.01, max_num_seqs=2),
                                     dict(enable_prefix_caching=False, max_num_batched_tokens=5)], ids=str)
def test_beam_search_equals_transformers(model, options):
    cases = [case for case in BEAM_CASES if case["model"] == model][::2 if options else 1]
    if "num_blocks" in options:
        longest = max(len(case["prompt_token_ids"]) + case["max_tokens"] for case in cases)
        options = options | dict(num_blocks=cdiv(longest, 4) + 2)
    llm = load(model, **options)
    for case in cases:
        llm.eos_token_ids = frozenset(case["eos_token_ids"])
        params = BeamSearchParams(**{name: case[name] for name in ("beam_width", "max_tokens", "length_penalty", "early_stopping")})
        outputs = llm.beam_search([case["prompt_token_ids"]] * 2, params)
        for output in outputs:
            assert [beam.token_ids for beam in output.outputs] == [beam["token_ids"] for beam in case["expected"]]
            for beam, expected in zip(output.outputs, case["expected"]):
                assert beam.score == pytest.approx(expected["score"], abs=1e-4)
                assert beam.cumulative_logprob == pytest.approx(expected["cumulative_logprob"], abs=1e-4)
                assert beam.finish_reason == expected["finish_reason"]
    llm.scheduler.block_manager.check_idle()


def test_beams_share_what_they_have_in_common():
    llm = load(block_size=4, num_blocks=200)
    manager, most = llm.scheduler.block_manager, 0
    branch = llm._branch

    def watch(*args):
        nonlocal most
        beams = branch(*args)
        most = max(most, manager.num_blocks - manager.num_free_blocks)
        return beams

    llm._branch = watch
    llm.beam_search([list(range(100, 180))], BeamSearchParams(beam_width=4, max_tokens=24))
    assert most < 20 + 4 * 7  # the prompt's 20 blocks once; apart from it each beam has at most 24 tokens of its own


# --------------------------------------------------------------------------------------------------
# Settings of a request, through the whole engine
# --------------------------------------------------------------------------------------------------

PROMPT = list(range(60, 75))
MANY_SETTINGS = [
    dict(), dict(temperature=0), dict(repetition_penalty=1.5), dict(frequency_penalty=1.0, presence_penalty=0.5, temperature=0),
    dict(logit_bias={5: 4.0, 7: -50.0}), dict(allowed_token_ids=[1, 2, 3, 9]), dict(min_tokens=10, stop_token_ids=list(range(0, 900))),
    dict(bad_words=[" the", "and", "I am"]), dict(top_k=5), dict(top_p=0.8, repetition_penalty=1.2), dict(min_p=0.2),
    dict(logits_processors=[lambda ids, logits: logits.index_fill(0, torch.tensor(ids[-1:], dtype=torch.long, device=logits.device), -1e9)]),
    dict(logprobs=3), dict(temperature=0, logprobs=0), dict(stop=["e", "th"])]


@lru_cache
def each_alone():
    """Requests with all of these settings, and what each gives alone."""
    params = [SamplingParams(**dict(max_tokens=24, seed=i, ignore_eos=True) | settings) for i, settings in enumerate(MANY_SETTINGS)]
    llm = load()
    return params, [llm.generate(PROMPT, p)[0].outputs[0] for p in params]


@pytest.mark.parametrize("options", [dict(), dict(num_blocks=30, block_size=4), dict(num_blocks=30, block_size=4, swap_space=0.01),
                                     dict(max_num_batched_tokens=7, enable_prefix_caching=False)], ids=str)
def test_settings_mean_the_same_in_any_batch(options):
    """All of them together, with preemptions and lookahead, give what each gives alone."""
    params, alone = each_alone()
    for lookahead in (1,) if options else (0, 1):
        llm = load(**options)
        llm.engine.lookahead = lookahead
        together = [output.outputs[0] for output in llm.generate([PROMPT] * len(params), params)]
        for one, other in zip(together, alone):
            assert (one.token_ids, one.text, one.finish_reason, one.stop_reason) == (other.token_ids, other.text, other.finish_reason, other.stop_reason)
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


def test_settings_do_what_they_say():
    llm = load()

    def run(**settings):
        return llm.generate(PROMPT, SamplingParams(**dict(max_tokens=40, seed=1, ignore_eos=True) | settings))[0].outputs[0]

    assert set(run(allowed_token_ids=[3, 4]).token_ids) <= {3, 4}
    assert run(logit_bias={7: 100.0}, temperature=0).token_ids == [7] * 40
    assert len(set(run(presence_penalty=2.0, temperature=0).token_ids)) > len(set(run(temperature=0).token_ids))
    plain = run()
    assert len(run(stop_token_ids=list(range(1000)), min_tokens=9).token_ids) == 10
    assert run(stop_token_ids=list(range(1000))).token_ids == plain.token_ids[:1]
    word = plain.text[10:14]
    stopped = run(stop=[word])
    assert stopped.text == plain.text[:plain.text.index(word)] and (stopped.finish_reason, stopped.stop_reason) == ("stop", word)
    assert run(stop=word, include_stop_str_in_output=True).text == plain.text[:plain.text.index(word) + len(word)]
    words = {token: [llm.get_tokenizer().decode([token])] for token in plain.token_ids}
    token = next(token for token in words if [token] in encode_bad_words(words[token], llm.get_tokenizer()))
    assert token not in run(bad_words=words[token]).token_ids
    short = load(max_model_len=40).generate(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0]
    assert short.finish_reason == "length" and len(short.token_ids) == 40 - len(PROMPT)


def test_log_probabilities_equal_a_plain_log_softmax():
    """Of the prompt and of what is generated, in chunks too, against one forward pass over the whole text."""
    for options in (dict(), dict(max_num_batched_tokens=4), dict(num_blocks=8, block_size=8)):
        llm = load(**options)
        output = llm.generate([PROMPT, PROMPT], SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True))[1]
        text = PROMPT + output.outputs[0].token_ids
        logprobs = torch.log_softmax(prompt_logits(load(enable_prefix_caching=False), text).float(), -1)
        assert output.prompt_logprobs[0] is None
        for position, entry in list(enumerate(output.prompt_logprobs))[1:] + list(enumerate(output.outputs[0].logprobs, len(PROMPT))):
            row, token = logprobs[position - 1], text[position]
            best = row.topk(3 if position >= len(PROMPT) else 2).indices.tolist()
            assert list(entry) == [token] + [i for i in best if i != token]
            for i, logprob in entry.items():
                assert logprob.logprob == pytest.approx(row[i].item(), abs=1e-3)
                assert logprob.rank == (row >= row[i]).sum()
                assert logprob.decoded_token == llm.get_tokenizer().decode([i], skip_special_tokens=False)
        total = sum(entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids))
        assert output.outputs[0].cumulative_logprob == pytest.approx(total)


def test_broken_logits_end_that_request_and_not_the_batch():
    llm = load()
    broken = dict(logits_processors=[lambda ids, logits: logits * math.nan if len(ids) == 3 else logits])
    params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **settings) for settings in ({}, broken, {})]
    outputs = [output.outputs[0] for output in llm.generate([PROMPT] * 3, params)]
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].token_ids == outputs[0].token_ids[:3] and "not a number" in outputs[1].stop_reason
    assert outputs[0].token_ids == outputs[2].token_ids
    llm.runner.model.norm.weight.fill_(math.nan)  # bad weights: every request ends so, and the engine goes on
    assert [output.outputs[0].finish_reason for output in llm.generate([PROMPT] * 3, params[0])] == ["error"] * 3
    beam = llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=4))[0].outputs[0]
    assert beam.finish_reason == "error" and "not a number" in beam.stop_reason
    with pytest.raises(RuntimeError, match="not a number"):
        list(llm.stream(PROMPT))
    llm.scheduler.block_manager.check_idle()


def test_a_logits_processor_that_raises_ends_its_request_and_no_other():
    llm = load()
    def process(token_ids, logits):
        if len(token_ids) == 3:
            raise KeyError("oops")
        return logits
    params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logits_processors=hooks) for hooks in (None, [process])]
    well, failed = (output.outputs[0] for output in llm.generate([PROMPT] * 2, params))
    assert well.finish_reason == "length" and failed.finish_reason == "error"
    assert "KeyError('oops')" in failed.stop_reason and failed.token_ids == well.token_ids[:3]
    llm.scheduler.block_manager.check_idle()


def test_broken_weights_do_not_keep_an_fp8_engine_from_starting(monkeypatch):
    monkeypatch.setattr("nanopaged.api.llm.read_tensors", lambda path: ((name, tensor * math.nan) for name, tensor in read_tensors(path)))
    llm = load(kv_cache_dtype="fp8")
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].finish_reason == "error"


def test_a_machine_without_triton_attends_with_torch(monkeypatch):
    """On CUDA, too: Windows has no Triton."""
    monkeypatch.setattr(kernel, "triton", None)
    prompts, continuations, _ = expectations("qwen3")
    llm = load("qwen3")
    assert llm.runner.kernels is kernel.TORCH
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([prompt.tolist() for prompt in prompts], params)
    assert tokens_of(outputs) == [continuation.tolist()[:8] for continuation in continuations]


def test_bench_leaves_out_what_a_card_is_too_small_for_and_nothing_else(monkeypatch, capsys):
    def large(quick):
        bench.random_llm("8B")

    def broken(quick):
        raise ValueError("a mistake")

    def too_large(*args, **kwargs):
        raise ValueError("the weights take 15.3 GiB")

    monkeypatch.setattr(bench, "LLM", too_large)
    monkeypatch.setattr(bench, "ON_CUDA", [])
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    monkeypatch.setattr(bench, "ANYWHERE", [large, lambda quick: print("and on")])
    bench.main()
    assert capsys.readouterr().out.endswith("large is left out from here on: the weights take 15.3 GiB\nand on\n")
    monkeypatch.setattr(bench, "ANYWHERE", [broken])
    with pytest.raises(ValueError, match="a mistake"):
        bench.main()


@pytest.fixture
def tiny_bench(monkeypatch):
    """The engine of the benchmark's sections, on a CPU, with a step launched ahead as on a GPU."""
    shape = dict(hidden_size=8, head_dim=8, num_key_value_heads=1, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    monkeypatch.setitem(bench.SHAPES, "tiny", bench.QWEN3 | shape)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    llm = bench.random_llm("tiny", max_model_len=128, device="cpu")
    llm.engine.lookahead = 1
    return llm


def test_bench_times_decode_steps_and_leaves_an_idle_engine(tiny_bench):
    assert bench.decode_ms(tiny_bench, 2, 8, steps=3) > 0
    assert tiny_bench.engine.is_idle and not tiny_bench.requests


def test_bench_times_prompts_that_arrive_while_others_decode(tiny_bench):
    gaps, first_tokens = bench.under_load(tiny_bench, num_decodes=2, context=8, num_arrivals=1, prompt_len=16, steps=20)
    assert len(gaps) == 20 and len(first_tokens) == 1 and 0 < first_tokens[0] < sum(gaps)
    assert tiny_bench.engine.is_idle and not tiny_bench.requests


def test_bench_knows_the_rows_that_it_has_peers_for(tiny_bench, monkeypatch):
    """A row whose name has changed would lose its peer."""
    names = []
    monkeypatch.setattr(bench, "row", lambda name, *_, **__: names.append(name))
    monkeypatch.setattr(bench, "random_llm", lambda *_, **__: tiny_bench)
    monkeypatch.setattr(bench, "first_token_after", lambda *_: 1.0)
    for name in ("attention_seconds", "decode_ms", "prefill_rate", "rate"):
        monkeypatch.setattr(bench, name, lambda *_, **__: 1.0)
    monkeypatch.setattr(bench, "warm_up", lambda *_: None)
    monkeypatch.setattr(bench.Limits, "__init__", lambda limits: vars(limits).update(copy=1e9, product=1e12))
    monkeypatch.setattr(bench.Limits, "tokens_per_second", lambda *_: 1.0)
    for section in (bench.start, bench.attention, bench.decode, bench.throughput, bench.large):
        section(bench.Limits(), False)
    assert bench.PEERS.keys() <= set(names)


def test_weights_larger_than_the_memory_get_a_sentence(tmp_path):
    config = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(vocab_size=2**40)))
    with pytest.raises(ValueError, match=r"the weights take (262144|131072).\d GiB, and (cpu|cuda:0) has .*; use a smaller model"):
        LLM(str(tmp_path), load_format="dummy")
    assert load().generate(PROMPT, GREEDY)[0].finished


def test_a_step_out_of_memory_is_tried_again_with_less(capsys):
    llm = load(max_num_batched_tokens=64)
    expected = tokens_of(llm.generate([PROMPT] * 5, GREEDY))
    launch = llm.runner.launch

    def small_card(step):
        if sum(step.num_tokens) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(step)

    llm.runner.launch = small_card
    assert tokens_of(llm.generate([list(PROMPT) for _ in range(5)], GREEDY)) == expected
    assert "at most 16 tokens" in capsys.readouterr().err
    llm.scheduler.block_manager.check_idle()


def test_the_token_budget_grows_back_after_a_shortage_of_memory(capsys):
    llm = load(max_num_batched_tokens=64)
    launch = llm.runner.launch

    def small_card(step):
        if sum(step.num_tokens) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(step)

    llm.runner.launch = small_card
    long = SamplingParams(temperature=0, max_tokens=engine.STEPS_UNTIL_REGROWTH * 2 + 20, ignore_eos=True)
    llm.generate([PROMPT] * 5, GREEDY)
    assert llm.scheduler.max_num_batched_tokens == 16
    llm.runner.launch = launch
    llm.generate([PROMPT], long)
    assert llm.scheduler.max_num_batched_tokens == 64


@pytest.mark.parametrize("count, longest", [(0, 30), (3, 10), (-1, 1)])
def test_many_log_probabilities_of_a_prompt_are_computed_in_small_chunks(monkeypatch, count, longest):
    """Those of all tokens take as much memory as many steps."""
    monkeypatch.setattr(llm_module, "PROMPT_LOGPROBS_VALUES", 30)
    llm = load()
    launch, seen = llm.runner.launch, []
    llm.runner.launch = lambda step: seen.append(max(step.num_tokens)) or launch(step)
    outputs = llm.generate([list(range(40))], SamplingParams(max_tokens=2, prompt_logprobs=count, temperature=0))
    assert max(seen) == longest and len(outputs[0].prompt_logprobs) == 40


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs; on one, and on a CPU, any thread computes steps in other tests")
def test_engines_on_two_gpus_and_steps_from_another_thread():
    expected = tokens_of(load().generate([PROMPT] * 3, GREEDY))
    engines = [load(device=f"cuda:{i}", enforce_eager=eager) for i in (1, 0) for eager in (False, True)]
    for llm in engines:
        assert tokens_of(llm.generate([PROMPT] * 3, GREEDY)) == expected
    results = []
    threads = [threading.Thread(target=lambda llm=llm: results.append(tokens_of(llm.generate([PROMPT] * 3, GREEDY)))) for llm in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4 and torch.cuda.current_device() == 0


def test_a_step_that_fails_after_sampling_leaves_no_trace_in_the_settings():
    """The token that nobody saw would count for the penalties."""
    params = SamplingParams(temperature=0, max_tokens=12, presence_penalty=2.0, frequency_penalty=1.0, ignore_eos=True)
    expected = load().generate(PROMPT, params)[0].outputs[0].token_ids
    llm = load()
    launch, fails = llm.runner.launch, [3, 7]

    def fail(step):
        read = launch(step)
        if fails and len(step.seqs[0].token_ids) >= len(PROMPT) + fails[0]:
            fails.pop(0)
            raise torch.OutOfMemoryError("after everything was computed")
        return read

    llm.runner.launch = fail
    assert llm.generate(PROMPT, params)[0].outputs[0].token_ids == expected and not fails


@pytest.mark.parametrize("fails_at", [5, 7, 9])
def test_a_step_that_fails_leaves_the_settings_of_others_alone(fails_at):
    """A sequence that waits out the failed step has a token that the host has not seen; penalties count it all the same."""
    def run(fails_at, lookahead):
        llm = load("llama3", block_size=4, max_num_batched_tokens=8, scheduling_policy="priority", num_blocks=75)
        launch, numbers, llm.engine.lookahead = llm.runner.launch, count(1), lookahead

        def fail(step):
            if next(numbers) == fails_at:
                raise torch.OutOfMemoryError("for once")
            return launch(step)

        llm.runner.launch = fail
        rid = llm.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, frequency_penalty=2.0,
                                                        allowed_token_ids=list(range(20, 26))))
        for i in count():
            if i == 4:  # it takes whole steps for itself
                llm.add_request(list(range(60, 100)), SamplingParams(temperature=0, max_tokens=1), priority=-1)
            for output in llm.step():
                if output.request_id == rid and output.finished:
                    return output.outputs[0].token_ids

    assert run(fails_at, lookahead=1) == run(0, lookahead=0)


@pytest.mark.parametrize("when", [1, 2, 4])
def test_a_stream_that_is_collected_in_the_middle_of_a_step_waits_for_its_end(when):
    params, calls = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), count(1)
    expected = tokens_of(load().generate(PROMPT, params))
    llm = load()
    gc.disable()  # it comes when it is called
    ring = [llm.stream([9, 8, 7], SamplingParams(max_tokens=40))]
    next(ring[0])
    ring.append(ring)
    rid, register, output = llm.add_request(PROMPT, params), llm.scheduler.block_manager.cache_full_blocks, None
    llm.step()
    ring = None

    def collecting(seq):
        register(seq)
        if next(calls) == when:
            gc.collect()

    llm.scheduler.block_manager.cache_full_blocks = collecting
    while llm.has_unfinished_requests():
        for output in llm.step():
            pass
    gc.enable()
    assert output.request_id == rid and tokens_of([output]) == expected
    llm.scheduler.block_manager.check_idle()


@pytest.mark.parametrize("method", ["allocate", "cache_full_blocks", "begin_step"])
def test_an_interrupt_waits_until_the_books_are_written(method):
    """Ctrl-C while a step is planned: that step is still computed, and the requests of others go on as if nothing had been."""
    expected = tokens_of(load("llama2").generate([[5, 6, 7]], GREEDY))
    llm, calls = load("llama2"), count()
    rid, original, output = llm.add_request([5, 6, 7], GREEDY), getattr(llm.scheduler.block_manager, method), None

    def interrupted(*args):
        if next(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    setattr(llm.scheduler.block_manager, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[8] * 40, [9] * 20], GREEDY)
    assert list(llm.requests) == [rid]
    check_books(llm.scheduler)
    while llm.has_unfinished_requests():
        for output in llm.step():
            pass
    assert tokens_of([output]) == expected and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_comes_to_who_waits_for_another_thread():
    llm, held, done = load("llama2"), threading.Event(), threading.Event()

    def hold():
        with llm.lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    interrupt = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7]], GREEDY)
    done.set()
    thread.join()
    assert len(llm.generate([[5, 6, 7]], GREEDY)) == 1 and not llm.requests


def test_an_interrupt_while_a_step_is_computed_comes_at_once():
    llm = load("llama2", enforce_eager=True)
    forward, seen = llm.runner.model.forward, []

    def interrupted(*args, **kwargs):
        if len(seen) == 3:
            seen.append("before")
            signal.raise_signal(signal.SIGINT)
            seen.append("after")
        seen.append("step")
        return forward(*args, **kwargs)

    llm.runner.model.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7]], GREEDY)
    assert seen == ["step"] * 3 + ["before"]
    check_books(llm.scheduler)
    assert tokens_of(llm.generate([[5, 6, 7]], GREEDY)) == tokens_of(load("llama2").generate([[5, 6, 7]], GREEDY))


def test_an_end_token_that_no_model_has_is_no_end_token():
    """Some config.json have an eos_token_id of -1."""
    params = SamplingParams(temperature=0, max_tokens=5, min_tokens=3)
    llm = load()
    expected = tokens_of(llm.generate(PROMPT, params))
    llm.eos_token_ids = {-1, *llm.eos_token_ids}
    assert tokens_of(llm.generate(PROMPT, params)) == expected


def test_a_seed_may_come_from_numpy():
    numpy = pytest.importorskip("numpy", reason="seeds of numpy's types")
    outputs = [load().generate(PROMPT, SamplingParams(seed=seed, n=2, max_tokens=5))[0] for seed in (2**62, numpy.int64(2**62))]
    assert [[o.token_ids for o in output.outputs] for output in outputs][0] == [o.token_ids for o in outputs[1].outputs]


def test_a_token_that_was_not_drawn_has_no_probability():
    def process(token_ids, logits):
        return logits * math.nan if len(token_ids) == 2 else logits

    params = SamplingParams(temperature=0, max_tokens=5, logprobs=1, logits_processors=[process], ignore_eos=True)
    failed = load().generate(PROMPT, params)[0].outputs[0]
    assert failed.finish_reason == "error" and len(failed.token_ids) == len(failed.logprobs) == 2
    assert failed.cumulative_logprob == pytest.approx(sum(e[t].logprob for e, t in zip(failed.logprobs, failed.token_ids)))


def test_a_leak_is_noticed_whatever_ends_the_last_request():
    for end in (lambda llm: llm.abort_request(llm.add_request(PROMPT)), lambda llm: llm.stream(PROMPT).close(),
                lambda llm: llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=2))):
        llm = load()
        llm.engine.lookahead = 0  # else a step may be under way when a request ends, and the books are checked after it
        stream = llm.stream(PROMPT)
        llm.scheduler.block_manager.free_queue.popitem()
        with pytest.raises(RuntimeError, match="1 blocks"):
            end(llm)
            next(stream), stream.close()


def test_who_adds_or_aborts_does_not_wait_for_a_loop_of_steps():
    llm, steps, waited = load(), [], []
    launch = llm.runner.launch

    def slowly(step):
        steps.append(time.sleep(0.003))  # while a GPU computes, other threads can run
        return launch(step)

    def arrive():
        for _ in range(5):
            time.sleep(0.01)
            before = len(steps)
            request_id = llm.add_request(PROMPT, SamplingParams(max_tokens=50))
            waited.append(len(steps) - before)
            before = len(steps)
            llm.abort_request(request_id)
            waited.append(len(steps) - before)

    llm.runner.launch = slowly
    thread = threading.Thread(target=arrive)
    thread.start()
    llm.generate([PROMPT], SamplingParams(max_tokens=80, ignore_eos=True))
    thread.join()
    assert len(waited) == 10 and max(waited) <= 5  # a few, where the threads themselves are kept waiting; else one or two


def test_requests_come_from_many_threads():
    llm = load()
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
    texts, failures = {}, []

    def work(i):
        try:
            if i % 3 == 0:
                texts[i] = "".join(llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=12)))
            elif i % 3 == 1:
                texts[i] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
            else:
                llm.abort_request(llm.add_request(PROMPT, SamplingParams(max_tokens=500)))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    request_id, done = llm.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=30)), None
    for thread in threads:
        thread.start()
    while llm.has_unfinished_requests():  # what others' steps compute of it is reported here
        for output in llm.step():
            done = output if output.request_id == request_id else done
    for thread in threads:
        thread.join()
    assert not failures and done.finished and len(done.outputs[0].token_ids) == 30
    assert texts == {i: expected for i in range(12) if i % 3 < 2}


def test_requests_without_settings_follow_the_checkpoint(tmp_path):
    shutil.copytree(Path(__file__).parent / "nanopaged" / "shakespeare", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(dict(do_sample=False, max_new_tokens=7, eos_token_id=0)))
    llm = LLM(str(tmp_path / "model"), num_blocks=64)
    assert llm.get_default_sampling_params().max_tokens == 7 and llm.get_default_sampling_params().is_greedy
    assert llm.get_default_sampling_params(temperature=0.5).temperature == 0.5
    assert len(llm.generate(PROMPT)[0].outputs[0].token_ids) <= 7
    assert len(llm.generate(PROMPT, SamplingParams())[0].outputs[0].token_ids) > 7  # these are settings
    plain = LLM(str(tmp_path / "model"), num_blocks=64, generation_config="vllm")
    assert plain.get_default_sampling_params() == SamplingParams()
    assert len(plain.generate(PROMPT)[0].outputs[0].token_ids) > 7


# --------------------------------------------------------------------------------------------------
# LLM: requests in, outputs out
# --------------------------------------------------------------------------------------------------

def test_eos_stop_tokens_and_lengths():
    prompts, continuations, _ = expectations("qwen3")
    prompt, continuation = prompts[0].tolist(), continuations[0].tolist()
    llm = load("qwen3")
    at = next(i for i in range(3, 24) if continuation.index(continuation[i]) == i)  # a token that is new there
    llm.eos_token_ids = {continuation[at]}
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (continuation[:at + 1], "stop", None)
    ignoring = llm.generate(prompt, GREEDY)[0].outputs[0]
    assert (ignoring.token_ids, ignoring.finish_reason) == (continuation, "length")
    stopped = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True,
                                                  stop_token_ids=[continuation[at]]))[0].outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", continuation[at])
    short = load("qwen3", max_model_len=len(prompt) + 4)
    limited = short.generate(prompt, GREEDY)[0].outputs[0]
    assert (limited.token_ids, limited.finish_reason) == (continuation[:4], "length")


def test_every_eos_id_of_both_config_files_counts():
    assert load("llama3").eos_token_ids == {2, 5, 7}


def test_step_by_step_with_aborts():
    llm = load("llama2", num_blocks=16)
    keep = llm.add_request([5, 6, 7], GREEDY)
    drop = llm.add_request([5, 6, 8], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    waiting = llm.add_request(list(range(10, 60)), GREEDY)
    outputs = llm.step() or llm.step()  # with lookahead the first step's tokens come with the second
    assert {output.request_id for output in outputs} <= {keep, drop, waiting} and len(outputs) >= 2
    assert all(len(output.outputs[0].token_ids) == 1 and not output.finished for output in outputs)
    llm.abort_request(drop)
    llm.abort_request(waiting)
    llm.abort_request("no such request")
    check_books(llm.scheduler)
    last = None
    while llm.has_unfinished_requests():
        for last in llm.step():
            assert last.request_id == keep
        check_books(llm.scheduler)
    assert last.finished and last.outputs[0].token_ids == tokens_of(llm.generate([5, 6, 7], GREEDY))[0]
    assert llm.scheduler.block_manager.num_free_blocks == 16


def test_a_request_that_can_never_fit_is_refused_and_the_rest_go_on():
    llm = load("llama2", num_blocks=4)
    rid = llm.add_request([5, 6, 7], GREEDY)
    with pytest.raises(ValueError, match="the prompt has 64 tokens.*max_model_len 64"):
        llm.add_request([1] * 64, GREEDY)
    with pytest.raises(ValueError):
        llm.generate([[1, 2, 3], [1] * 64], GREEDY)
    assert list(llm.requests) == [rid]
    fills_the_pool = llm.generate([1] * 60, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))[0]
    assert len(fills_the_pool.outputs[0].token_ids) == 4
    while llm.has_unfinished_requests():
        llm.step()
    assert llm.scheduler.block_manager.num_free_blocks == 4


def test_an_error_inside_a_step_leaves_a_usable_engine():
    llm = load("llama2")
    launch, calls = llm.runner.launch, []

    def failing(step):
        calls.append(step)
        if len(calls) == 3:
            raise RuntimeError("the device fell off")
        return launch(step)

    llm.runner.launch = failing
    with pytest.raises(RuntimeError, match="fell off"):
        llm.generate([[5, 6, 7], [8] * 40], GREEDY)
    assert not llm.has_unfinished_requests()
    check_books(llm.scheduler)
    assert llm.scheduler.block_manager.num_free_blocks == 256
    llm.runner.launch = launch
    assert tokens_of(llm.generate([[5, 6, 7]], GREEDY)) == tokens_of(load("llama2").generate([[5, 6, 7]], GREEDY))


def test_an_interrupt_while_waiting_for_the_gpu_loses_nothing():
    llm = load("llama2")
    llm.engine.lookahead = 1
    rid = llm.add_request([5, 6, 7], GREEDY)
    launch, interrupts = llm.runner.launch, [3, 5]

    def interrupted(step):
        read = launch(step)

        def reader():
            if interrupts and len(llm.requests[rid].sequences[0].token_ids) == interrupts[0]:
                interrupts.pop(0)
                raise KeyboardInterrupt
            return read()

        return reader

    llm.runner.launch = interrupted
    output = None
    while llm.has_unfinished_requests():
        try:
            for output in llm.step():
                pass
        except KeyboardInterrupt:
            check_books(llm.scheduler)
    assert not interrupts and output.outputs[0].token_ids == tokens_of(load("llama2").generate([[5, 6, 7]], GREEDY))[0]


def test_streamed_pieces_join_to_the_text():
    llm = load()
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40)
    pieces = list(llm.stream("ROMEO:", params))
    assert len(pieces) > 10
    assert "".join(pieces) == llm.generate("ROMEO:", params)[0].outputs[0].text
    whole = "".join(pieces)
    streams = [llm.stream("ROMEO:", params) for _ in range(2)]  # in turns: either's steps finish the other, too
    pieces = [*itertools.zip_longest(*streams, fillvalue="")]
    assert ["".join(column) for column in zip(*pieces)] == [whole] * 2
    stream = llm.stream("ROMEO:", params)
    next(stream)
    stream.close()  # a reader who leaves
    assert llm.scheduler.block_manager.num_free_blocks == llm.scheduler.block_manager.num_blocks


def test_prompts_come_as_text_ids_or_dicts():
    llm = load()
    ids = llm.get_tokenizer().encode("ROMEO:")
    outputs = llm.generate(["ROMEO:", ids, {"prompt": "ROMEO:"}, {"prompt_token_ids": ids}], GREEDY)
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 1
    assert [output.prompt for output in outputs] == ["ROMEO:", None, "ROMEO:", None]
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize("prompt, message", [
    ("", "the prompt is empty"), ([], "the prompt is empty"), ([1, -1], "token id -1"), ([10**6], "token id 1000000"),
    (5, "prompts are a string"), ([1.5], "a prompt is a string or a list of token ids"), ([[True]], "a list of token ids"),
    ({"text": "a"}, "'prompt' or 'prompt_token_ids'"), ({"prompt_token_ids": "abc"}, "a list of token ids, not 'abc'"),
    ({"prompt": 5}, "a string, not 5"), ({"prompt": "a", "multi_modal_data": 1}, "leave 'multi_modal_data' out"), ([None], "not None"), ("a" * 5000, "max_model_len"),
])
def test_bad_prompts_get_a_sentence(prompt, message):
    llm = load()
    with pytest.raises(ValueError, match=message):
        llm.generate([prompt] if prompt == [] else prompt, GREEDY)
    assert not llm.has_unfinished_requests()
    assert llm.scheduler.block_manager.num_free_blocks == llm.scheduler.block_manager.num_blocks


@pytest.mark.parametrize("call, message", [
    (lambda llm: llm.generate("a", "x"), "sampling_params must be SamplingParams, not 'x'"),
    (lambda llm: llm.generate("a", [{}]), "sampling_params must be SamplingParams, not {}"),
    (lambda llm: llm.add_request("a", [GREEDY]), "must be SamplingParams"),
    (lambda llm: llm.add_request("a", priority=5), "0, unless scheduling_policy is 'priority', not 5"),
    (lambda llm: llm.generate("a", priority=3), "a list with one for each"),
    (lambda llm: llm.generate(["a", "b"], priority=[0, "x"]), "priority must be"),
    (lambda llm: llm.beam_search("a", None), "params must be BeamSearchParams, not None"),
    (lambda llm: llm.beam_search("a", GREEDY), "params must be BeamSearchParams"),
    (lambda llm: llm.chat({"role": "user", "content": "a"}), "a conversation is a list of messages"),
    (lambda llm: llm.chat([{"role": "user", "content": "a"}], chat_template=["x"]), r"chat_template must be a Jinja template, not \['x'\]"),
    (lambda llm: llm.chat([{"role": "user", "content": "a"}], chat_template="x", chat_template_kwargs="y"), "kwargs must be a dict .*, not 'y'"),
    (lambda llm: llm.abort_request([llm.add_request("a", GREEDY)]), "request_id must be what add_request returned"),
    (lambda llm: llm.generate("a", "x" * 1000), "^.{1,200}$"),  # a sentence, whatever was given
    (lambda llm: list(llm.stream("a", SamplingParams(n=2))), "stream yields one text, and n is 2"),
])
def test_calls_with_the_wrong_things_get_a_sentence(call, message):
    llm = load()
    with pytest.raises(ValueError, match=message):
        call(llm)
    for request_id in list(llm.requests):
        llm.abort_request(request_id)
    assert not llm.has_unfinished_requests() and len(llm.generate(PROMPT, GREEDY)) == 1
    llm.scheduler.block_manager.check_idle()


def test_a_priority_is_an_integer():
    llm = load(scheduling_policy="priority")
    for priority in ("high", None, math.nan, 1.5):
        with pytest.raises(ValueError, match="priority must be an integer"):
            llm.add_request(PROMPT, GREEDY, priority=priority)
    assert len(llm.generate([PROMPT] * 2, GREEDY, priority=[2, -1])) == 2


@pytest.mark.parametrize("options, message", [
    (dict(block_size=0), "block_size must be an integer of at least 1, not 0"), (dict(num_blocks=-1), "num_blocks"),
    (dict(max_num_seqs=0), "max_num_seqs"), (dict(max_num_seqs=None), "max_num_seqs must be an integer"),
    (dict(max_num_batched_tokens=None), "max_num_batched_tokens must be an integer"), (dict(dtype="int8"), "dtype must be"), (dict(device="tpu"), "device must be"),
    (dict(attention="flash"), "attention must be"), (dict(load_format="x"), "load_format must be"),
    (dict(scheduling_policy="x"), "scheduling_policy must be"), (dict(max_model_len=10**6), "more than the"),
    (dict(max_model_len=500, num_blocks=3), "needs 32 blocks of 16 tokens, and the pool has 3"),
    (dict(model="./no/such"), "neither a directory nor bundled"), (dict(model=5), "model must be a directory or a name"),
    (dict(tokenizer=5), "tokenizer must be a directory or a name"), (dict(enforce_eager="x"), "enforce_eager must be True or"),
    (dict(enable_prefix_caching="no"), "must be True or False"), (dict(max_num_seqs=10**12), "lower max_num_seqs"),
    (dict(block_size=10**14), "or block_size"), (dict(num_blocks=9, num_gpu_blocks_override=8), "give one of them"),
])
def test_bad_engine_options_get_a_sentence(options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LLM(**dict(block_size=16) | options)


def test_dummy_weights_need_a_config_alone(tmp_path):
    (tmp_path / "config.json").write_text((GOLDEN / "qwen3" / "config.json").read_text())
    llm = LLM(str(tmp_path), load_format="dummy", num_blocks=64)
    assert len(llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids) == 24
    with pytest.raises(ValueError, match="token ids"):
        llm.generate("text", GREEDY)
    with pytest.raises(FileNotFoundError):
        LLM(str(tmp_path), num_blocks=64)


# --------------------------------------------------------------------------------------------------
# The model
# --------------------------------------------------------------------------------------------------

def recorded_batches(llm, choose):
    """The batches that the engine gives to the model from now on. In its place choose(batch) says what is sampled."""
    batches = []

    def forward(batch, kv_cache, kernels):
        batches.append(batch)
        logits = torch.zeros(len(batch.logits_indices), llm.config.vocab_size)
        logits[range(len(logits)), choose(batch)] = 1.0
        return logits

    llm.runner.model = forward
    return batches


def as_rows(text, start):
    """The lines of a table in a docstring, from the one that begins with `start` to the next empty one, split by columns."""
    lines = text[text.index(start):].split("\n\n")[0].splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines]


def test_the_worked_decode_of_the_models_text():
    heading, *rows = as_rows(model.__doc__, "step      tokens in")
    assert heading == ["step", "tokens in", "positions", "cached before", "slots written", "sampled"]
    words = [*dict.fromkeys(" ".join(row[1] + " " + row[-1] for row in rows).split())]
    llm = load("llama2", device="cpu", enable_prefix_caching=False)
    follow = {row[1].split()[-1]: row[-1] for row in rows}
    batches = recorded_batches(llm, lambda batch: words.index(follow[words[batch.input_ids[-1]]]))
    prompt = [words.index(word) for word in rows[0][1].split()]
    [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=len(rows), ignore_eos=True))
    assert [words[token] for token in output.outputs[0].token_ids] == [row[-1] for row in rows]
    for i, (batch, row) in enumerate(zip(batches, rows, strict=True)):
        assert row[:5] == [
            "decode" if i else "prefill", " ".join(words[token] for token in batch.input_ids),
            " ".join(map(str, batch.positions.tolist())), str(batch.seq_lens.item() - len(batch.input_ids)),
            " ".join(map(str, batch.slot_mapping.tolist()))]


def test_the_flat_batch_of_the_models_text():
    rows = {name: cells for name, *cells in as_rows(model.Batch.__doc__, "sequence           A")}
    llm = load("llama2", device="cpu", block_size=4, enable_prefix_caching=False)
    batches = recorded_batches(llm, lambda batch: batch.logits_indices)
    first, second, third = [10, 11, 12, 13, 14, 15], [20, 21, 22, 23], [30, 31, 32, 33]
    llm.add_request(first, GREEDY)
    llm.add_request(second, GREEDY)
    llm.step()
    llm.add_request(third, GREEDY)
    llm.step()
    batch = batches[1]
    assert rows["sequence"] == ["A", "C", "B"] and rows["input_ids"] == ["a6", "c4", "b0", "b1", "b2", "b3"]
    assert batch.input_ids[2:].tolist() == third
    for name in ("positions", "query_start_loc", "seq_lens"):
        assert getattr(batch, name).tolist() == list(map(int, rows[name]))
    assert batch.sampled.tolist() == [0, 1, 2] and batch.logits_indices.tolist() == [0, 1, 5]


# --------------------------------------------------------------------------------------------------
# Configurations and weights that are wrong
# --------------------------------------------------------------------------------------------------

LLAMA = dict(architectures=["LlamaForCausalLM"], vocab_size=100, hidden_size=32, num_hidden_layers=1,
             num_attention_heads=4, intermediate_size=64, max_position_embeddings=128)


@pytest.mark.parametrize("change, message", [
    (dict(architectures=["MambaForCausalLM"]), "unknown architecture 'MambaForCausalLM'; known are GPT2LMHeadModel, "),
    (dict(quantization_config={"quant_method": "gptq"}), "quantised .gptq."),
    (dict(rope_scaling={"rope_type": "yarn", "factor": 4}), "rope type 'yarn' is not supported"),
    (dict(rope_scaling={"rope_type": "linear"}), "needs factor"),
    (dict(num_attention_heads=4, num_key_value_heads=3), "4 query heads cannot share 3 kv heads"),
    (dict(hidden_act="mish"), "unknown activation 'mish'"),
    (dict(torch_dtype="float8_e4m3fn"), "weights of type float8_e4m3fn are not supported"),
    (dict(quantization_config="awq"), "quantised .awq."),
    (dict(num_hidden_layers="2"), "num_layers must be an integer of at least 1, not '2'"),
    (dict(num_hidden_layers=0), "not 0"), (dict(vocab_size=-1), "not -1"), (dict(intermediate_size=None), "not None"),
    (dict(num_attention_heads=0), "a value that no LlamaForCausalLM can have"), (dict(hidden_size=None), "no LlamaForCausalLM can have"),
    (dict(rope_scaling="linear"), "no LlamaForCausalLM can have"), (dict(rope_scaling={"rope_type": ["x"]}), "no LlamaForCausalLM can have"),
    (dict(rope_theta=None), "rope_theta must be a number above 0, not None"), (dict(rope_theta=0), "rope_theta .* not 0"),
    (dict(rope_scaling={"rope_type": "linear", "factor": "x"}), "factor must be a number above 0, not 'x'"),
    (dict(rms_norm_eps=-1), "epsilon must be a number above 0, not -1"), (dict(rms_norm_eps=math.inf), "not inf"),
    (dict(architectures=True), "unknown architecture True"), (dict(architectures=[[]]), r"unknown architecture \[\]"),
    (dict(hidden_act=[]), r"unknown activation \[\]"),
    (dict(architectures=["MistralForCausalLM"], sliding_window=-1), r"windows of \[-1\]"),
    (dict(architectures=["Qwen2ForCausalLM"], layer_types=["full_attention"] * 2), r"each of the 1 layers, not windows of \[0, 0\]"),
])
def test_unsupported_configurations_get_a_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        read_model_config(LLAMA | change)


def test_a_key_that_is_null_is_no_quantization():
    assert read_model_config(LLAMA | dict(quantization_config=None)) == read_model_config(LLAMA)


def test_a_missing_key_of_the_configuration_is_named():
    with pytest.raises(ValueError, match="must have 'intermediate_size'"):
        read_model_config({key: value for key, value in LLAMA.items() if key != "intermediate_size"})


def test_both_spellings_of_rope_settings_mean_the_same():
    llama3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    old = LLAMA | dict(rope_theta=5e5, rope_scaling=dict(rope_type="llama3", **llama3))
    new = LLAMA | dict(rope_parameters=dict(rope_type="llama3", rope_theta=5e5, **llama3))
    oldest, newest = LLAMA | dict(rope_scaling=dict(type="linear", factor=2.0)), LLAMA | dict(
        rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))
    frequencies = [rope_frequencies(read_model_config(config)) for config in (old, new, oldest, newest)]
    assert torch.equal(frequencies[0], frequencies[1]) and torch.equal(frequencies[2], frequencies[3])
    assert not torch.allclose(frequencies[0], rope_frequencies(read_model_config(LLAMA | dict(rope_theta=5e5))))


def rewritten(tmp_path, variant, change):
    """A copy of a golden checkpoint as a .bin file, its tensors changed."""
    (tmp_path / "config.json").write_text((GOLDEN / variant / "config.json").read_text())
    torch.save(change({name: tensor.clone() for name, tensor in read_tensors(GOLDEN / variant)}),
               tmp_path / "pytorch_model.bin")
    return str(tmp_path)


def test_missing_and_misshaped_tensors_are_named(tmp_path):
    name = "model.layers.1.self_attn.k_proj.weight"
    path = rewritten(tmp_path, "llama3", lambda tensors: {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(ValueError, match=r"lacks 1 tensor.*layers\.1\.self_attn\.k_proj\.weight"):
        LLM(path, num_blocks=64)
    path = rewritten(tmp_path, "llama3", lambda tensors: tensors | {name: tensors[name][:3]})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight has shape \[3, 32\]; .* implies \[32, 32\]"):
        LLM(path, num_blocks=64)


@pytest.mark.parametrize("variant, embedding", [("smollm2", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")])
def test_a_tied_matrix_may_be_stored_under_either_name_or_both(tmp_path, variant, embedding):
    """safetensors.torch.save_model keeps one name of two, the first in the alphabet: lm_head.weight."""
    prompts, continuations, _ = expectations(variant)

    def assert_loads(change):
        llm = LLM(rewritten(tmp_path, variant, change), dtype="float32", num_blocks=64)
        assert tokens_of(llm.generate(prompts[1].tolist(), GREEDY)) == [continuations[1].tolist()]

    assert_loads(lambda tensors: {"lm_head.weight" if name == embedding else name: tensor for name, tensor in tensors.items()})
    other = {"lm_head.weight": torch.ones_like(dict(read_tensors(GOLDEN / variant))[embedding])}
    assert_loads(lambda tensors: other | tensors)  # of two the embedding counts, in either order
    assert_loads(lambda tensors: tensors | other)
    neither = rewritten(tmp_path, variant, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != embedding})
    with pytest.raises(ValueError, match=r"lacks 1 tensor.* '(embed_tokens|wte)\.weight'"):
        LLM(neither, num_blocks=64)


@pytest.mark.parametrize("variant, prefix", [("opt", "model."), ("llama2", "model."), ("gpt2", "transformer.")])
def test_old_checkpoints_without_the_key_prefix(tmp_path, variant, prefix):
    path = rewritten(tmp_path, variant, lambda tensors: {k.removeprefix(prefix): v for k, v in tensors.items()})
    prompts, continuations, _ = expectations(variant)
    llm = LLM(path, dtype="float32", num_blocks=64)
    assert tokens_of(llm.generate(prompts[1].tolist(), GREEDY)) == [continuations[1].tolist()]


@pytest.mark.parametrize("intermediate_size", [512, 8960])  # a row's sum goes over at most 1,024 numbers at a time
def test_fused_functions_compute_what_the_plain_ones_do(tmp_path, monkeypatch, intermediate_size):
    """With torch.compile on a GPU, where CUDA graphs record fused modules; on a CPU the same functions, not compiled."""
    config = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(
        hidden_size=64, num_attention_heads=8, intermediate_size=intermediate_size, max_position_embeddings=512)))
    prompts, params = [[1, 2, 3], [4, 5], [7] * 300], SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    cut = []  # numbers of rows
    monkeypatch.setattr("nanopaged.device.fused.partial_products",
                        lambda x, *others: cut.append(len(x)) or partial_products(x, *others))
    if not CUDA:
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)

    def run(fused):
        llm = LLM(str(tmp_path), load_format="dummy", dtype="float32", num_blocks=64, max_num_seqs=4, enforce_eager=not fused)
        if fused and not CUDA:
            fuse(llm.runner.model)
        outputs = llm.generate(prompts, params) + [llm.generate(prompts[0], params)[0]]  # together, and a single row
        return [[next(iter(logprobs.items())) for logprobs in output.outputs[0].logprobs] for output in outputs]

    plain = run(False)
    assert not cut
    for ours, theirs in zip(run(True), plain):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [x.logprob for _, x in ours] == pytest.approx([x.logprob for _, x in theirs], abs=1e-3)
    assert (64 if CUDA else 3) in cut and max(cut) <= 256 and 1 not in cut  # three tokens are a step of 64 there


def test_partial_products_add_up_to_the_product():
    x, weight = torch.randn(7, 256), torch.randn(24, 256)
    for num_parts in (1, 2, 4):
        product = partial_products(x, weight, num_parts)
        assert product.shape == (num_parts, 7, 24)
        torch.testing.assert_close(product.sum(0), x @ weight.T, atol=1e-4, rtol=1e-4)


def test_which_products_are_split():
    def num_parts(rows, size_in, size_out, dtype=torch.bfloat16):
        x, weight = (torch.empty(n, size_in, dtype=dtype, device="meta") for n in (rows, size_out))
        return num_partial_products(x, weight)

    assert num_parts(8, 2048, 1024) == num_parts(256, 3072, 1024) == 4
    assert num_parts(1, 20480, 4096) == num_parts(64, 4096, 4096) == 2
    assert num_parts(257, 2048, 1024) == 1  # there are tiles enough
    assert num_parts(1, 2048, 1024) == num_parts(1, 12288, 4096) == 1  # has a function of its own
    assert num_parts(8, 2000, 1024) == 1  # four parts would not begin at multiples of 64
    assert num_parts(8, 2048, 1024, torch.float16) == 1  # a part may be larger than the whole, and than float16's numbers


@needs_gpu
def test_partial_products_are_as_exact_as_the_product():
    """In bfloat16 each of them is rounded, where otherwise the product is: the error is of the same size."""
    x, weight = torch.randn(64, 3072, device="cuda"), torch.randn(1024, 3072, device="cuda")
    x, weight = x.bfloat16(), weight.bfloat16()
    exact = x.double() @ weight.double().T
    whole = (x @ weight.T).double() - exact
    parts = partial_products(x, weight, 4).double().sum(0) - exact
    assert parts.norm() < 1.3 * whole.norm()


def test_the_type_of_the_weights_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
        assert pick_dtype("auto", torch.bfloat16, cuda) is (torch.bfloat16 if supported else torch.float16)
        assert pick_dtype("auto", torch.float32, cuda) is torch.float32
        assert pick_dtype("auto", torch.bfloat16, cpu) is torch.float32
        assert pick_dtype("half", torch.bfloat16, cpu) is pick_dtype(torch.float16, torch.float32, cuda) is torch.float16
    assert LLM(str(GOLDEN / "qwen3"), device="cpu", num_blocks=8).runner.dtype is torch.float32  # of a bfloat16 checkpoint


@needs_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_on_the_gpu(dtype):
    """Not equal to float32, but near: the bundled model's logits within a few units of the type's precision."""
    prompts, _, logits = expectations("shakespeare")
    llm = load(dtype=dtype, enable_prefix_caching=False)
    assert relative_error(prompt_logits(llm, prompts[0].tolist()).cpu(), logits[0]) < 0.03


@needs_gpu
def test_the_pool_takes_the_cards_memory():
    free, total = torch.cuda.mem_get_info()
    llm = LLM("shakespeare", gpu_memory_utilization=0.5)
    blocks, size = llm.scheduler.block_manager.num_blocks, llm.runner.block_bytes
    assert 0.3 * total < blocks * size < 0.5 * total
    with pytest.raises(ValueError, match="no memory is left for the KV pool"):
        LLM("shakespeare", gpu_memory_utilization=0.001)
