"""Gated delta nets in Triton compute what the recurrence says, token by token."""
import random
from functools import partial
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from nanopaged import model, optional_triton
from nanopaged.device.runner import StepTensors
from nanopaged.features import delta_kernels, graphs
from nanopaged.features.kinds import recurrent
from nanopaged.features.kinds.recurrent import (
    MOST_FEW,
    NOBODYS,
    ZERO,
    Work,
    make_work,
    pad_lists,
    state_slots,
    work_layout,
)
from nanopaged.options import feature
from nanopaged.tests.helpers import (
    CUDA,
    DEVICE,
    GOLDEN,
    GREEDY,
    assert_golden,
    load,
    needs,
    needs_gpu,
    needs_kernel,
    relative_error,
    tokens_of,
)
from nanopaged.tests.test_graphs import record_graphs
from nanopaged.tiles import make_query_tiles
from nanopaged.weights.checkpoint import read_safetensors

CHUNK, TAPS = 64, 4
SIZES = dict(k_heads=1, v_heads=2, k_dim=64, v_dim=64)
QWEN = dict(k_heads=16, v_heads=32, k_dim=128, v_dim=128)
# The interpreter lies about bfloat16. On a GPU float32 is multiplied in three products of tf32 numbers.
ON_THE_DEVICE = [(torch.bfloat16, QWEN), (torch.float16, SIZES | dict(k_dim=16)), (torch.float32, SIZES)]
TYPES = ON_THE_DEVICE if CUDA else [(torch.float32, SIZES), (torch.float16, SIZES)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 1.5e-2}


class Layer:
    """Random weights, and states of which only those of slot 1 are no NaN."""

    def __init__(self, dtype, sizes, num_slots=10, similar_keys=False):
        self.dtype, self.similar_keys = dtype, similar_keys
        self.generator, v_heads, v_dim = torch.Generator().manual_seed(0), sizes["v_heads"], sizes["v_dim"]
        self.channels = 2 * sizes["k_heads"] * sizes["k_dim"] + v_heads * v_dim
        rand = partial(torch.rand, generator=self.generator)
        self.w = SimpleNamespace(**sizes, taps=TAPS, eps=1e-6, **{name: part.to(DEVICE, dtype) for name, part in dict(
            conv=self.noise(self.channels, TAPS) / 2, A_log=(8 * rand(v_heads) + 0.02).log(),
            dt_bias=6 * rand(v_heads) - 5, norm=rand(v_dim) + 0.5).items()})
        shapes = (TAPS, self.channels), (v_heads, sizes["k_dim"], v_dim)
        self.states = [torch.full((num_slots, *shape), torch.nan, device=DEVICE) for shape in shapes]
        for states in self.states:
            states[ZERO] = 0

    def noise(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def tokens(self, count):
        """qkv, z, b and a as columns of one product."""
        sizes = self.channels, self.w.v_heads * self.w.v_dim, self.w.v_heads, self.w.v_heads
        x = self.noise(count, sum(sizes))
        if self.similar_keys:
            x[:, :self.channels] = x[:1, :self.channels] + 0.05 * x[:, :self.channels]
            x[:, -2 * self.w.v_heads:-self.w.v_heads] += 4  # beta near 1
        return x.to(DEVICE, self.dtype), sizes

    def run(self, tokens, *batch, room=(0, 0)):
        """batch: (tokens, tokens before, source, live slot, {tokens seen: slot} of marks) of each sequence. room: more
        tokens and sequences of a recorded step"""
        (x, sizes), width = tokens, 1 + max(len(one[4]) for one in batch)
        batch = [*batch, *[(0, 0, ZERO, NOBODYS, {})] * room[1]]
        lens, ends = [one[0] for one in batch], [one[0] + one[1] for one in batch]
        rows = [[source, live] for _, _, source, live, _ in batch]  # as StatesRows.empty
        for row, (_, before, *_, marks) in zip(rows, batch):
            row += [number for seen, slot in marks.items() for number in (before + seen, slot)]
            row += [0, NOBODYS] * (width - len(row) // 2)
        ints, num_tokens = partial(torch.tensor, dtype=torch.int32, device=DEVICE), sum(lens) + room[0]
        work = make_work(lens, ends, CHUNK)
        layout = work_layout(num_tokens, max(len(lens), len(work[0])), CHUNK)
        lists = pad_lists(work, layout).to(DEVICE).split(layout) if max(lens) > 1 else ()
        slots = state_slots(ints([0, *accumulate(lens)]), ints(ends), ints(rows),
                            work=Work(len(lens) if room[1] else lens.count(1), *lists))
        qkv, z, b, a = F.pad(x, (0, 0, 0, room[0]), value=torch.nan).split(sizes, dim=1)
        z = z.unflatten(1, (self.w.v_heads, -1))
        out = delta_kernels.gated_delta(qkv, z, b, a, self.w, self.states, slots)
        torch.ones(1, device=DEVICE).add_(1)  # stands between two steps, as a projection does
        assert out.dtype is z.dtype and out.shape == z.shape
        return out[:sum(lens)]

    def expect(self, tokens, source, before, ends):
        """In float64, token by token, of one sequence: its outputs, and {tokens: (ring, state)} after these."""
        w = SimpleNamespace(**{name: part.double().cpu() if isinstance(part, torch.Tensor) else part
                               for name, part in vars(self.w).items()})
        x, sizes = tokens
        qkv, z, b, a = x.double().cpu().split(sizes, dim=1)
        ring, state = (one[source].double().cpu().clone() for one in self.states)
        outs, found = [], {}
        for t, position in enumerate(range(before, before + len(x))):
            ring[position % TAPS] = qkv[t]
            inputs = torch.stack([ring[p % TAPS] if p >= 0 else torch.zeros_like(qkv[t])
                                  for p in range(position - TAPS + 1, position + 1)])
            mixed = F.silu(torch.einsum("tc,ct->c", inputs, w.conv))
            q, k, v = mixed.split([w.k_heads * w.k_dim] * 2 + [w.v_heads * w.v_dim])
            q, k = (one.view(w.k_heads, -1) * (one.view(w.k_heads, -1).square().sum(1, keepdim=True) + 1e-6).rsqrt()
                    for one in (q, k))
            q, k = (one.repeat_interleave(w.v_heads // w.k_heads, 0) for one in (q * w.k_dim ** -0.5, k))
            g = -w.A_log.exp() * F.softplus(a[t] + w.dt_bias)
            state = g.exp()[:, None, None] * state if position else torch.zeros_like(state)
            error = b[t].sigmoid()[:, None] * (v.view(w.v_heads, -1) - torch.einsum("hk,hkv->hv", k, state))
            state = state + k[:, :, None] * error[:, None]
            o = torch.einsum("hk,hkv->hv", q, state)
            o = o * (o.square().mean(1, keepdim=True) + w.eps).rsqrt() * w.norm
            outs.append(o * F.silu(z[t]).view(w.v_heads, -1))
            if t + 1 in ends:
                found[t + 1] = ring.clone(), state
        return torch.stack(outs), found

    def check(self, *batch, room=(0, 0), roundings=1):
        """`run`, and that all is as expected."""
        tokens = self.tokens(sum(one[0] for one in batch))
        ends = [{one[0]: one[3]} | one[4] for one in batch]
        parts = tokens[0].split([one[0] for one in batch])
        expected = [self.expect((x, tokens[1]), source, before, end)
                    for x, (_, before, source, *_), end in zip(parts, batch, ends)]
        old = [states.clone() for states in self.states]
        out = self.run(tokens, *batch, room=room)
        tolerance = roundings * TOLERANCE[self.dtype]
        for part, (exact, found), end, (lens, before, *_) in zip(
                out.split([one[0] for one in batch]), expected, ends, batch):
            assert relative_error(part.cpu(), exact) < tolerance
            for seen, slot in end.items():
                ring, state = found[seen]
                assert relative_error(self.states[1][slot].cpu(), state) < tolerance
                kept = [p % TAPS for p in range(max(0, before + seen - TAPS + 1), before + seen)]
                assert torch.equal(self.states[0][slot, kept].cpu().double(), ring[kept])
        written = {slot for end in ends for slot in end.values()} | {NOBODYS}
        others = [slot for slot in range(len(self.states[0])) if slot not in written]
        for states, before in zip(self.states, old):
            assert torch.equal(states[others].nan_to_num(9), before[others].nan_to_num(9))


@needs_kernel
@pytest.mark.parametrize("dtype, sizes", TYPES if CUDA else TYPES[:1], ids=str)
def test_steps(dtype, sizes):
    """First tokens, prompts, chunks from the middle of a chunk and of fewer tokens than taps; marks, sources other than
    the live slot, and what a recorded step has room for."""
    layer = Layer(dtype, sizes)
    for states in layer.states:
        states[5:7] = layer.noise(2, *states.shape[1:]) / 4
    layer.check((1, 0, ZERO, 2, {}), (66, 0, ZERO, 3, {64: 4}), room=(3, 2))
    layer.check((1, 66, 3, 3, {}), (1, 1, 2, 8, {}), (3, 62, 5, 5, {2: 7}), (2, 64, 4, 9, {}))
    layer.check((1, 2, 8, 8, {}), (1, 66, 9, 2, {}), (1, 3, 6, 6, {}), room=(1, 1))
    layer.check((3, 63, 6, 6, {1: 3}), (2, 64, 7, 7, {}))


@needs_kernel
@pytest.mark.parametrize("dtype, sizes", TYPES[:1] if CUDA else TYPES[1:], ids=str)
def test_keys_that_are_nearly_equal(dtype, sizes):
    """A power series of the triangular system would lose all digits."""
    Layer(dtype, sizes, similar_keys=True).check((1, 0, ZERO, 3, {}), (70, 0, ZERO, 2, {}), roundings=3)


@needs_kernel
@pytest.mark.parametrize("dtype, sizes", TYPES[:1], ids=str)
def test_a_prompt_has_the_same_bits_however_it_is_cut(dtype, sizes):
    """At multiples of CHUNK, alone and beside others, and from a mark."""
    layer = Layer(dtype, sizes)
    (x, columns), other = layer.tokens(67), layer.tokens(1)[0]
    whole = layer.run((x, columns), (67, 0, ZERO, 2, {64: 3}))

    def beside(start, end, *slots):
        both = torch.cat([other, x[start:end]]), columns
        return layer.run(both, (1, 0, ZERO, 4, {}), (end - start, start, *slots, {}))[1:]

    assert torch.equal(torch.cat([beside(0, 64, ZERO, 5), beside(64, 67, 5, 6)]), whole)
    rings, states = layer.states
    assert torch.equal(states[6], states[2]) and torch.equal(rings[6, :3], rings[2, :3])
    assert torch.equal(states[3], states[5]) and torch.equal(rings[3, 1:], rings[5, 1:])  # the mark's
    assert torch.equal(beside(64, 67, 3, 7), whole[64:])
    three = torch.cat([x[:1]] * 3), columns  # decode: of the same state, into a slot that has it and into another one
    together = layer.run(three, (1, 67, 2, 8, {}), (1, 67, 6, 6, {}), (1, 0, ZERO, 9, {}))
    assert torch.equal(together[0], together[1])
    assert torch.equal(states[8], states[6]) and torch.equal(rings[8, 1:], rings[6, 1:])


def test_work_lists():
    """Each chunk is there once, those of a sequence one after another, and longer sequences come first. A recorded step
    has room for them, or is not used."""
    assert make_work([1, 7], [5, 9], 4) == ([[1, 0], [1, 1], [1, 2]], [], [[1, 0]])
    assert make_work([1, 1], [5, 9], 4) == ([], [], [])
    rng = random.Random(0)
    for _ in range(300):
        lens = [rng.choice([1, rng.randint(1, 30), rng.randint(1, 300)]) for _ in range(rng.randint(1, 9))]
        seq_lens = [count + rng.randint(0, 20) for count in lens]
        chunks, many, few = make_work(lens, seq_lens, 8)
        tokens = [(place, position) for place, number in chunks for position in range(8 * number, 8 * number + 8)
                  if seq_lens[place] - lens[place] <= position < seq_lens[place]]
        assert tokens == [(place, seq_len - count + i) for place, (count, seq_len) in enumerate(zip(lens, seq_lens))
                          if count > 1 for i in range(count)]
        assert not (many and few) and len(few) <= MOST_FEW
        lists, sizes = many or few, [place for place, _ in chunks]
        assert sorted(place for place, _ in lists) == [place for place, count in enumerate(lens) if count > 1]
        assert [entry for _, entry in lists] == [sizes.index(place) for place, _ in lists]
        counts = [sizes.count(place) for place, _ in lists]
        assert counts == sorted(counts, reverse=True)


@needs_gpu
def test_long_prompts_in_both_forms():
    """Real sizes: the scan with few and with many sequences has the same bits."""
    layer = Layer(torch.bfloat16, QWEN)
    x, columns = layer.tokens(700)
    alone = layer.run((x, columns), (700, 0, ZERO, 2, {64: 3, 640: 4}))
    y = torch.cat([x, x, x[:600]])
    together = layer.run((y, columns), (700, 0, ZERO, 5, {}), (700, 0, ZERO, 6, {}), (600, 0, ZERO, 7, {}))
    assert torch.equal(together, torch.cat([alone, alone, alone[:600]]))
    rings, matrices = (states[[2, 5, 6]].nan_to_num(9) for states in layer.states)  # an entry of a ring is not written
    assert all(torch.equal(one[0], other) for one in (rings, matrices) for other in one)
    layer.check((1, 700, 2, 8, {}), (64, 640, 4, 9, {}))


class FromWorkLists:
    """Stands for the kernels: it checks the work lists, and computes in torch."""
    @staticmethod
    def gated_delta(qkv, z, b, a, w, states, slots):
        lens, before, work = slots.lens.tolist(), slots.num_computed.tolist(), slots.work
        ends, rounds = [n + m for n, m in zip(lens, before)], []
        assert 1 not in lens[work.num_decodes:]
        if work.chunks is not None:
            for given, part in zip(work[1:], make_work(lens, ends, CHUNK)):
                assert given.tolist() == part + [[-1, -1]] * (len(given) - len(part))
            rounds = [(torch.tensor(places), torch.tensor(tokens).view(-1, CHUNK), torch.tensor(done))
                      for places, tokens, done in recurrent.make_rounds(lens, ends, CHUNK)]
        assert work.chunks is not None or max(lens) <= 1
        slots = recurrent.with_inputs(slots._replace(rounds=rounds), len(qkv), TAPS)
        if work.chunks is not None and not rounds:  # a step of padding, or of single tokens
            slots = slots._replace(rounds=[(torch.tensor([0]), torch.full((1, CHUNK), -1), torch.tensor([-1]))])
        return feature("delta", "the test").gated_delta(qkv, z, b, a, w, states, slots)


@needs("delta", "qwen3_5", "graphs", "fused")
@pytest.mark.parametrize("options", [{}, dict(num_blocks=40, block_size=16, max_num_seqs=3)], ids=str)
def test_recorded_steps_with_prompts(monkeypatch, options):
    """Steps with prompts stay recorded, and their work lists are those of their sequences. A step of more chunks than
    the recorded one has room for is launched kernel by kernel. On a GPU these are the kernels themselves."""
    monkeypatch.setattr(graphs, "TOKEN_SIZES", [16, 64, 256])
    monkeypatch.setattr(graphs, "DECODE_SIZES", [1, 2])
    expected = dict(read_safetensors(GOLDEN / "qwen3.5" / "long.safetensors"))
    prompts, continuations = ([expected[f"{kind}.{i}"].tolist() for i in range(2)] for kind in (
        "prompt", "continuation"))
    llm = load("qwen3.5", graphs=True, **dict(max_num_batched_tokens=300, snapshot_memory=0.5) | options)
    llm.runner.state_kernels = delta_kernels if CUDA else FromWorkLists
    replayed = record_graphs(llm, monkeypatch)
    assert tokens_of(llm.generate(prompts * 3, GREEDY)) == continuations * 3
    assert_golden(llm, "qwen3.5", times=2)
    assert {shape.num_tiles > 0 for shape in replayed} == {True, False}

    def lists(lens, ends):
        """Those that a step has which is launched kernel by kernel."""
        r, num_tokens, num_seqs = llm.runner, sum(lens), len(lens)
        sizes = [num_tokens] * 3 + [num_seqs + 1] + [num_seqs] * 2
        sent = StepTensors.of([torch.zeros(size, dtype=torch.int32, device=DEVICE) for size in sizes])
        tiles = r.make_query_tiles(lens, ends, num_tokens, num_seqs).to(DEVICE)
        batch = r.make_batch(sent, None, None, model.AttentionMetadata(max(lens), max(ends), lens.count(1), tiles))
        found = [[entry for entry in part.tolist() if entry != [-1, -1]]
                 for part in (batch.metadata.query_tiles, *batch.states.work[1:])]
        attention = make_query_tiles(lens, ends, r.tokens_per_tile).tolist()
        assert found == [attention, *make_work(lens, ends, CHUNK)]

    lists([1, 3, 200], [5, 66, 203])
    assert llm.runner.graph_shape([3] * 3, [3] * 3)
    monkeypatch.setattr(recurrent, "MOST_CHUNKED", 2)
    assert llm.runner.graph_shape([3] * 2, [3] * 2) and not llm.runner.graph_shape([3] * 3, [3] * 3)
    lists([3] * 3, [66] * 3)
    if optional_triton.triton and (CUDA or optional_triton.INTERPRETED):  # as warmup.py runs them
        assert len([task() for task in delta_kernels.kernel_forms(llm.runner)]) == 6
