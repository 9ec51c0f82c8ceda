"""Tests of the three chapters: kernel.py, engine.py, model.py. What lies around them is tested in nanopaged/tests/.

On a machine without a GPU the kernel runs in Triton's interpreter, in float32 and float16; with one, the same tests
run on it, in bfloat16 too. Reference outputs in nanopaged/golden/ were computed by Hugging Face transformers
(nanopaged/golden/make_models.py).
"""
import itertools
import math
import os
import random
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec

import pytest
import torch

import engine
import kernel
import model
from engine import Sampled, Status
from kernel import paged_attention, paged_attention_reference, store_kv
from nanopaged import SamplingParams, optional_triton, tiles
from nanopaged.tests.fake_model import fake, sequence
from nanopaged.tests.helpers import (
    ALL_VARIANTS,
    CUDA,
    DEVICE,
    GOLDEN,
    GREEDY,
    MIXTURES,
    OF_FEATURES,
    ROOT,
    as_rows,
    assert_golden,
    check_books,
    expectations,
    load,
    needs_gpu,
    needs_kernel,
    prompt_logits,
    relative_error,
    tokens_of,
)

# Of the chapters alone: the others need a feature
VARIANTS = [variant for variant in ALL_VARIANTS if variant not in {*MIXTURES, *OF_FEATURES}]


# --------------------------------------------------------------------------------------------------
# The kernel
# --------------------------------------------------------------------------------------------------

def paged_problem(query_lens, seq_lens, *, heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32,
                  heads_first=False, seed=0):
    """Random paged K and V in shuffled blocks. Every slot that no sequence owns is NaN, and every table entry behind a
    sequence's last block names a block of NaN: a kernel that reads one of them shows it in its output. The pool's
    memory order is the caller's choice: other layers lie between the blocks, and heads may come before slots."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [tiles.cdiv(n, block_size) for n in seq_lens]
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


def reference(q, k_cache, v_cache, tables, lens, starts, scale, window, sinks=None):
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
            scores = torch.einsum("hd,thd->ht", q[row], k[seen]) * scale
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
            weights = torch.softmax(scores, -1)[:, :len(k[seen])]
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
    **{f"head_dim {n}": (MIXED, dict(head_dim=n)) for n in (8, 64, 80, 96, 128, 256, 512)},
    "heads before slots": (MIXED, dict(heads_first=True)),
    "padding rows": (([1, 0, 4, 0], [7, 0, 6, 0]), {}),
    "sinks": (MIXED, dict(sinks=True)),
    "sinks, splits and a window": (([1, 1, 9], [600, 100, 40]), dict(heads=6, kv_heads=2, window=300, sinks=True)),
}
FP8 = torch.float8_e4m3fn
HAS_FP8 = not CUDA or torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="needs a GPU with fp8")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * CUDA  # the interpreter computes bfloat16 wrongly
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, FP8: 3e-3}
# The type that engines run in has all shapes. The other types take the same path whatever the shape is, with smaller
# tiles where a number has more bytes: three shapes are enough. Over an fp8 cache, tiles are read in other ways.
CASES_OF_OTHER_TYPES = ("mixed batch", "splits", "head_dim 256", "head_dim 512", "sinks")
FP8_CASES = ("decode", "mixed batch", "splits", "block size 64", "group of 3", "head_dim 80",
             "window shorter than the chunk", "head_dim 8", "block size 1", "splits under a window", "padding rows",
             "sinks, splits and a window")


CASES_AND_TYPES = [
    *((case, dtype) for case in ATTENTION_CASES for dtype in DTYPES
      if dtype is (torch.bfloat16 if CUDA else torch.float32) or case in CASES_OF_OTHER_TYPES),
    *((case, FP8) for case in FP8_CASES if HAS_FP8)]


@pytest.mark.parametrize("case, dtype", CASES_AND_TYPES)
@pytest.mark.parametrize("attention", [pytest.param(paged_attention, marks=needs_kernel), paged_attention_reference])
def test_attention_equals_float64(attention, case, dtype):
    assert_equals_float64(attention, case, dtype)


def assert_equals_float64(attention, case, dtype):
    """An fp8 cache is compared with float64 over what the cache holds."""
    (query_lens, seq_lens), options = ATTENTION_CASES[case]
    options = dict(options)
    window, has_sinks = options.pop("window", 0), options.pop("sinks", False)
    k_scale, v_scale = (0.25, 2.0) if dtype is FP8 else (1.0, 1.0)
    q, k, v, *rest = paged_problem(query_lens, seq_lens, dtype=torch.float16 if dtype is FP8 else dtype, **options)
    if dtype is FP8:
        k, v = (k / k_scale).to(FP8), (v / v_scale).to(FP8)
    sinks = torch.linspace(-3, 9, q.shape[1], device=DEVICE).to(q.dtype) if has_sinks else None
    out = run_attention(attention, [q, k, v, *rest], window, k_scale=k_scale, v_scale=v_scale, sinks=sinks)
    expected = reference(q, k.double() * k_scale, v.double() * v_scale, *rest, q.shape[-1] ** -0.5, window, sinks)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_attention_in_torch_at_any_length(device):
    assert_right_at_any_length(paged_attention_reference, device)


def assert_right_at_any_length(attention, device):
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
    tokens_per_tile = kernel.TRITON.tokens_per_tile(2, 32, 16, torch.float32, torch.float32, problem[0].device)
    assert tokens_per_tile > 4, "the work list above is for one tile of sequence 2"
    out = run_attention(paged_attention, problem, query_tiles=tiles)
    assert torch.equal(out[5:], torch.full_like(out[5:], 7.0))
    assert relative_error(out[:5], reference(*problem, 32 ** -0.5, 0)[:5]) < 1e-5


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
    # A prompt that would leave a running text less than the watermark waits; alone it may take every block.
    (dict(num_blocks=100), [], [[1] * 354, [2] * 36], [[354, 36]]),
    (dict(num_blocks=100), [], [[1] * 354, [2] * 40], [[354], [1], [1], [1], [1], [40]]),
    (dict(num_blocks=100), [], [[1] * 396], [[396]]),
], ids=str)
def test_what_steps_compute(options, before, prompts, steps):
    model = fake(**options)
    for prompt in before:
        model.run(sequence(prompt, max_new=1))
    for prompt in prompts:
        model.scheduler.add(sequence(prompt, max_new=5))
    assert [model.step().num_tokens for _ in steps] == steps
    model.run()


def test_an_urgent_sequence_preempts_none_for_the_watermark():
    model = fake(num_blocks=100)
    texts = [sequence([i] * 4 * n, max_new=5, priority=priority) for i, (n, priority) in enumerate(((89, 1), (10, 0)))]
    model.scheduler.add(texts[0])
    model.step()
    model.scheduler.add(texts[1])
    step = model.step()
    assert step.seqs == texts[::-1] and not step.preempted
    model.run()


def test_the_cursors_of_a_sequence():
    """Each moment of the table in the docstring."""
    scheduler, rows = engine.Scheduler(engine.BlockManager(9, 4), 4, 99), as_rows(engine.Sequence.__doc__, "| 0  1")
    before, seq = (engine.Sequence([*range(n)], engine.Order(0, n, 0), 20) for n in (4, 10))
    scheduler.add(before)
    scheduler.schedule()
    scheduler.finish(before, "abort")  # the prefix cache has its block
    seen = []

    def note():
        seen.append([str(seq.num_computed_tokens), f"{seq.num_tokens} ({seq.num_pending_tokens})",
                     str(seq.num_keyed_blocks)])
        assert seq.num_found_tokens == 4 and seq.root == engine.ROOT and seq.prefix_key == seq.num_keyed_blocks

    assert scheduler.block_manager.admit(seq)
    note()
    scheduler.run(seq)
    step = scheduler.schedule()
    note()
    scheduler.update(step, Sampled([20]))
    note()
    scheduler.schedule()
    note()
    assert seen == [row[1:] for row in rows[1:]]


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
    model = fake(tiles.cdiv(max_len, block_size) + 2 + rng.randint(0, 20), block_size, rng.choice([1, 3, 8]),
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

    A continuation of 300 tokens is ten requests side by side, each with the tokens before its own as the prompt."""
    prompts, continuations, _ = expectations(variant)
    llm = load(variant, graphs=variant in ("opt", "llama-linear-bias"))
    pieces = [(torch.cat([prompt, text[:start]]).tolist(), text[start:start + 30].tolist())
              for prompt, text in zip(prompts, continuations) for start in range(0, len(text), 30)]
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
    llm = load("shakespeare", dtype=dtype, enable_prefix_caching=False, graphs=dtype == "bfloat16")
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
    assert drawn["sequence"] == ["A", "C", "B"] and drawn["tokens"][:3] == ["0", "1", "2..5"]
    assert batch.sampling_places.tolist() == list(map(int, drawn["sampling_places"][:3]))
    assert batch.logits_indices.tolist() == list(map(int, drawn["logits_indices"][:3]))


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
    dict(num_blocks=18, block_size=4), pytest.param(dict(num_blocks=18, block_size=4, graphs=True), marks=needs_gpu),
    dict(attention="torch", enforce_eager=True), dict(attention="torch", enforce_eager=False)
], ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()))
def test_outputs_do_not_depend_on_how_the_work_is_cut(variant, options):
    llm = load(variant, **options)  # a lookahead comes with CUDA graphs; here without them, too
    if "attention" in options:
        assert (llm.runner.kernels is kernel.TORCH) >= options["enforce_eager"]
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
