"""What several sequences have in common is read once: the batch's order and entries, the kernel, and engines."""
import json
import random
import warnings
from functools import partial

import pytest
import torch

import kernel
from engine import BlockManager, Order, Sampled, Scheduler, Sequence, Status
from nanopaged import SamplingParams, tiles
from nanopaged.device.pool import FP8
from nanopaged.features import cascade
from nanopaged.features.cascade import Cascade, CascadeRunner
from nanopaged.tests.helpers import (
    ALL_VARIANTS,
    CUDA,
    GEMMA4,
    GOLDEN,
    GREEDY,
    PROMPT,
    load,
    needs,
    needs_gpu,
    needs_kernel,
    tokens_of,
)
from nanopaged.weights.families import read_model_config

# --------------------------------------------------------------------------------------------------
# Which sequences have blocks in common
# --------------------------------------------------------------------------------------------------


def decoding(table, seq_len, num_drafts=0):
    seq = Sequence([0] * seq_len, Order(0, 0, 0), 10**6)
    seq.block_table, seq.num_computed_tokens = list(table), seq_len
    return seq, 1 + num_drafts


def found(finder, batch):
    """Entries as [first place, places, first token, end], after a check against the tables: the places of an entry have
    the same blocks in its tiles, their splits have one length, and each place's common tokens are those of its entries,
    from token 0 on. A place's entries meet at the ends of splits."""
    order, numbers, num_common, columns = finder.find(batch)
    assert sorted(map(id, (seq for seq, _ in order))) == sorted(map(id, (seq for seq, _ in batch)))
    rows = [(seq, seq.num_computed_tokens - count + 1 + i) for seq, count in order for i in range(count)]
    entries = [numbers[i:i + 4] for i in range(0, len(numbers), 4)]
    assert len(entries) <= finder.rooms[-1] and bool(entries) == bool(num_common)
    covered = [0] * len(rows)
    for first, count, start, end in sorted(entries, key=lambda entry: entry[2]):
        members = rows[first:first + count]
        assert 1 <= len(members) == count <= finder.most_places and start < end
        [length] = {tiles.split_length(seq_len, finder.tile_n) for _, seq_len in members}
        assert start % length == end % finder.tile_n == 0
        assert end <= min(seq_len for _, seq_len in members) and count * finder.group <= columns
        assert len({tuple(seq.block_table[:-(-end // finder.block_size)]) for seq, _ in members}) == 1
        for row in range(first, first + count):
            assert covered[row] == start
            covered[row] = end
    assert not entries or covered == num_common
    assert bool(columns) == bool(entries) and columns <= max(16, finder.most_places * finder.group)
    return entries, [seq for seq, _ in order]


def test_the_drawing():
    """A and B have five tiles in common, C, D and E four, D and E four more."""
    tables = [[*range(5), 20, 21, 22], [*range(5), 30, 31, 32], [5, 6, 7, 8, 40, 41, 42, 43],
              [*range(5, 13), 50], [*range(5, 13), 51]]
    batch = [decoding(table, 64 * len(table)) for table in tables]
    entries, order = found(Cascade(64, 64, 2, least_tokens=1), batch)
    assert sorted(entries) == [[0, 2, 0, 320], [2, 3, 0, 256], [3, 2, 256, 512]] and order == [seq for seq, _ in batch]
    for (first, count, start, end), name in zip(sorted(entries), "ACD"):
        assert f"{first} ({name}){'':12}{count}          {start:<13} {end}" in cascade.__doc__


def test_entries_of_a_sequence_meet_at_the_end_of_a_split():
    """All have five tiles in common, the last two ten: their second entry begins in front of the fifth tile."""
    tables = [[*range(5), 20], [*range(5), 30], [*range(10), 40], [*range(10), 50]]
    batch = [decoding(table, 64 * len(table)) for table in tables]
    entries, _ = found(Cascade(64, 64, 2, least_tokens=1), batch)
    assert sorted(entries) == [[0, 4, 0, 256], [2, 2, 256, 640]]


def test_what_is_not_worth_an_entry_is_not_shared():
    batch = [decoding([*range(8), 20 + i], 600) for i in range(3)]  # 512 common tokens, of which two rows save 1,024
    assert found(Cascade(64, 64, 2, least_tokens=1024), batch)[0] == [[0, 3, 0, 512]]
    assert not found(Cascade(64, 64, 2, least_tokens=1025), batch)[0]
    assert not found(Cascade(64, 64, 2), batch)[0]


def test_rows_of_drafts_share_their_context():
    seq, rows = decoding(range(20), 1200, num_drafts=3)
    assert found(Cascade(64, 64, 2, least_tokens=1), [(seq, rows)])[0] == [[0, 4, 0, 1152]]  # 18 x 64 of 1,197 tokens
    assert found(Cascade(64, 64, 8, 16, least_tokens=1), [(seq, rows)])[0] == [[0, 2, 0, 1152], [2, 2, 0, 1152]]
    seq, rows = decoding(range(40), 2050, num_drafts=3)  # rows 2,047 and 2,048 have splits of 128, the others of 192
    assert not found(Cascade(64, 64, 2, least_tokens=1), [(seq, rows)])[0]
    (seq, rows), finder = decoding(range(300), 9000, num_drafts=3), Cascade(64, 64, 2)
    for seq.num_computed_tokens in range(9000, 9500):
        [[*_, end]] = found(finder, [(seq, rows)])[0]
        assert end > seq.num_computed_tokens - rows - 2 * 64


@pytest.mark.parametrize("block_size", [1, 16, 48, 64, 256])
def test_random_batches(block_size):
    """Sequences join, leave, grow and come back with another table; beginnings come from a tree of texts."""
    rng = random.Random(block_size)
    finder = Cascade(block_size, 64, 3, 16, least_tokens=1)
    blocks = iter(range(10**9))
    tree = [[]]
    for _ in range(12):
        parent = rng.choice(tree)
        tree.append(parent + [next(blocks) for _ in range(-(-rng.choice([64, 200, 1000]) // block_size))])

    def begin(seq):
        shared = rng.choice(tree)
        seq.num_computed_tokens = len(shared) * block_size + rng.randint(1, 400)
        seq.block_table = shared + [next(blocks) for _ in range(-(-400 // block_size) + 1)]

    batch, away, num_entries = [], [], 0
    for _ in range(60):
        for seq, _ in batch:
            seq.num_computed_tokens += 1
        for seq, _ in away:
            begin(seq)
        batch += away
        away = [pair for pair in batch if rng.random() < 0.02
                or pair[0].num_computed_tokens >= len(pair[0].block_table) * block_size]
        batch = [pair for pair in batch if pair not in away]
        if rng.random() < 0.5:
            batch = [pair for pair in batch if rng.random() < 0.9]
            for _ in range(rng.randint(0, 4)):
                seq, count = decoding([], 1, rng.choice([0, 0, 0, 2]))
                begin(seq)
                seq.num_computed_tokens += count
                batch.append((seq, count))
        num_entries += len(found(finder, list(batch))[0]) if batch else 0
    assert num_entries > 20


@pytest.mark.parametrize("num_blocks", [90, 400])
def test_steps_of_a_scheduler(num_blocks):
    """Prompts cut from three texts come, end, are aborted, and lose their blocks when the pool runs dry or a step
    fails."""
    rng, manager = random.Random(num_blocks), BlockManager(num_blocks, 16)
    plan, finder = Scheduler(manager, 12, 256), Cascade(16, 64, 3, 16, least_tokens=1)
    texts, alive, num_entries, preempted = [[rng.randrange(9) for _ in range(700)] for _ in range(3)], [], 0, 0
    for arrival in range(400):
        if rng.random() < 0.3:
            prompt = rng.choice(texts)[:rng.randint(100, 700)]
            alive.append(Sequence(list(prompt), Order(0, arrival, 0), len(prompt) + rng.randint(1, 60)))
            plan.add(alive[-1])
        if alive and rng.random() < 0.03:
            plan.finish(rng.choice(alive), "abort")
        step = plan.schedule()
        if decodes := [(seq, 1) for seq, num_tokens in zip(step.seqs, step.num_tokens) if num_tokens == 1]:
            num_entries += len(found(finder, decodes)[0])
        preempted += len(step.preempted)
        if rng.random() < 0.03:
            plan.undo(step)
            continue
        plan.update(step, Sampled([rng.randrange(9) for _ in step.sampled]))
        alive = [seq for seq in alive if seq.status is not Status.FINISHED]
    assert num_entries > 100 and bool(preempted) == (num_blocks < 100)


@pytest.mark.parametrize("is_searched", [False, True])
def test_what_was_found_ends_with_a_step_that_fails(is_searched):
    """A does not read the prefix cache, so it starts over at token 0. The batch is the same as before: one token of B
    and one of A."""
    plan, finder = Scheduler(BlockManager(200, 1), 2, 2), Cascade(1, 64, 2, least_tokens=1)
    a, b = Sequence([*range(66)], Order(1, 0, 0), 100), Sequence([*range(67)], Order(0, 1, 0), 100)
    a.finds_prefix = False

    def next_step():
        step = plan.schedule()
        return step, list(zip(step.seqs, step.num_tokens))

    for seq, num_steps in ((a, 34), (b, 2)):
        plan.add(seq)
        for _ in range(num_steps):
            step, batch = next_step()
            entries = finder.find(batch)[1]
            plan.update(step, Sampled([9] * len(step.sampled)))
    assert batch == [(b, 1), (a, 1)] and entries == [0, 2, 0, 64]
    step, batch = next_step()
    if is_searched:
        finder.find(batch)
    plan.undo(step)
    assert next_step()[1] == batch and a.num_computed_tokens == 1 and b.num_computed_tokens > 66
    assert found(finder, batch)[0] == []


def test_steps_in_which_nobody_joins_or_leaves_reuse_what_was_found():
    finder, batch = Cascade(64, 64, 2, least_tokens=1), [decoding([*range(8), 20 + i] * 9, 2040) for i in range(3)]
    first = finder.find(batch)[1]
    for seq_len in range(2041, 2049):
        for seq, _ in batch:
            seq.num_computed_tokens = seq_len
        assert finder.find(list(batch))[1] is first
    for seq, _ in batch:
        seq.num_computed_tokens = 2049  # splits of 192 from here on
    assert found(finder, batch)[0] == [[0, 3, 0, 512]]


# --------------------------------------------------------------------------------------------------
# The kernel
# --------------------------------------------------------------------------------------------------

def attend(rng, sizes, common, heads, block_size, dtype=torch.float32, device="cpu", nested=0):
    """Attention of groups of these sizes, each with `common` tokens in common, and half of each with `nested` more:
    (reference in float64, the kernel's function, its inputs, their cascade)."""
    (num_heads, num_kv_heads, head_dim), num_blocks = heads, 9000 // block_size * sum(sizes)
    tables, lens, numbers = [], [], iter(torch.randperm(num_blocks).tolist())
    for size in sizes:
        beginning = [next(numbers) for _ in range(common // block_size)]
        more = [next(numbers) for _ in range(nested // block_size)]
        for i in range(size):
            inner = more if i < size // 2 else []
            lens.append((len(beginning) + len(inner)) * block_size + rng.randint(1, 150 if device == "cuda" else 60))
            needed = -(-lens[-1] // block_size) - len(beginning) - len(inner)
            tables.append(beginning + inner + [next(numbers) for _ in range(needed)])
    seqs = [decoding(table, seq_len) for table, seq_len in zip(tables, lens)]
    order, entries, num_common, columns = Cascade(block_size, 64, num_heads // num_kv_heads, least_tokens=1).find(seqs)
    assert entries
    order = [seq for seq, _ in order]
    ints = dict(dtype=torch.int32, device=device)
    width = max(map(len, tables))
    block_tables = torch.tensor([(seq.block_table + [10**6] * width)[:width] for seq in order], **ints)
    seq_lens = torch.tensor([seq.num_computed_tokens for seq in order], **ints)
    starts = torch.arange(len(order) + 1, **ints)
    caches = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim, device=device).to(dtype)
    q = torch.randn(len(order), num_heads, head_dim, device=device).to(torch.bfloat16 if dtype is FP8 else dtype)
    shared = torch.tensor(entries + [0] * 8, **ints).view(-1, 4), torch.tensor(num_common, **ints), columns
    inputs = q, *caches, block_tables, seq_lens, starts, head_dim ** -0.5
    options = dict(max_query_len=1, max_seq_len=int(seq_lens.max()))
    exact = kernel.paged_attention_reference(*(x.double() if i < 3 else x for i, x in enumerate(inputs)), **options)
    attention = partial(cascade.attention, kernel.paged_attention, scale=head_dim ** -0.5, **options)
    return exact, attention, inputs[:-1], shared


@pytest.mark.parametrize("sizes, common, nested, heads, block_size", [
    ([2], 192, 0, (4, 2, 16), 16), ([3, 2], 576, 0, (2, 2, 24), 48), ([1, 4], 256, 128, (3, 1, 16), 64),
    ([9], 64, 0, (8, 1, 16), 16), ([5], 256, 0, (7, 1, 16), 256)])
def test_kernel_against_float64(sizes, common, nested, heads, block_size):
    torch.manual_seed(0)
    exact, attention, inputs, shared = attend(random.Random(0), sizes, common, heads, block_size, nested=nested,
                                              device="cuda" if CUDA else "cpu")
    torch.testing.assert_close(attention(*inputs, cascade=shared).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not CUDA, reason="the bits are those of tensor cores; test_kernel_against_float64 runs on a CPU")
@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (14, 2, 64), (9, 3, 64), (8, 1, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
def test_bits_do_not_depend_on_the_group(heads, dtype):
    """With an fp8 cache they do (see disable_cascade_attn), by a rounding."""
    torch.manual_seed(0)
    rng = random.Random(0)
    for sizes in ([2], [5, 3, 1], [40], [17, 1, 2]):
        for block_size, common, nested in ((16, 512, 256), (64, 1984, 0), (64, 128, 448), (16, 8000, 0)):
            exact, attention, inputs, shared = attend(rng, sizes, common, heads, block_size, dtype, device="cuda",
                                                      nested=nested)
            together = attention(*inputs, cascade=shared)
            torch.testing.assert_close(together.double(), exact, rtol=2e-2, atol=2e-2)
            q, k_cache, v_cache, block_tables, seq_lens, starts = inputs
            one = slice(i := rng.randrange(len(q)), i + 1)
            alone = attention(q[one], k_cache, v_cache, block_tables[one], seq_lens[one], starts[:2])
            if dtype is FP8:
                torch.testing.assert_close(together[one], alone, rtol=1e-2, atol=1e-3)
            else:
                assert torch.equal(together[one], alone) and torch.equal(together, attention(*inputs))


# --------------------------------------------------------------------------------------------------
# Engines
# --------------------------------------------------------------------------------------------------

@needs_kernel
@pytest.mark.parametrize("same_bits, values", [(True, [None, False]), (False, [False])])
def test_disable_cascade_attn(same_bits, values, monkeypatch):
    monkeypatch.setattr(cascade, "has_same_bits", lambda *_: same_bits)
    seen = [value for value in (None, False, True) if load(attention="triton", disable_cascade_attn=value)
            .runner.cascade]
    assert seen == values


@needs_gpu
@pytest.mark.skipif(CUDA and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8")
def test_an_fp8_cache_in_groups():
    """Its bits differ from those of a sequence alone, by one rounding of bfloat16 at most, so a group is asked for."""
    options = dict(dtype="bfloat16", kv_cache_dtype="fp8", graphs=True)
    assert load(**options).runner.cascade is None
    llm = load(**options, disable_cascade_attn=False)
    llm.runner.cascade.least_tokens = 1
    texts = tokens_of(llm.generate([[*range(3, 68), i] for i in range(4)], GREEDY))
    assert len(llm.runner.cascade.found[1]) == 4 and all(len(tokens) == 24 for tokens in texts)

@pytest.mark.parametrize("graphs, options", [
    (False, {}), (True, {}), (True, dict(num_blocks=30)), (False, dict(enable_prefix_caching=False)),
    (True, dict(speculative_config=dict(method="ngram", num_speculative_tokens=3)))], ids=str)
def test_texts_are_the_same_with_and_without(graphs, options, monkeypatch):
    """Common beginnings, samples, chunks beside them, drafts, and a pool that runs dry. On a CPU attention is torch's,
    which ignores the entries; the order of a batch, its message and its recorded steps are those of a GPU."""
    llm = load(graphs=graphs, dtype="bfloat16" if CUDA else "float32", max_num_batched_tokens=200, **options)
    replayed = []
    if graphs:
        from nanopaged.tests.test_graphs import record_graphs
        replayed = record_graphs(llm, monkeypatch)
    common = [(7 * i) % 500 + 3 for i in range(200)]
    prompts = [common + [i, 5, i] * 20 for i in range(5)] + [common[:140] + [9] * i for i in (1, 80)] + [PROMPT]
    drawn = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=6, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    params = [greedy] * 7 + [drawn]
    if not graphs and not CUDA:
        llm.runner.__class__ = CascadeRunner
    llm.runner.cascade, sizes, texts = Cascade(16, 64, 4, 16, least_tokens=1), set(), []
    find = llm.runner.cascade.find
    monkeypatch.setattr(llm.runner.cascade, "find", lambda batch: sizes.add(len((seen := find(batch))[1])) or seen)
    for llm.runner.cascade in (llm.runner.cascade, None):
        texts.append([tokens_of(llm.generate(prompts, params)), tokens_of(llm.generate([common], drawn))])
        assert llm.scheduler.block_manager.num_free_blocks == llm.scheduler.block_manager.num_blocks
    assert texts[0] == texts[1] and max(sizes) > 0 and bool(llm.counts.num_preemptions) == ("num_blocks" in options)
    assert not graphs or {bool(shape.num_entries) for shape in replayed} == {False, True}


@needs("graphs")
def test_every_recorded_step_has_room_for_a_cascade(monkeypatch):
    from nanopaged.tests.test_graphs import record_graphs
    llm = load(graphs=True, max_num_batched_tokens=256, dtype="bfloat16" if CUDA else "float32")
    if not CUDA:
        llm.runner.cascade = Cascade(16, 64, 4)
    record_graphs(llm, monkeypatch)
    shapes = [shape._replace(num_entries=llm.runner.cascade.rooms[-1]) for shape in llm.runner.graphs]
    assert max(sum(shape.layout) for shape in shapes) == len(llm.runner.graph_input)


WITHOUT = ["mistral", "phi3", *GEMMA4]  # windows in all layers, and heads of several sizes


def one_of_each_attention():
    """Golden checkpoints: the first with each shape of heads and each kind of layers that a cascade can meet."""
    found = {}
    for variant in sorted({*ALL_VARIANTS} - {*WITHOUT}):
        with warnings.catch_warnings(action="ignore"):
            c = read_model_config(json.loads((GOLDEN / variant / "config.json").read_text()))
        parts = {*c.sliding_windows} or {0}, c.groups, c.states, c.sinks, c.attention_scale
        found.setdefault(str([c.num_heads, c.num_kv_heads, c.head_dim, *parts]), variant)
    return [*found.values()]


@needs_kernel
@pytest.mark.parametrize("variant", one_of_each_attention())
def test_texts_of_the_golden_models(variant, monkeypatch):
    """Two samples have a tile of tokens in common: their texts are torch's on a CPU, and those without a cascade on a
    GPU (where torch adds in another order)."""
    texts, params = [], SamplingParams(temperature=1, seed=1, n=2, max_tokens=2, ignore_eos=True)
    find, seen = Cascade.find, []
    monkeypatch.setattr(Cascade, "find", lambda *args: seen.append((found := find(*args))[1]) or found)
    for attention, least in (("triton", 1), ("triton", 10**6) if CUDA else ("torch", None)):
        llm = load(variant, attention=attention, dtype="bfloat16" if CUDA else "float32")
        if not CUDA:  # in the interpreter most of the time would go into prompts and storing, which test_paged.py tests
            in_triton = llm.runner.kernels.attention
            llm.runner.kernels = llm.runner.kernels._replace(
                rotate_and_store=kernel.TORCH.rotate_and_store, attention=lambda *args, **options: (
                    in_triton if "cascade" in options else kernel.TORCH.attention)(*args, **options))
        if least:
            llm.runner.cascade.least_tokens = least
        texts.append(tokens_of(llm.generate([[*range(3, 68)]], params)))
        assert bool(getattr(llm.runner, "cascade", None)) == bool(least)
        assert not least or ([0, 2, 0, 64] in seen) == (least == 1)
        seen.clear()
    assert texts[0] == texts[1]


@needs_kernel
@pytest.mark.parametrize("variant", WITHOUT)
def test_models_without_a_cascade(variant):
    """(Tests of their families have their texts in Triton.)"""
    assert not load(variant, attention="triton", disable_cascade_attn=False).runner.cascade
