"""Granite 4 H in an engine, also with experts: the texts of transformers, and chunks."""
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from nanopaged import SamplingParams
from nanopaged.features import graphs
from nanopaged.features.kinds.chunks import scan
from nanopaged.features.kinds.recurrent import make_rounds
from nanopaged.features.mamba import chunk, step
from nanopaged.tests.helpers import GOLDEN, assert_golden, expectations, load, prompt_logits, tokens_of
from nanopaged.tests.test_graphs import SHORTAGES, record_graphs
from nanopaged.weights.checkpoint import read_safetensors

GRANITE = ["granite4-h", "granite4-h-moe"]


SMALL = dict(num_blocks=30, block_size=4, max_num_batched_tokens=7)
SNAPSHOTS = dict(num_blocks=24, block_size=4, snapshot_memory=0.9)


@pytest.mark.parametrize("variant, options", [
    *(("granite4-h", dict(lookahead=lookahead) | options) for options in (SMALL, SNAPSHOTS) for lookahead in (0, 1)),
    ("granite4-h", dict(lookahead=1, enable_prefix_caching=False)),
    ("granite4-h", dict(lookahead=0, enforce_eager=True, max_num_seqs=3)),
    ("granite4-h-moe", dict(lookahead=1) | SMALL)], ids=str)  # whose layers with states are the same
def test_texts_of_transformers(variant, options):
    llm = load(variant, device="cpu", **options)
    assert_golden(llm, variant, times=2)
    assert_golden(llm, variant)
    llm.scheduler.block_manager.check_idle()


@pytest.mark.parametrize("variant", GRANITE)
def test_logits_of_transformers(variant):
    prompts, _, logits = expectations(variant)
    found = prompt_logits(load(variant, device="cpu"), prompts[2].tolist())
    torch.testing.assert_close(found, logits[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant, options", [
    *(("granite4-h", options) for options in SHORTAGES[:3]), ("granite4-h-moe", {})], ids=str)
def test_recorded_steps(monkeypatch, variant, options):
    """Decode steps are. Chunks are launched kernel by kernel."""
    monkeypatch.setattr(graphs, "DECODE_SIZES", [1, 2])
    llm = load(variant, graphs=True, **dict(max_num_seqs=8, max_num_batched_tokens=40) | options)
    replayed = record_graphs(llm, monkeypatch)
    assert_golden(llm, variant, times=2)
    assert replayed and not any(shape.num_tiles for shape in replayed)


def long_texts():
    """Prompts of 90 and 200 tokens, and what transformers continues them with (make_models.py --reference)."""
    expected = dict(read_safetensors(GOLDEN / "granite4-h" / "long.safetensors"))
    return [[expected[f"{kind}.{i}"].tolist() for i in range(2)] for kind in ("prompt", "continuation")]


@pytest.mark.parametrize("options, lookahead", [
    ({}, 0), (dict(max_num_batched_tokens=100), 1), (dict(max_num_batched_tokens=50), 0), (dict(block_size=48), 1),
    *((dict(num_blocks=20, max_num_batched_tokens=150, snapshot_memory=0.8), lookahead) for lookahead in (0, 1))],
    ids=str)
def test_texts_longer_than_a_chunk(options, lookahead):
    """Whole, in steps, from snapshots in the middle and after preemptions."""
    prompts, continuations = long_texts()
    llm = load("granite4-h", device="cpu", lookahead=lookahead, **dict(snapshot_memory=0.5) | options)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    assert tokens_of(llm.generate(prompts * 2, params)) == continuations * 2
    again = llm.generate(prompts, params)
    assert tokens_of(again) == continuations
    if "num_blocks" not in options and options.get("max_num_batched_tokens") != 50:
        assert [output.num_cached_tokens for output in again] == [0 if "block_size" in options else 64, 192]
    llm.scheduler.block_manager.check_idle()
    assert bool(llm.counts.num_preemptions) == ("num_blocks" in options)


def test_a_prompt_has_the_same_bits_however_it_is_cut():
    """At multiples of the chunk, and with another sequence beside it. (Matrix products of other sizes have other bits
    on a CPU, so this is about the recurrence alone.)"""
    generator = torch.Generator().manual_seed(0)
    u, b, c, dt = (torch.randn(200, *shape, generator=generator) for shape in ((3, 4), (3, 5), (3, 5), (3,)))
    states = torch.zeros(5, 3, 4, 5)

    def run(start, end, source, target, mark=None):
        ints = partial(torch.tensor, dtype=torch.int32)
        rounds = [(ints(places), ints(tokens).view(-1, 64), ints(done))
                  for places, tokens, done in make_rounds([end - start], [end], 64)]
        slots = SimpleNamespace(first=ints([0]), lens=ints([end - start]), sources=ints([source]), rounds=rounds,
                                targets=ints([target, mark or 0]), counts=ints([[end - start, 128 * bool(mark)]]),
                                most=1, query_lens=None)
        u1, b1, c1, dt1 = (one[start:end] for one in (u, b, c, dt.abs()))
        return scan(step, chunk, (u1, b1, c1), (dt1, -dt1), states, slots)

    whole = run(0, 200, 1, 2, mark=4)
    assert torch.equal(whole, torch.cat([run(0, 128, 1, 3), run(128, 192, 3, 3), run(192, 200, 3, 3)]))
    assert torch.equal(states[2], states[3]) and not states[1].any()
    assert torch.equal(run(128, 200, 4, 3), whole[128:]) and torch.equal(states[2], states[3])


def test_rounds_end_at_multiples():
    assert make_rounds([1, 7], [5, 9], 4) == [([1], [1, 2, -1, -1], [2]), ([1], [3, 4, 5, 6], [6]), (
        [1], [7, -1, -1, -1], [7])]
    rng = random.Random(0)
    for _ in range(50):
        lens = [rng.randint(1, 30) for _ in range(rng.randint(1, 5))]
        seq_lens = [count + rng.randint(0, 20) for count in lens]
        seen, starts = [], [sum(lens[:i]) for i in range(len(lens))]
        for places, tokens, done in make_rounds(lens, seq_lens, 8):
            assert len({*places}) == len(places) and len(tokens) == 8 * len(places)
            seen += [token for token in tokens if token >= 0]
            for place, end in zip(places, done):
                assert end == lens[place] or (seq_lens[place] - lens[place] + end) % 8 == 0
        assert sorted(seen) == [start + i for start, count in zip(starts, lens) for i in range(count) if count > 1]


def test_a_chunk_is_its_steps():
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    n, length, heads, head_dim, size = 2, 9, 3, 4, 5
    u, b, c, h = noise(n, length, heads, head_dim), noise(n, length, heads, size), noise(n, length, heads, size), noise(
        n, heads, head_dim, size)
    dt = noise(n, length, heads).abs()
    a = -dt * 2
    dt[1, 7:] = a[1, 7:] = 0  # no tokens
    y, last = chunk(u, b, c, dt, a, h)
    for i in range(length):
        h = a[:, i].exp()[..., None, None] * h + (dt[:, i, :, None] * u[:, i])[..., None] * b[:, i, :, None]
        torch.testing.assert_close(y[:, i], torch.einsum("nhps,nhs->nhp", h, c[:, i]))
    torch.testing.assert_close(last, h)
