"""Tests of the three chapters: kernel.py, engine.py, model.py. What lies around them is tested in nanopaged/tests/.

On a machine without a GPU the kernel runs in Triton's interpreter, in float32 and float16; with one, the same tests
run on it, in bfloat16 too. Reference outputs in nanopaged/golden/ were computed by Hugging Face transformers
(nanopaged/golden/make_models.py).
"""
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter, deque
from functools import lru_cache
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
import torch

import engine
import kernel
import model
from engine import Sampled, Status
from kernel import cdiv, paged_attention, paged_attention_reference, store_kv
from nanopaged import BeamSearchParams, SamplingParams, optional_triton, tiles
from nanopaged.device.step_input import StepInput
from nanopaged.features import last_layer, rectangles, samples
from nanopaged.features.edits import encode_bad_words
from nanopaged.tests.fake_model import ARRIVALS, fake, sequence
from nanopaged.tests.helpers import (
    BUNDLED,
    CUDA,
    DEVICE,
    GOLDEN,
    GREEDY,
    PROMPT,
    ROOT,
    check_books,
    expectations,
    load,
    needs_gpu,
    needs_kernel,
    prompt_logits,
    relative_error,
    shared,
    tokens_of,
)
from nanopaged.tests.test_families import assert_golden

VARIANTS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


# --------------------------------------------------------------------------------------------------
# The kernel
# --------------------------------------------------------------------------------------------------

def paged_problem(query_lens, seq_lens, *, heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32,
                  heads_first=False, seed=0):
    """Random paged K and V in shuffled blocks. Every slot that no sequence owns is NaN, and every table entry behind a
    sequence's last block names a block of NaN: a kernel that reads one of them shows it in its output. The pool's
    memory order is the caller's choice: other layers lie between the blocks, and heads may come before slots."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [cdiv(n, block_size) for n in seq_lens]
    inner = (kv_heads, block_size) if heads_first else (block_size, kv_heads)
    pool = torch.full((sum(num_blocks) + 2, 2, *inner, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    pool = (pool.transpose(2, 3) if heads_first else pool).transpose(0, 1)
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
    """Attention in float64, as a loop over tokens: only the definition is common to this and the implementations."""
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
    "splits": (([1, 1], [600, 257]), dict(heads=2, kv_heads=1)),
    "splits under a window": (([1, 1], [600, 100]), dict(heads=2, kv_heads=1, window=300)),
    "long prefill": (([70], [90]), dict(heads=2, kv_heads=1)),
    "window shorter than the chunk": (MIXED, dict(window=4)),
    "window of one": (MIXED, dict(window=1)),
    "block size 1": (MIXED, dict(block_size=1)),
    "block size 48": (([1, 50], [70, 60]), dict(block_size=48)),
    "block size 64": (([1, 70], [70, 75]), dict(block_size=64)),
    "block size 256": (([1, 5], [300, 260]), dict(block_size=256)),
    "group of 1": (MIXED, dict(heads=2)),
    **{f"group of {n}": (MIXED, dict(heads=n, kv_heads=1)) for n in (3, 7, 8, 20, 80)},
    **{f"head_dim {n}": (MIXED, dict(head_dim=n)) for n in (8, 64, 80, 96, 128, 256)},
    "heads before slots": (MIXED, dict(heads_first=True)),
    "padding rows": (([1, 0, 4, 0], [7, 0, 6, 0]), {}),
}
FP8 = torch.float8_e4m3fn
HAS_FP8 = not CUDA or torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="needs a GPU with fp8")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * CUDA  # the interpreter computes bfloat16 wrongly
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, FP8: 3e-3}
# The type that engines run in has all shapes. The other types take the same path whatever the shape is, with smaller
# tiles where a number has more bytes: three shapes are enough. Over an fp8 cache, tiles are read in other ways.
CASES_OF_OTHER_TYPES = ("mixed batch", "splits", "head_dim 256")
FP8_CASES = ("decode", "mixed batch", "splits", "block size 64", "group of 3", "head_dim 80",
             "window shorter than the chunk", "head_dim 8", "block size 1", "splits under a window", "padding rows")


@pytest.mark.parametrize("case, dtype", [
    *((case, dtype) for case in ATTENTION_CASES for dtype in DTYPES
      if dtype is (torch.bfloat16 if CUDA else torch.float32) or case in CASES_OF_OTHER_TYPES),
    *((case, FP8) for case in FP8_CASES if HAS_FP8)])
@pytest.mark.parametrize("attention", [pytest.param(paged_attention, marks=needs_kernel), paged_attention_reference,
                                       rectangles.paged_attention])
def test_attention_equals_float64(attention, case, dtype):
    """An fp8 cache is compared with float64 over what the cache holds."""
    (query_lens, seq_lens), options = ATTENTION_CASES[case]
    options = dict(options)
    window = options.pop("window", 0)
    k_scale, v_scale = (0.25, 2.0) if dtype is FP8 else (1.0, 1.0)
    q, k, v, *rest = paged_problem(query_lens, seq_lens, dtype=torch.float16 if dtype is FP8 else dtype, **options)
    if dtype is FP8:
        k, v = (k / k_scale).to(FP8), (v / v_scale).to(FP8)
    out = run_attention(attention, [q, k, v, *rest], window, k_scale=k_scale, v_scale=v_scale)
    expected = reference(q, k.double() * k_scale, v.double() * v_scale, *rest, q.shape[-1] ** -0.5, window)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("attention", [paged_attention_reference, rectangles.paged_attention])
def test_attention_in_torch_at_any_length(attention, device):
    """torch has kernels of its own for some lengths; one of them errs at 65, 129 .. queries of heads that share K."""
    query_lens = [65, 129, 641, *range(1, 701, 37)]
    problem = paged_problem(query_lens, [length + length % 9 for length in query_lens], heads=6, kv_heads=2)
    expected = reference(*(x.cpu() for x in problem), 32 ** -0.5, 0).split(query_lens)
    out = run_attention(attention, [x.to(device) for x in problem]).cpu().split(query_lens)
    assert [relative_error(*pair) < 1e-5 for pair in zip(out, expected)] == [True] * len(query_lens)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_attention_does_not_depend_on_the_batch(dtype):
    """A sequence's result is the same bits alone and among others, and whatever bounds size the grid."""
    query_lens, seq_lens = [1, 6, 1, 1], [60, 40, 17, 280]
    problem = paged_problem(query_lens, seq_lens, heads=2, kv_heads=1, dtype=dtype)
    together = run_attention(paged_attention, problem)
    q, k_cache, v_cache, tables, lens, starts = problem
    for i in range(len(seq_lens)):
        rows = slice(starts[i], starts[i + 1])
        alone = paged_attention(q[rows], k_cache, v_cache, tables[i:i + 1], lens[i:i + 1],
                                (starts[i:i + 2] - starts[i]).int(), q.shape[-1] ** -0.5,
                                max_query_len=query_lens[i], max_seq_len=500)
        assert torch.equal(together[rows], alone)


@needs_kernel
@needs_fp8
@pytest.mark.parametrize("window, fp8", [(0, False), (300, False), (0, True)], ids=["", "window", "fp8"])
def test_programs_that_share_a_context_give_the_same_bits(window, fp8, monkeypatch):
    """A context's splits are shared by more programs in a small batch. Splits before the window are neither computed
    nor merged: nothing that is in their place, not even NaN, changes the result."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape, **kwargs: (
        new_empty(x, *shape, **kwargs).fill_(math.nan) if x.is_floating_point() else new_empty(x, *shape, **kwargs)))
    problem = paged_problem([1, 1], [530, 60], heads=2, kv_heads=1)
    if fp8:
        problem[1:3] = [cache.nan_to_num().to(FP8) for cache in problem[1:3]]
    results = []
    for programs in (1, 2, 4, 5):
        monkeypatch.setattr(kernel, "programs_per_context", lambda *_: programs)
        results.append(run_attention(paged_attention, problem, window))
    assert all(torch.equal(result, results[0]) for result in results) and results[0].isfinite().all()


def test_stages_do_not_change_the_tile():
    """The order of the kernel's additions depends on the tile, so the number of stages must not change the tile."""
    for *shape, cache, memory in itertools.product((1, 7, 40), (64, 128, 256), (2, 4), (1, 2), (64, 99, 227)):
        three, four = (tiles.tile_config("decode", *shape, memory * 1024, min(cache, shape[-1]), stages)
                       for stages in (3, 4))
        assert (three["TILE_M"], three["TILE_N"]) == (four["TILE_M"], four["TILE_N"])


@pytest.mark.parametrize("capability, cuda, interpreted, expected", [
    ((9, 0), "13.0", False, True), ((8, 9), "13.0", False, False), ((9, 4), None, False, False),
    ((9, 0), "13.0", True, False)])
def test_kernels_are_launched_early_where_that_exists(capability, cuda, interpreted, expected, monkeypatch):
    """GPUs from Hopper on have early launches; AMD's, whose device type is "cuda" too, and the interpreter do not."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(optional_triton, "INTERPRETED", interpreted)
    options = kernel.launch_options.__wrapped__(torch.device("cuda"))
    assert options["PDL"] == options.get("launch_pdl", False) == (expected and kernel.gdc_wait is not None)


def test_an_fp8_cache_of_odd_heads_is_refused():
    q, *caches, tables, lens, starts = paged_problem([1], [5], head_dim=7)
    with pytest.raises(ValueError, match="head_dim 7"):
        paged_attention(q, *(cache.nan_to_num().to(FP8) for cache in caches), tables, lens, starts, 1.0,
                        max_query_len=1, max_seq_len=5)


@needs_kernel
def test_padding_is_not_written():
    problem = paged_problem([1, 0, 4, 0], [7, 0, 6, 0])
    problem[0] = torch.cat([problem[0], torch.full_like(problem[0][:3], float("nan"))])  # rows of no sequence
    tiles = torch.tensor([[2, 0], [-1, 0], [-1, 3]], dtype=torch.int32, device=DEVICE)
    tokens_per_tile = kernel.tokens_per_tile(2, 32, 16, torch.float32, torch.float32, problem[0].device)
    assert tokens_per_tile > 4, "the work list above is for one tile of sequence 2"
    out = run_attention(paged_attention, problem, query_tiles=tiles)
    assert torch.equal(out[5:], torch.full_like(out[5:], 7.0))
    assert relative_error(out[:5], reference(*problem, 32 ** -0.5, 0)[:5]) < 1e-5


def test_a_decode_step_in_torch_is_one_call(monkeypatch):
    """The default path in torch makes one call, however many sequences there are and however long they are."""
    attend = Mock(wraps=torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    run_attention(rectangles.paged_attention, paged_problem([1] * 9, [5, 16, 33, 1, 70, 12, 8, 9, 40]))
    attend.assert_called_once()


@pytest.mark.parametrize("dtype, limit, k_scale, v_scale", [
    (torch.float32, math.inf, 1.0, 1.0), pytest.param(FP8, 448, 0.5, 4.0, marks=needs_fp8)], ids=str)
def test_store_kv_writes_the_slots_and_nothing_else(dtype, limit, k_scale, v_scale):
    """An fp8 cache is filled with scaled numbers, cut off at 448."""
    k, v = torch.randn(2, 5, 3, 24, device=DEVICE)
    k[0, 0, 0], v[3, 1, 1] = 1e6, -1e6
    k_cache, v_cache = torch.full((2, 4, 8, 3, 24), 9.0, device=DEVICE).to(dtype)
    slots = torch.tensor([17, -1, 0, 31, -1], device=DEVICE)
    stored = (k, v) if dtype is not FP8 else (kernel.to_fp8(k, k_scale, FP8), kernel.to_fp8(v, v_scale, FP8))
    for written in (slots, torch.full_like(slots, -1), slots[:0]):
        store_kv(*(new[:len(written)] for new in stored), k_cache, v_cache, written)
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        expected = torch.full((32, 3, 24), 9.0, device=DEVICE)
        expected[[17, 0, 31]] = (new / scale).clamp(-limit, limit)[[0, 2, 3]].to(dtype).float()
        assert torch.equal(cache.float().view(32, 3, 24), expected)


@needs_gpu
def test_a_pool_of_more_than_2_to_the_31_elements():
    """Offsets into a large pool need 64 bits. The sequences use the last blocks; a kernel whose offsets overflow would
    read the first ones."""
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
def test_triton_imported_without_its_interpreter_gets_a_sentence():
    """Triton reads the variable when another package, such as transformers, imports it first."""
    code = f"import triton, nanopaged; nanopaged.LLM({str(GOLDEN / 'qwen3')!r}, device='cpu', attention='triton')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "ValueError: the Triton kernel needs" in run.stderr and "TRITON_INTERPRET=1 before" in run.stderr


@needs_kernel
def test_the_work_list_starts_with_the_tiles_of_the_longest_context():
    tiles = kernel.make_query_tiles([1, 40, 9, 20], [500, 40, 9, 100], 16).tolist()
    assert tiles == [[3, 1], [3, 0], [1, 2], [1, 1], [1, 0], [2, 0]]


# --------------------------------------------------------------------------------------------------
# BlockManager and Scheduler, with a fake model
# --------------------------------------------------------------------------------------------------

def samples_of(n, model, *args, **kwargs):
    """n samples of one prompt. The first one is to be queued."""
    arrival = next(ARRIVALS)
    seqs = [sequence(*args, kind=samples.SampleSequence, arrival=arrival, number=j, **kwargs) for j in range(n)]
    samples.Samples(seqs, lambda seq: model.scheduler)  # sets `samples` of each
    return seqs


@pytest.mark.parametrize("options, before, prompts, steps", [
    # Identical prompts share their full blocks within one step. The tail is each one's own.
    ({}, [], [range(10), range(10)], [[10, 2], [1, 1]]),
    # A fully cached prompt computes one token, for its logits.
    ({}, [range(8)], [range(8)], [[1], [1]]),
    # A block is found by all tokens before it, not by its own alone.
    ({}, [[1, 2, 3, 4, 5, 6, 7, 8]], [[9, 9, 9, 9, 5, 6, 7, 8]], [[8]]),
    # Freed blocks are reused oldest first, tail before head; a reused block is not found any more.
    (dict(num_blocks=4), [[1] * 8, [2] * 15], [[1] * 8], [[8]]),
    (dict(num_blocks=4), [[1] * 12, [2] * 8], [[1] * 12], [[4]]),
    (dict(num_blocks=6), [[1] * 8, [2] * 8, [1] * 8, [3] * 16], [[1] * 8], [[1]]),
    (dict(num_blocks=6), [[1] * 8, [2] * 8, [1] * 8, [3] * 16], [[2] * 8], [[8]]),
    # A step mixes decoded tokens, a chunk of a prompt and new prompts. The first in the order is served first.
    (dict(max_num_batched_tokens=12), [], [[1] * 3, [2] * 20, [3] * 5], [[3, 9], [1, 11], [1, 1, 5], [1, 1, 1]]),
    # A prompt that has too few blocks is admitted as soon as it can share those of an earlier one.
    (dict(num_blocks=12, max_num_batched_tokens=16), [], [[1] * 40, [1] * 40], [[16], [16], [8, 1], [1, 1]]),
], ids=str)
def test_what_steps_compute(options, before, prompts, steps):
    model = fake(**options)
    for prompt in before:
        model.run(sequence(prompt, max_new=1))
    for prompt in prompts:
        model.scheduler.add(sequence(prompt, max_new=5))
    assert [model.step().num_tokens for _ in steps] == steps
    model.run()


@pytest.mark.parametrize("lookahead, text", [(0, engine.Sequence), (1, engine.Engine)])
def test_the_counters_of_a_sequence(lookahead, text):
    scheduler, seq = engine.Scheduler(engine.BlockManager(9, 4), 4, 99), engine.Sequence([*range(8)], (0, 0, 0), 20)
    rows, drawn, steps = as_rows(text.__doc__, "num_computed_tokens   ")[:3], [], deque()

    def note():
        drawn.append([str(getattr(seq, row[0])) for row in rows])

    assert scheduler.block_manager.admit(seq)
    note()
    scheduler.run(seq)
    for _ in range(3):
        steps.append(scheduler.schedule())
        note()
        if len(steps) > lookahead:
            scheduler.update(steps.popleft(), Sampled([20]))
            note()
    columns = [list(column) for column in zip(*(row[1:] for row in rows))]
    assert len(rows) == 3 and len(columns) == 4 + lookahead and columns == drawn[:len(columns)]


def test_the_two_samples_of_the_drawing():
    """As features/samples.py draws them."""
    model = fake()
    a, b = samples_of(2, model, range(6))
    model.scheduler.add(a)
    rows = [row[1:] for row in as_rows(samples.__doc__, "step    A")[1:]]
    steps = []
    for row in rows:
        steps.append(step := model.scheduler.schedule())
        batch = StepInput.of(step, 4)
        steps[-1] = [step.num_tokens, step.copies, batch.positions, batch.slot_mapping]
        model.scheduler.update(step, Sampled([6] * len(step.sampled)))
    slots = [*range(6)], [2 * 4 + 2, -1], [2 * 4 + 3, 1 * 4 + 2]
    assert rows[0] == ["computes 0 to 5, blocks 0 1"] and steps[0] == [[6], [], [*range(6)], slots[0]]
    assert rows[1] == ["copies block 1 to 2, writes 6", "shares blocks 0 1, computes 5 for its logits alone"]
    assert steps[1] == [[1, 1], [(1, 2)], [6, 5], slots[1]]
    assert rows[2] == ["writes 7 into block 2", "holds block 1 alone by now, writes 6"]
    assert steps[2] == [[1, 1], [], [7, 6], slots[2]]


def test_a_block_has_one_key():
    """As features/samples.py tells it: A's second block follows the P of another sequence, whose block is evicted."""
    model = fake(num_blocks=6)
    manager, other, (a, b) = model.scheduler.block_manager, sequence(range(4)), samples_of(2, model, range(9))
    for seq in (other, a):
        manager.admit(seq)
    for seq in (other, a):
        manager.allocate(seq, seq.num_tokens)
        seq.num_computed_tokens = seq.num_tokens
        manager.cache_full_blocks(seq)
    manager.free(other)
    manager.allocate(filler := sequence(range(50, 62)), 12)  # takes all free blocks
    manager.free(filler)
    model.scheduler.run(a)
    a.append(0)
    assert b.block_table == a.block_table
    manager.cache_full_blocks(b)
    assert sorted(block for block, _ in manager.prefix_cache.values()) == sorted(a.block_table[:2])


def test_a_prompt_of_whole_blocks_needs_no_copy():
    model = fake()
    model.run(samples_of(4, model, range(8), max_new=3)[0])
    assert model.events["copies"] == 0


@pytest.mark.parametrize("n, rows, max_new, most", [(4, 256, 1, 103), (8, 4, 8, 262), (3, 1, 2, 303)])
def test_samples_compute_their_prompt_once(n, rows, max_new, most):
    """Without prefix caching, too, and also those that end with their first token or wait for a batch row."""
    model = fake(max_num_seqs=rows, caching=False)
    model.run((seqs := samples_of(n, model, range(100), max_new=max_new))[0])
    assert [len(seq.token_ids) for seq in seqs] == [100 + max_new] * n
    assert model.num_computed <= most


def test_samples_do_not_overtake_and_end_when_they_are_aborted():
    model = fake(max_num_seqs=2, caching=False)
    a, b, c = samples_of(3, model, range(10), max_new=5)
    between = sequence(range(20, 30), arrival=a.order[1], number=1)
    b.order = a.order[0], a.order[1], 2
    model.scheduler.add(a)
    model.scheduler.add(between)
    model.step()
    assert between.status is Status.RUNNING and b.status is c.status is Status.WAITING and not b.block_table
    model.scheduler.finish(a, "abort")
    assert b in model.scheduler.waiting and c not in model.scheduler.waiting
    for seq in (b, c, between):
        model.scheduler.finish(seq, "abort")
    assert model.engine.is_idle
    model.scheduler.block_manager.check_idle()


@pytest.mark.parametrize("shortage", [
    dict(max_num_seqs=4), dict(num_blocks=14), dict(max_num_batched_tokens=8)], ids=str)
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


# In the long mode this is as many as there is time for.
NUM_RANDOM_OPERATIONS = int(os.environ.get("NUM_RANDOM_OPERATIONS", 24_000))


def random_operations(count, rng, events):
    """On an engine of the chapter. (nanopaged/tests/test_random_operations.py adds the features.)"""
    block_size, max_len = rng.choice([1, 2, 3, 4, 8]), rng.choice([20, 40])
    model = fake(cdiv(max_len, block_size) + 2 + rng.randint(0, 20), block_size, rng.choice([1, 3, 8]),
                 rng.choice([1, 5, 30]), rng.random() < 0.8, rng.choice([0, 1]))
    texts, alive = [[rng.randint(0, 2) for _ in range(max_len)] for _ in range(3)], []
    for _ in range(count):
        action = rng.random()
        if action < 0.30 and len(alive) < 20:
            alive.append(sequence(rng.choice(texts)[:rng.randint(1, max_len - 1)], rng.randint(1, 20), max_len,
                                  rng.choice([0, 0, 1])))
            model.scheduler.add(alive[-1])
        elif action < 0.34 and alive:
            model.scheduler.finish(rng.choice(alive), "abort")
        else:
            model.step(fail=action > 0.97)
        check_books(model.scheduler)
        model.check_cache()
        events["finished"] += sum(seq.status is Status.FINISHED for seq in alive)
        alive = [seq for seq in alive if seq.status is not Status.FINISHED]
    model.run()
    model.scheduler.block_manager.check_idle()
    events.update(model.events)


@pytest.mark.parametrize("seed", range(2))
def test_random_operations_keep_every_promise(seed):
    """Prompts are cut from few texts, so prefixes are shared, evicted and generated all the time. FakeModel checks
    every slot and all that is cached, and check_books checks the rest."""
    rng, events = random.Random(seed), Counter()
    for _ in range(NUM_RANDOM_OPERATIONS // 4 // 250):
        random_operations(250, rng, events)
    assert all(events[kind] > 0 for kind in ("preempted", "finished")), events


# --------------------------------------------------------------------------------------------------
# The model against reference outputs
# --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("variant", VARIANTS + ["shakespeare"])
def test_logits_equal_transformers(variant):
    prompts, _, logits = expectations(variant)
    llm = load(variant, enable_prefix_caching=False)
    for prompt, expected in zip(prompts, logits):
        assert relative_error(prompt_logits(llm, prompt.tolist()).cpu(), expected) < 1e-4


@pytest.mark.parametrize("variant", VARIANTS + ["shakespeare"])
def test_greedy_continuations_equal_transformers(variant):
    """The models whose modules (biases, a relu) are not among those of test_graphs.py run with CUDA graphs.

    A continuation of 300 tokens is five requests side by side, each with the tokens before its own as the prompt."""
    prompts, continuations, _ = expectations(variant)
    llm = load(variant, graphs=variant in ("opt", "llama-linear-bias"))
    pieces = [(torch.cat([prompt, text[:start]]).tolist(), text[start:start + 60].tolist())
              for prompt, text in zip(prompts, continuations) for start in range(0, len(text), 60)]
    params = [SamplingParams(temperature=0, max_tokens=len(piece), ignore_eos=True) for _, piece in pieces]
    assert tokens_of(llm.generate([prompt for prompt, _ in pieces], params)) == [piece for _, piece in pieces]


@needs_kernel
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_triton_path_equals_transformers(variant):
    # The interpreter takes a second for 30 tokens, so there it gets one prompt, and two prompts for models with windows
    # in all, in some and in no layers.
    num_prompts, num_new = (None, 8) if CUDA else (1 + (variant in ("mistral", "gemma3", "qwen3")), 2)
    assert_golden(load(variant, attention="triton"), variant, slice(num_prompts), num_tokens=num_new)


@needs_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_on_the_gpu(dtype):
    """The bundled model's logits are not equal to those in float32, but within a few units of the type's precision."""
    prompts, _, logits = expectations("shakespeare")
    llm = load(dtype=dtype, enable_prefix_caching=False, graphs=dtype == "bfloat16")
    assert relative_error(prompt_logits(llm, prompts[0].tolist()).cpu(), logits[0]) < 0.03


# --------------------------------------------------------------------------------------------------
# What the model is given, and what it computes
# --------------------------------------------------------------------------------------------------

def recorded_batches(llm, choose):
    """The batches that the engine gives to the model from now on. In the model's place choose(batch) says what is
    sampled."""
    batches = []

    def forward(batch, kv_cache, kernels):
        batches.append(batch)
        logits = torch.zeros(len(batch.logits_indices), llm.config.vocab_size)
        logits[range(len(logits)), choose(batch)] = 1.0
        return logits

    llm.runner.model = forward
    return batches


def as_rows(text, start):
    """The lines of a table in a docstring, from the one that begins with `start` to the next empty one. Each line is
    split by columns."""
    lines = text[text.index(start):].split("\n\n")[0].splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines]


def test_the_worked_decode_of_the_models_text():
    heading, *rows = as_rows(model.__doc__, "step      tokens in")
    assert heading == ["step", "tokens in", "positions", "in KV cache before", "K, V written of", "sampled"]
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
    drawn = {name: cells for name, *cells in as_rows(llm.runner._compute.__doc__, "sequence     ")}
    assert drawn["sequence"] == ["A", "C", "B"] and drawn["flat rows"][:3] == ["0", "1", "2..5"]
    assert batch.hints["sampling_indices"].tolist() == list(map(int, drawn["sampling_indices"][:3]))
    assert batch.logits_indices.tolist() == list(map(int, drawn["last_rows"][:3]))


def test_the_rows_of_the_last_layer():
    """The drawing in last_layer.py: the MLP of the last layer computes the rows that need logits, the others all."""
    rows = {name: cells for name, *cells in as_rows(last_layer.__doc__, "token  ")}
    llm = load("qwen3", device="cpu", max_num_batched_tokens=8, enable_prefix_caching=False)
    decoder, batches, num_rows = llm.runner.model, [], []
    decoder.register_forward_pre_hook(lambda _, arguments: batches.append(arguments[0]))
    for layer in decoder.layers:
        layer.down_proj.register_forward_pre_hook(lambda _, arguments: num_rows.append(len(arguments[0])))
    for prompt in ([1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]):
        llm.add_request(prompt, GREEDY)
        if prompt[0] == 1:
            llm.step()
    num_rows.clear()
    llm.step()
    names = [name[0] for name in rows["token"]]
    assert batches[1].query_start_loc.tolist() == [*map(names.index, "abc"), len(names)]
    needed = [i for i, mark in enumerate(rows["attention, MLP"][:8]) if mark == "x"]
    drawing = "logits_indices {} {} (rows), sampling_indices {} {} (A, B)"
    assert rows["attention, MLP"][8] == drawing.format(*needed, *batches[1].hints["sampling_indices"])
    assert batches[1].logits_indices.tolist() == needed
    assert num_rows == [8] * (llm.config.num_layers - 1) + [len(needed)]


def test_the_last_layer_attends_only_for_what_samples():
    llm, rows = load("qwen3", device="cpu", max_num_batched_tokens=32, enable_prefix_caching=False), []
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


# --------------------------------------------------------------------------------------------------
# Equality of outputs: how the work is cut never shows in the text
# --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("variant", ["mistral", "qwen3"])  # with a window and without
@pytest.mark.parametrize("options", [
    dict(graphs=True), dict(lookahead=1), dict(lookahead=1, max_num_batched_tokens=7, block_size=1),
    dict(lookahead=1, num_blocks=9, block_size=8),
    dict(block_size=1), dict(block_size=64), dict(max_num_batched_tokens=1), dict(max_num_batched_tokens=7),
    dict(max_num_seqs=1), dict(max_num_seqs=2, max_num_batched_tokens=20), dict(enable_prefix_caching=False),
    dict(num_blocks=9, block_size=8), dict(num_blocks=65, block_size=1, max_num_batched_tokens=7),
    dict(num_blocks=10, block_size=8, enable_prefix_caching=False),
    dict(num_blocks=18, block_size=4), dict(num_blocks=18, block_size=4, graphs=True),
    dict(attention="torch", enforce_eager=True), dict(attention="torch", enforce_eager=False)
], ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()))
def test_outputs_do_not_depend_on_how_the_work_is_cut(variant, options):
    llm = load(variant, **options)  # a lookahead comes with CUDA graphs; here without them, too
    if "attention" in options:
        assert llm.runner.kernels is (kernel.TORCH if options["enforce_eager"] else rectangles.KERNELS)
    assert_golden(llm, variant, times=3)
    manager = llm.scheduler.block_manager
    manager.check_idle()
    if "num_blocks" in options and not getattr(manager, "window", 0):  # not much more than the longest sequence
        assert llm.counts.num_preemptions >= 3


def test_outputs_are_the_same_from_the_cache():
    llm, fresh = load("llama3", num_blocks=32), load("llama3", enable_prefix_caching=False)
    text = list(range(60, 140))
    for length in (70, 80):  # of 4 whole blocks and a rest, and of 5 whole blocks
        expected = tokens_of(fresh.generate(text[:length], GREEDY))
        assert tokens_of(llm.generate(text[:length], GREEDY)) == expected
        output = llm.generate(text[:length], GREEDY)[0]  # the second time its blocks are in the cache
        assert tokens_of([output]) == expected and output.num_cached_tokens == length // 16 * 16
    for i in range(10):  # push everything out
        llm.generate([[i + 10] * 60], SamplingParams(max_tokens=1))
    output = llm.generate(text, GREEDY)[0]
    assert output.num_cached_tokens == 0 and tokens_of([output]) == expected


# --------------------------------------------------------------------------------------------------
# What a paged pool makes possible, with real models
# --------------------------------------------------------------------------------------------------

@lru_cache
def samples_alone():
    params = [SamplingParams(temperature=0.9, seed=7 + j, max_tokens=20) for j in range(6)]
    return [shared("qwen3").generate(PROMPT, p)[0].outputs[0].token_ids for p in params]


@pytest.mark.parametrize("options", [
    {}, dict(enable_prefix_caching=False), dict(max_num_seqs=3), dict(num_blocks=20, block_size=4)], ids=str)
def test_sample_j_equals_a_request_of_its_own_with_seed_s_plus_j(options):
    output = load("qwen3", **options).generate(PROMPT, SamplingParams(n=6, temperature=0.9, seed=7, max_tokens=20))[0]
    assert [sample.token_ids for sample in output.outputs] == samples_alone()
    assert [sample.index for sample in output.outputs] == list(range(6)) and len(set(map(tuple, samples_alone()))) == 6


def test_an_fp8_cache_changes_the_loss_by_less_than_a_percent():
    """The model is the bundled one, and the text a piece of tinyshakespeare's last tenth, which is no part of the
    training text."""
    held_out = shared().get_tokenizer().encode((BUNDLED / "held_out.txt").read_text())
    prompts, losses = [held_out[start:start + 400] for start in range(0, 2400, 400)], []
    for dtype in ("auto", "fp8"):
        llm = load(kv_cache_dtype=dtype)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0))
        tokens = [list(entry.values())[0].logprob for output in outputs for entry in output.prompt_logprobs[1:]]
        losses.append(-sum(tokens) / len(tokens))
    assert 2.6 < losses[0] < 3.3  # nats per token; training.json says 3.20 of the whole tenth
    assert losses[1] == pytest.approx(losses[0], rel=0.01) and losses[1] != losses[0]
    assert llm.runner.pool.block_bytes * 4 == shared().runner.pool.block_bytes  # float32 here; half of bfloat16
    assert all(k_scale > 0 and v_scale > 0 for _, _, k_scale, v_scale in llm.runner.kv_cache)


def test_a_window_lets_a_text_be_longer_than_the_pool():
    """The mistral golden's window is 8 tokens. The reference is a pool with room for every token."""
    prompt = [i * 7 % 200 for i in range(60)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = tokens_of(load("mistral").generate(prompt, params))
    for options in (
            dict(num_blocks=5, block_size=4), dict(num_blocks=12, block_size=1), dict(num_blocks=3, block_size=16)):
        llm = load("mistral", **options)
        assert llm.max_model_len > options["num_blocks"] * options["block_size"]
        assert tokens_of(llm.generate([prompt, prompt], params)) == expected * 2


BEAM_CASES = json.loads((GOLDEN / "beam" / "expected.json").read_text())["cases"]
BEAM_SHORTAGES = [dict(num_blocks=14, block_size=4), dict(num_blocks=14, block_size=4, max_num_seqs=2),
                  dict(enable_prefix_caching=False, max_num_batched_tokens=5)]


@pytest.mark.parametrize("model, options", [
    *((model, {}) for model in sorted({case["model"] for case in BEAM_CASES})),
    *itertools.product(["mistral", "qwen3"], BEAM_SHORTAGES), ("shakespeare", BEAM_SHORTAGES[0])], ids=str)
def test_beam_search_equals_transformers(model, options):
    cases = [case for case in BEAM_CASES if case["model"] == model][::3 if options else 1]
    if "num_blocks" in options:
        longest = max(len(case["prompt_token_ids"]) + case["max_tokens"] for case in cases)
        options = options | dict(num_blocks=cdiv(longest, 4) + 2)
    llm = load(model, graphs=not options and model == "shakespeare", **options)
    for case in cases:
        llm.eos_token_ids = frozenset(case["eos_token_ids"])
        names = ("beam_width", "max_tokens", "length_penalty", "early_stopping")
        params = BeamSearchParams(**{name: case[name] for name in names})
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
    llm.beam_search([list(range(100, 180))], BeamSearchParams(beam_width=4, max_tokens=24))
    # The prompt's 20 blocks once. Apart from it each beam has at most 24 tokens of its own.
    assert llm.counts.most_blocks_held < 20 + 4 * 7


# --------------------------------------------------------------------------------------------------
# Settings of a request, through the whole engine
# --------------------------------------------------------------------------------------------------

def forbid_repeating(token_ids, logits):
    last = torch.tensor(token_ids[-1:], dtype=torch.long, device=logits.device)
    return logits.index_fill(0, last, -1e9)


MANY_SETTINGS = [
    dict(), dict(temperature=0), dict(repetition_penalty=1.5),
    dict(frequency_penalty=1.0, presence_penalty=0.5, temperature=0), dict(logit_bias={5: 4.0, 7: -50.0}),
    dict(allowed_token_ids=[1, 2, 3, 9]), dict(min_tokens=10, stop_token_ids=list(range(0, 900))),
    dict(bad_words=[" the", "and", "I am"]), dict(top_k=5), dict(top_p=0.8, repetition_penalty=1.2), dict(min_p=0.2),
    dict(logits_processors=[forbid_repeating]),
    dict(logprobs=3), dict(temperature=0, logprobs=0), dict(stop=["e", "th"])]


@lru_cache
def each_alone():
    """One request with each of these settings, and what each request gives alone."""
    params = [SamplingParams(**dict(max_tokens=12, seed=i, ignore_eos=True) | settings)
              for i, settings in enumerate(MANY_SETTINGS)]
    return params, [shared().generate(PROMPT, p)[0].outputs[0] for p in params]


@pytest.mark.parametrize("options", [
    dict(graphs=True), dict(lookahead=0), dict(num_blocks=16, block_size=4),
    dict(max_num_batched_tokens=7, enable_prefix_caching=False)], ids=str)
def test_settings_mean_the_same_in_any_batch(options):
    """All the requests together, with preemptions and lookahead, give what each request gives alone."""
    params, alone = each_alone()
    llm = load(**dict(lookahead=1) | options)
    together = [output.outputs[0] for output in llm.generate([PROMPT] * len(params), params)]
    for one, other in zip(together, alone):
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert getattr(one, name) == getattr(other, name)
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


def test_settings_do_what_they_say():
    llm = load()

    def run(**settings):
        params = SamplingParams(**dict(max_tokens=24, seed=1, ignore_eos=True) | settings)
        return llm.generate(PROMPT, params)[0].outputs[0]

    assert set(run(allowed_token_ids=[3, 4]).token_ids) <= {3, 4}
    assert run(logit_bias={7: 100.0}, temperature=0).token_ids == [7] * 24
    assert len(set(run(presence_penalty=2.0, temperature=0).token_ids)) > len(set(run(temperature=0).token_ids))
    plain = run()
    assert len(run(stop_token_ids=list(range(1000)), min_tokens=9).token_ids) == 10
    assert run(stop_token_ids=list(range(1000))).token_ids == plain.token_ids[:1]
    word = plain.text[10:14]
    stopped = run(stop=[word])
    assert stopped.text == plain.text[:plain.text.index(word)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", word)
    assert run(stop=word, include_stop_str_in_output=True).text == plain.text[:plain.text.index(word) + len(word)]
    words = {token: [llm.get_tokenizer().decode([token])] for token in plain.token_ids}
    token = next(token for token in words if [token] in encode_bad_words(words[token], llm.get_tokenizer()))
    assert token not in run(bad_words=words[token]).token_ids
    short = load(max_model_len=40).generate(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0]
    assert short.finish_reason == "length" and len(short.token_ids) == 40 - len(PROMPT)


def test_log_probabilities_equal_a_plain_log_softmax():
    """The log probabilities of the prompt and of the generated tokens, in chunks too, equal those of one forward pass
    over the whole text."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    for options in (dict(), dict(max_num_batched_tokens=4), dict(num_blocks=8, block_size=8)):
        llm = load(**options)
        output = llm.generate([PROMPT, PROMPT], params)[1]
        generated = output.outputs[0]
        text = PROMPT + generated.token_ids
        logprobs = torch.log_softmax(prompt_logits(shared(enable_prefix_caching=False), text).float(), -1)
        assert output.prompt_logprobs[0] is None
        entries = list(enumerate(output.prompt_logprobs))[1:]
        entries += enumerate(generated.logprobs, len(PROMPT))
        for position, entry in entries:
            row, token = logprobs[position - 1], text[position]
            best = row.topk(3 if position >= len(PROMPT) else 2).indices.tolist()
            assert list(entry) == [token] + [i for i in best if i != token]
            for i, logprob in entry.items():
                assert logprob.logprob == pytest.approx(row[i].item(), abs=1e-3)
                assert logprob.rank == (row >= row[i]).sum()
                assert logprob.decoded_token == llm.get_tokenizer().decode([i], skip_special_tokens=False)
        total = sum(entry[token].logprob for entry, token in zip(generated.logprobs, generated.token_ids))
        assert generated.cumulative_logprob == pytest.approx(total)


# --------------------------------------------------------------------------------------------------
# The kernels, compiled for GPUs that this machine may not have
# --------------------------------------------------------------------------------------------------

@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
def test_the_kernels_compile_and_fit_the_devices_shared_memory():
    """The interpreter accepts code that the compiler refuses. This test compiles a few configurations, and
    `python -m nanopaged.tests.compile_kernels` compiles all of them."""
    command = [sys.executable, "-m", "nanopaged.tests.compile_kernels", "--quick", "90", "75"]
    run = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0, run.stdout
    assert "sm_90 decode" in run.stdout and "sm_75 prefill" in run.stdout and "sm_90 hopper" in run.stdout
