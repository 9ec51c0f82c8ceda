"""Layers of several kinds in an engine: texts, memory, and what goes together. (test_kinds.py has the index, and
test_graphs.py recorded steps; tests of drafts, Triton and two ranks go over all goldens.)"""
import json
import random
from functools import cache
from unittest.mock import patch

import pytest
import torch

from model import AttentionMetadata
from nanopaged import SamplingParams, kernel
from nanopaged.features import graphs
from nanopaged.features.kinds import device
from nanopaged.features.kinds.device import Heads, KindsRunner, group_layers, most_blocks
from nanopaged.features.kinds.slots import group_slots, group_slots_reference
from nanopaged.features.page import Page
from nanopaged.features.trace import Trace
from nanopaged.tests.helpers import (
    CUDA,
    DEVICE,
    GEMMA4,
    GOLDEN,
    GREEDY,
    as_rows,
    assert_golden,
    complaint,
    expectations,
    load,
    needs_kernel,
    pools,
    texts,
    tokens_of,
)
from nanopaged.tests.test_graphs import record_graphs
from nanopaged.weights import families

GROUPED = ["gemma3", "gemma3-groups", "gpt-oss", "olmo3", "qwen2-groups", "smollm3-window"]
plain = patch.object(device, "choose", lambda *_: None)  # all layers keep all blocks


@pytest.mark.parametrize("variant, lookahead", [("gemma3-groups", 0), *((variant, 1) for variant in GROUPED)])
def test_texts_of_transformers_from_a_small_pool(variant, lookahead):
    """In chunks, with preemptions."""
    llm = load(variant, num_blocks=20, block_size=4, max_num_batched_tokens=7, device="cpu", lookahead=lookahead)
    assert_golden(llm, variant, times=3)
    llm.scheduler.block_manager.check_idle()
    assert llm.config.groups and llm.counts.num_preemptions > 0


# ---- What goes together, and what does not

@cache
def from_a_plain_pool(variant):
    with plain:
        llm = pools(1, model=variant)
    assert not llm.config.groups
    return texts(llm)[0]


@pytest.mark.parametrize("options", [
    *(dict(model="qwen2-groups") | options for options in (
        dict(lookahead=1), dict(num_blocks=14), dict(num_blocks=16, lookahead=1), dict(enable_prefix_caching=False),
        dict(enforce_eager=True), dict(count=2), dict(speculative_config={"num_speculative_tokens": 4}),
        dict(max_num_batched_tokens=9))),
    *(dict(model="gemma3-groups", num_blocks=14) | options for options in (
        {}, dict(lookahead=1), dict(tensor_parallel_size=2)))], ids=str)
def test_mixed_requests_get_the_texts_of_a_plain_pool(forks, options):
    """Samples, beams, penalties, log probabilities of both kinds, drafts; two pools, two ranks."""
    llm = pools(**dict(count=1) | options)
    found, num_preempted = texts(llm)
    assert llm.config.groups and found == from_a_plain_pool(options["model"])
    assert bool(num_preempted) == ("num_blocks" in options)


@pytest.mark.parametrize("options", [{}, dict(enforce_eager=True), dict(num_blocks=20, block_size=4)], ids=str)
def test_over_an_fp8_cache(options):
    """Each layer has the scales that it has in a plain pool, and the same numbers."""
    def run():
        llm = load("gemma3-groups", device="cpu", kv_cache_dtype="fp8", **options)
        outputs = llm.generate([prompt.tolist() for prompt in expectations("gemma3-groups")[0]] * 2, GREEDY)
        return tokens_of(outputs), [cache[2:] for cache in llm.runner.kv_cache]

    grouped = run()
    with plain:
        assert run() == grouped


def test_what_does_not_go_together():
    assert "leave swap_space out" in complaint(load, "gemma3", device="cpu", swap_space=1)
    message = complaint(load, "gemma3-groups", device="cpu", num_blocks=10, block_size=4, max_model_len=250)
    assert "250" in message and "more memory" in message
    llm = load("gemma3-groups", device="cpu", num_blocks=10, block_size=4)
    assert str(llm.max_model_len) in complaint(llm.generate, [list(range(100)) * 3])


def test_windows_that_no_text_outgrows_are_none():
    assert load("gemma3", device="cpu", max_model_len=9).config.groups
    llm = load("gemma3", device="cpu", max_model_len=8)
    assert not llm.config.groups and type(llm.scheduler.block_manager).__name__ == "BlockManager"


# ---- Memory

def layers(*counts, window=1024, heads=Heads(4, 256)):
    """Layers that keep all, then layers with a window."""
    return [(has_window, window * has_window, heads) for has_window, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize("counts, sizes", [
    ((5, 29), [5, 5, 5, 5, 5, 5, 4]), ((21, 7), [7, 7, 7, 7]), ((1, 2), [1, 1, 1]), ((4, 22), [4, 4, 4, 4, 4, 4, 2]),
    ((8, 40), [8] * 6), ((20, 8), [10, 10, 8]), ((8, 24), [8] * 4)], ids=str)
def test_groups_waste_little(counts, sizes):
    """Gemma 3 4B, Qwen2 with few windows, a golden, Gemma 3 1B and 12B, OLMo 3."""
    groups = group_layers(layers(*counts))
    assert [groups.count(group) for group in range(max(groups) + 1)] == sizes
    assert groups == sorted(groups)  # as the layers are: those that keep all come first


def test_the_numbers_of_the_docstring():
    """Gemma 3 4B, a text of 10,000 tokens in blocks of 64."""
    import nanopaged.features.kinds as kinds
    _, *rows = as_rows(kinds.__doc__, "Gemma 3 4B")
    groups = group_layers(layers(5, 29))
    sizes = [groups.count(group) for group in range(7)]
    held = [-(-10_000 // 64)] + [-(-10_000 // 64) - (10_000 - 1024 + 1) // 64] * 6
    assert held == [157] + [17] * 6 and sum(held) == 259
    text = " ".join(kinds.__doc__.split())
    assert f"groups of {' '.join(map(str, sizes[1:]))}" in text and "157 blocks of 64 tokens" in text
    assert "6 x 17 blocks: 259 in all" in text and f"7 x 157 = {7 * 157:,}" in text


def test_num_blocks_means_memory_for_every_layer():
    """The pool takes the bytes that it takes in a plain engine, and has more, smaller blocks."""
    grouped = load("gemma3-groups", device="cpu", num_blocks=30)
    with plain:
        other = load("gemma3-groups", device="cpu", num_blocks=30)
    assert grouped.runner.pool.block_bytes == other.runner.pool.block_bytes
    assert grouped.runner.pool.blocks.numel() == other.runner.pool.blocks.numel()
    assert grouped.scheduler.block_manager.num_blocks == 4 * other.scheduler.block_manager.num_blocks == 120


@pytest.mark.parametrize("windows, most_tokens", [([0, 8], 7), ([0, 8, 8, 8], 30), ([0, 0, 5], 9), ([0, 0], 8)])
def test_the_longest_text_fits_exactly(windows, most_tokens):
    def needed(depth):
        most = [-(-(window + most_tokens) // 4) + 1 if window else depth for window in windows]
        return sum(min(depth, one) for one in most)

    for num_blocks in range(1, 90):
        depth = most_blocks(num_blocks, 4, windows, most_tokens)
        assert needed(depth) <= num_blocks < needed(depth + 1)


def test_more_texts_run_at_once():
    """8 texts in the memory of 40 blocks of every layer."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [[i] * 70 for i in range(8)]

    def run():
        llm, num_steps = load("gemma3-groups", device="cpu", num_blocks=40, block_size=4), 0
        for prompt in prompts:
            llm.add_request(prompt, params)
        while llm.has_unfinished_requests():
            llm.step()
            num_steps += 1
        return num_steps, llm.counts.num_preemptions

    grouped = run()
    with plain:
        num_steps, num_preempted = run()
    assert grouped[0] < 0.6 * num_steps and grouped[1] <= num_preempted, (grouped, num_steps, num_preempted)


# ---- Heads of two sizes

def two_sizes(**options):
    """A model of random weights whose layers that keep all have one head of 32 numbers, the others two of 8."""
    def gemma3(hf):
        config = read(hf)
        config.layer_heads = [(2, 8) if window else (1, 32) for window in config.sliding_windows]
        config.ropes = [rope | dict(head_dim=head_dim) for rope, head_dim in zip(config.ropes, (32, 8))]
        return config

    read = families.gemma3
    with patch.dict(families.FAMILIES, Gemma3ForCausalLM=gemma3):
        llm = load("gemma3-groups", load_format="dummy", device="cpu", **options)
    for name, parameter in llm.runner.model.named_parameters():
        if "norm" not in name:
            parameter.mul_(12)  # loud enough for attention to matter
    return llm


def continuation(llm, prompt, num_tokens):
    """Of the model, with attention as in chapter 1, and with K and V of each layer in one piece."""
    model, c, ids = llm.runner.model, llm.config, list(prompt)
    for _ in range(num_tokens):
        ints = torch.arange(len(ids), dtype=torch.int32)
        caches = [(*torch.zeros(2, 1, len(ids), *heads), 1.0, 1.0) for heads in c.layer_heads]
        batch = device.KindsBatch(torch.tensor(ids), ints, ints, ints[:1, None], torch.tensor([len(ids)]), torch.tensor(
            [0, len(ids)]), torch.tensor([len(ids) - 1]), None, AttentionMetadata(len(ids), len(ids)), [])
        batch.groups = [batch] * (max(c.groups) + 1)
        with torch.inference_mode():
            ids.append(model(batch, caches, kernel.TORCH).argmax().item())
    return ids[len(prompt):]


@pytest.mark.parametrize("options", [
    {}, dict(num_blocks=30, block_size=4, max_num_batched_tokens=7), dict(num_blocks=30, block_size=4, lookahead=1),
    dict(enforce_eager=True)], ids=str)
def test_heads_of_two_sizes(options):
    prompts = [[7 * i % 150 for i in range(length)] for length in (3, 17, 39, 39)]
    llm = two_sizes(**options)
    expected = [continuation(llm, prompt, 16) for prompt in prompts]
    outputs = llm.generate(prompts * 2, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    assert tokens_of(outputs) == expected * 2
    assert all(len({*ids}) > 5 for ids in expected)
    assert {cache[0].shape[2:] for cache in llm.runner.kv_cache} == {(2, 8), (1, 32)}


@pytest.mark.skipif(CUDA, reason="a fake model, whose graphs are pretended, on a CPU")
def test_heads_of_two_sizes_in_recorded_steps(monkeypatch):
    """Their tiles of prefill have two sizes, so a step has two work lists."""
    monkeypatch.setattr(graphs, "TOKEN_SIZES", [16, 32])
    monkeypatch.setattr(graphs, "DECODE_SIZES", [1, 2])
    llm = two_sizes(max_num_seqs=8, max_num_batched_tokens=40)
    seen, of_layer = [], {(2, 8): 6, (1, 32): 2}
    monkeypatch.setattr(KindsRunner, "tile_of", lambda self, layer: of_layer[self.config.layer_heads[layer]])
    attend = llm.runner.kernels.attention

    def look(q, k_cache, *args, **options):
        if options["max_query_len"] > 1:
            seen.append((tuple(k_cache.shape[2:]), options["query_tiles"].tolist()))
        return attend(q, k_cache, *args, **options)

    llm.runner.kernels = llm.runner.kernels._replace(attention=look)
    prompts = [[7 * i % 150 for i in range(length)] for length in (3, 17, 39)]
    expected = [continuation(llm, prompt, 16) for prompt in prompts]
    replayed = record_graphs(llm, monkeypatch)
    seen.clear()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    assert tokens_of(outputs) == expected and {shape.num_tiles > 0 for shape in replayed} == {True, False}
    lists = {heads: next(tiles for key, tiles in seen if key == heads) for heads in of_layer}
    for heads, tokens in of_layer.items():
        entries = [entry for entry in lists[heads] if entry != [-1, -1]]
        assert sorted(tile for seq, tile in entries if seq == 0) == list(range(-(-3 // tokens)))


def test_heads_of_two_sizes_over_an_fp8_cache():
    llm = two_sizes(kv_cache_dtype="fp8")
    first, second = tokens_of(llm.generate([list(range(20))] * 2, GREEDY))
    assert first == second and all(0 < scale < 1 for cache in llm.runner.kv_cache for scale in cache[2:])


def test_what_heads_of_two_sizes_do_not_have():
    assert "heads of one size" in complaint(two_sizes, tensor_parallel_size=2)
    assert "leave swap_space out" in complaint(two_sizes, swap_space=1)


# ---- The trace

def traced(make, **options):
    llm = load("gemma3", device="cpu", num_blocks=9, block_size=4, **options)
    trace = make(llm)
    prompt = list(range(20, 36))
    llm.generate([prompt, prompt[:12] + [1, 2]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    return trace


def test_the_trace_shows_the_tables_of_all_groups():
    lines = []
    traced(lambda llm: Trace(llm, lines.append))
    assert lines[0] == "a pool of 27 blocks of 4 tokens, 3 groups of layers have blocks of their own"
    assert lines[lines.index("step 1: 2 of at most 8192 tokens, for 2 of 2 running sequences"):][:7] == [
        "step 1: 2 of at most 8192 tokens, for 2 of 2 running sequences",
        "  A           decode 16 -> 17 [0* 1* 2* 3 15] [- - 6* 7 16] [- - 10* 11 17]",
        "  B           decode 14 -> 15 [0* 1* 2* 12] [- 5 6* 13] [- 9 10* 14]",
        "  pool        ***A.B*A.B *ABBBAAA__ _______  16 held (5 shared), 2 free but cached, 9 empty",
        "  group       0000_111_2 22012012__ _______",
        "  slid out    A 4 5 8 9",
        "  taken       A 15 16 17"]


def test_the_page_has_the_tables_of_all_groups():
    page = traced(Page)
    assert page.source.header()["groups"] == [0, 8, 8] and page.source.header()["blocks"] == 27
    assert page.frames[2]["tables"]["A"] == [0, [0, 1, 2, 3, 15], [], [-1, -1, 6, 7, 16], [-1, -1, 10, 11, 17]]


# ---- Slots

@needs_kernel
def test_slots_of_all_groups_in_one_launch():
    rng = random.Random(0)

    def ints(numbers):
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    for _ in range(30):
        num_seqs, num_groups, size = rng.randint(1, 6), rng.randint(1, 4), rng.choice([1, 3, 4, 16])
        lens = [rng.randint(1, 5) for _ in range(num_seqs)]
        num_tokens, padding = sum(lens), rng.randint(0, 3)
        starts = [sum(lens[:i]) for i in range(num_seqs + 1)] + [num_tokens] * rng.randint(0, 3)
        positions = [first + i for length in lens for first in [rng.randint(0, 3)] for i in range(length)]
        slots = [rng.choice([-1, 5]) for _ in range(num_tokens)] + [-1] * padding
        tables = torch.randint(0, 100, (len(starts) - 1, num_groups, 8), dtype=torch.int32, device=DEVICE)
        given = tables, ints(positions + [0] * padding), ints(slots), ints(starts), size
        found = group_slots(*given)
        assert torch.equal(found, group_slots_reference(*given)) and found.dtype == torch.int32
        assert (found[:, ints(slots) < 0] == -1).all()


def test_goldens_with_groups_are_those_that_are_tested_here():
    mixed = [path.parent.name for path in GOLDEN.glob("*/config.json") if "vl" not in path.parent.name
             and len({*families.read_model_config(json.loads(path.read_text())).sliding_windows}) > 1]
    others = {"ministral", "qwen2-window", "cwm", "exaone4", "gpt-oss-mxfp4"}
    assert {*GROUPED} | others == {*mixed} - {*GEMMA4}
