"""Layers of several kinds in an engine: texts, memory, and what goes together. (test_kinds.py has the index, and
test_graphs.py recorded steps; tests of drafts, Triton and two ranks go over all goldens.)"""
import random
from functools import cache
from unittest.mock import patch

import pytest
import torch

from nanopaged import SamplingParams
from nanopaged.features.kinds import device
from nanopaged.features.kinds.device import Heads, group_layers, longest_text
from nanopaged.features.kinds.slots import group_slots, group_slots_reference
from nanopaged.tests.helpers import (
    GOLDEN,
    GREEDY,
    PROMPT,
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

GROUPED = ["gemma3", "gemma3-groups", "olmo3", "qwen2-groups", "smollm3-window"]
plain = patch.object(device, "choose", lambda *_: None)  # all layers keep all blocks


@pytest.mark.parametrize("variant", GROUPED)
@pytest.mark.parametrize("lookahead", [0, 1])
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
    dict(lookahead=1), dict(num_blocks=14), dict(num_blocks=16, lookahead=1), dict(enable_prefix_caching=False),
    dict(enforce_eager=True), dict(count=2), dict(speculative_config={"num_speculative_tokens": 4}),
    dict(max_num_batched_tokens=9), dict(tensor_parallel_size=2, num_blocks=14)], ids=str)
def test_mixed_requests_get_the_texts_of_a_plain_pool(options):
    """Samples, beams, penalties, log probabilities of both kinds, drafts; two pools, two ranks."""
    for variant in ("gemma3-groups", "qwen2-groups"):
        llm = pools(**dict(count=1, model=variant) | options)
        found, num_preempted = texts(llm)
        assert llm.config.groups and found == from_a_plain_pool(variant)
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
        depth = longest_text(num_blocks, 4, windows, most_tokens) // 4
        assert needed(depth) <= num_blocks < needed(depth + 1)


def test_more_texts_run_at_once():
    """12 texts in the memory of 40 blocks of every layer."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[i] * 60 for i in range(12)]

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
    assert grouped[0] < num_steps / 2 and grouped[1] <= num_preempted, (grouped, num_steps, num_preempted)


# ---- Slots

@needs_kernel
def test_slots_of_all_groups_in_one_launch():
    rng = random.Random(0)

    def ints(numbers):
        return torch.tensor(numbers, dtype=torch.int32)

    for _ in range(30):
        num_seqs, num_groups, size = rng.randint(1, 6), rng.randint(1, 4), rng.choice([1, 3, 4, 16])
        lens = [rng.randint(1, 5) for _ in range(num_seqs)]
        num_tokens, padding = sum(lens), rng.randint(0, 3)
        starts = [sum(lens[:i]) for i in range(num_seqs + 1)] + [num_tokens] * rng.randint(0, 3)
        positions = [first + i for length in lens for first in [rng.randint(0, 3)] for i in range(length)]
        slots = [rng.choice([-1, 5]) for _ in range(num_tokens)] + [-1] * padding
        tables = torch.randint(0, 100, (len(starts) - 1, num_groups * 8), dtype=torch.int32).view(-1, num_groups, 8)
        given = tables, ints(positions + [0] * padding), ints(slots), ints(starts), size
        found = group_slots(*given)
        assert torch.equal(found, group_slots_reference(*given)) and found.dtype == torch.int32
        assert (found[:, ints(slots) < 0] == -1).all()


def test_goldens_with_groups_are_those_that_are_tested_here():
    grouped = [path.parent.name for path in GOLDEN.glob("*/config.json")
               if load(path.parent.name, device="cpu", num_blocks=64).config.groups]
    assert {*GROUPED, "ministral", "qwen2-window"} == {*grouped} and PROMPT
