"""The prefill kernel that only Hopper runs (kernel.py's last part). Most of these tests need an H100 or H200.

On a CPU test_paged.py compiles the kernel; here the rule is tested, and what happens where the kernel does not compile.
"""
import json
import math

import pytest
import torch

import kernel
from nanopaged import LLM, tiles
from nanopaged.features import hopper
from nanopaged.tests.helpers import (
    CUDA,
    DEVICE,
    GOLDEN,
    GREEDY,
    needs,
    needs_kernel,
    prompt_logits,
    relative_error,
    tokens_of,
)

ON_HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0) and hopper.gl is not None
attention = hopper.with_prefill(kernel.TRITON).attention
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs an H100 or H200, and a Triton with Gluon")
BATCH = [5, 70, 200, 2, 1, 641, 64, 129, 3, 400], [5, 107, 1300, 2, 77, 641, 192, 192, 257, 464]  # query and seq_lens
ROWS_OF_PREFILL = torch.arange(sum(BATCH[0])) != sum(BATCH[0][:4])  # all but those of sequences with one new token
SHAPES = [(16, 8, 128), (8, 8, 128), (8, 2, 128), (16, 2, 128), (14, 2, 128), (32, 1, 128), (16, 8, 64), (8, 1, 64),
          (14, 2, 64), (16, 2, 256), (16, 8, 256), (8, 8, 256), (14, 2, 256), (12, 4, 256), (10, 2, 256), (24, 4, 256)]


def problem(query_lens, seq_lens, heads=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16, seed=0, heads_first=False):
    """Random paged K and V in shuffled blocks of 64. Slots that no sequence owns are NaN, and table entries behind a
    sequence's last block are 2^30."""
    generator = torch.Generator("cuda").manual_seed(seed)
    counts = [tiles.cdiv(n, 64) for n in seq_lens]
    inner = (kv_heads, 64) if heads_first else (64, kv_heads)
    pool = torch.randn(sum(counts) + 3, 2, *inner, head_dim, device="cuda", generator=generator).to(dtype)
    pool = (pool.transpose(2, 3) if heads_first else pool).transpose(0, 1)
    tables = torch.full((len(counts), max(counts)), 2**30, dtype=torch.int32, device="cuda")
    order = torch.randperm(sum(counts) + 3, device="cuda", generator=generator).int().split([*counts, 3])
    pool[:, order[-1].long()] = math.nan
    for table, blocks, n in zip(tables, order, seq_lens):
        table[:len(blocks)] = blocks
        if n % 64:
            pool[:, blocks[-1], n % 64:] = math.nan
    q = torch.randn(sum(query_lens), heads, head_dim, device="cuda", generator=generator).to(dtype)
    lens, starts = torch.tensor(seq_lens).int(), torch.tensor([0, *query_lens]).cumsum(0).int()
    return q, pool[0], pool[1], tables, lens.cuda(), starts.cuda()


def exact(q, k_cache, v_cache, tables, lens, starts, window=0, sinks=None):
    """Attention in float64, with products written out."""
    out = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
    for i, n in enumerate(lens.tolist()):
        k, v = (cache[tables[i, :tiles.cdiv(n, 64)].long()].flatten(0, 1)[:n].double()
                .repeat_interleave(q.shape[1] // cache.shape[2], 1) for cache in (k_cache, v_cache))
        rows, key = slice(int(starts[i]), int(starts[i + 1])), torch.arange(n, device="cuda")
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k) * q.shape[2] ** -0.5
        query = key[n - scores.shape[1]:, None]
        hidden = (key > query) | (key <= query - (window or n))
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :n], v)
    return out


def prefill(args, window=0, query_tiles=None, sinks=None):
    """The rows of prompts; the others keep a 7."""
    q, lens, starts = args[0], args[4], args[5]
    return attention(*args, q.shape[2] ** -0.5, max_query_len=int(starts.diff().max()), num_decodes=0,
                                  max_seq_len=int(lens.max()), sliding_window=window, query_tiles=query_tiles,
                                  sinks=sinks, out=torch.full_like(q, 7.0))


def rule(args):
    return hopper.on_hopper(args[0].shape[1] // args[1].shape[2], args[0].shape[2], 64, args[0].dtype, args[1].dtype,
                            args[0].device)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
def test_against_float64(heads, kv_heads, head_dim, dtype):
    """Ragged prompts and chunks after a cached beginning, on poisoned slots and table entries. A repetition gives the
    same bits. Rows of sequences with one new token are not written."""
    args = problem(*BATCH, heads, kv_heads, head_dim, dtype)
    assert rule(args)
    out, expected = prefill(args), exact(*args)
    limit = 4e-3 if dtype is torch.bfloat16 else 5e-4
    assert relative_error(out[ROWS_OF_PREFILL], expected[ROWS_OF_PREFILL]) < limit
    assert (out[~ROWS_OF_PREFILL] == 7).all()
    assert all(torch.equal(prefill(args), out) for _ in range(20))


@needs_hopper
@pytest.mark.parametrize("window", [1, 5, 63, 64, 100, 128, 300, 1000])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(16, 8, 128), (8, 8, 64), (16, 8, 256), (8, 1, 256),
                                                       (12, 4, 256)])
def test_windows(heads, kv_heads, head_dim, window):
    """Blocks that have left the window of all new tokens hold NaN."""
    args = problem(*BATCH, heads, kv_heads, head_dim)
    expected = exact(*args, window)[ROWS_OF_PREFILL]
    for table, query_len, seq_len in zip(args[3], *BATCH):
        left = max(0, seq_len - query_len - window + 1) // 64
        for cache in args[1:3]:
            cache[table[:left].long()] = math.nan
        table[:left // 2] = -1  # as an engine's tables have it
    assert relative_error(prefill(args, window)[ROWS_OF_PREFILL], expected) < 4e-3


@needs_hopper
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(16, 2, 64), (14, 2, 64), (16, 8, 128), (16, 2, 256)])
def test_sinks(heads, kv_heads, head_dim, window):
    args, sinks = problem(*BATCH, heads, kv_heads, head_dim), torch.linspace(-3, 9, heads, device="cuda").bfloat16()
    out, expected = prefill(args, window, sinks=sinks), exact(*args, window, sinks)
    assert rule(args) and relative_error(out[ROWS_OF_PREFILL], expected[ROWS_OF_PREFILL]) < 4e-3


@needs_hopper
def test_heads_before_slots_and_a_large_pool():
    """A pool may have any memory order, and more than 2^31 elements."""
    args = problem([40, 130], [70, 300], heads_first=True)
    expected = exact(*args)
    assert rule(args) and relative_error(prefill(args), expected) < 4e-3
    num_blocks = 2**31 // args[1][0].numel() + 1000
    shift, large = num_blocks - len(args[1]), torch.empty(2, num_blocks, *args[1].shape[1:], dtype=args[1].dtype,
                                                          device="cuda")
    large[0, shift:], large[1, shift:] = args[1], args[2]
    assert relative_error(prefill((args[0], *large, args[3] + shift, *args[4:])), expected) < 4e-3


@needs_hopper
@pytest.mark.parametrize("heads, kv_heads, head_dim, window", [(16, 8, 128, 0), (8, 8, 128, 0), (14, 2, 64, 0),
                                                               (16, 8, 128, 100), (16, 2, 256, 0),
                                                               (16, 8, 256, 100)])
def test_bits_do_not_depend_on_the_batch(heads, kv_heads, head_dim, window):
    args = problem(*BATCH, heads, kv_heads, head_dim)
    q, k_cache, v_cache, tables, lens, starts = args
    together = prefill(args, window)
    for i, query_len in enumerate(BATCH[0]):
        rows = slice(starts[i], starts[i + 1])
        one = q[rows], k_cache, v_cache, tables[i:i + 1], lens[i:i + 1], starts[i:i + 2] - starts[i]
        assert torch.equal(together[rows], prefill(one, window))


@needs_hopper
def test_recorded_steps_and_padding():
    """A recorded launch reads its lengths and its work list when it is replayed. Room in the list is -1, and sequences
    that are padding have no tokens."""
    args = [*problem(*BATCH)]
    lens, starts = args[4].clone(), args[5].clone()
    per_tile = hopper.tokens_per_tile(2, 128, 64, torch.bfloat16, torch.bfloat16, args[0].device)
    lists = [kernel.make_query_tiles(BATCH[0], BATCH[1], per_tile), kernel.make_query_tiles(BATCH[0][:3], BATCH[1][:3],
                                                                                           per_tile)]
    work = torch.full((len(lists[0]) + 9, 2), -1, dtype=torch.int32, device="cuda")
    run = lambda: attention(*args, 128 ** -0.5, max_query_len=2, max_seq_len=2000, num_decodes=0,  # noqa: E731
                            query_tiles=work, out=out)
    out, graph = torch.empty_like(args[0]), torch.cuda.CUDAGraph()
    run()
    with torch.cuda.graph(graph):
        run()
    for count, entries in zip((len(lens), 3), lists):
        work.fill_(-1)
        work[:len(entries)] = entries.cuda()
        args[4].copy_(lens)[count:] = 0
        args[5].copy_(starts)[count:] = starts[count]
        expected = prefill(args)
        out.fill_(7.0)
        graph.replay()
        assert torch.equal(out, expected) and (out[starts[count]:] == 7).all()


@needs_hopper
@pytest.mark.parametrize("variant, change, per_tile", [
    ("qwen3", {}, (64, 128)), ("qwen2", {}, (16, 36)), ("mistral", {"sliding_window": 70}, (64, 128)),
    ("qwen3", {"head_dim": 256}, (64, 16))])
def test_an_engine(variant, change, per_tile, tmp_path, monkeypatch):
    """Logits of random weights are those of the plain kernel. The engine in recorded steps generates, too."""
    config = json.loads((GOLDEN / variant / "config.json").read_text())
    change = dict(head_dim=128, max_position_embeddings=1024) | change
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    prompts = [[(i * 7 + n) % 100 for i in range(n)] for n in (150, 64, 300, 9, 130)]
    options = dict(load_format="dummy", dtype="bfloat16", num_blocks=100, max_num_batched_tokens=256, seed=3)
    texts = tokens_of(LLM(str(tmp_path), **options).generate(prompts, GREEDY))
    assert all(len(tokens) == GREEDY.max_tokens for tokens in texts)
    logits = []
    for fits, expected in zip((True, False), per_tile):
        if not fits:
            hopper.on_hopper.cache_clear()
            monkeypatch.setattr(hopper, "fits_hopper", lambda *_: False)
        llm = LLM(str(tmp_path), **options, enforce_eager=True)
        assert llm.runner.tokens_per_tile == expected
        logits.append(prompt_logits(llm, prompts[0]))
    hopper.on_hopper.cache_clear()
    assert relative_error(*logits) < 0.02


@needs_hopper
@needs("gemma4", "qwen3_5")
@pytest.mark.parametrize("variant, change", [("qwen3.5", {}), ("qwen3-next", {}), ("gemma4", {"global_head_dim": 512})])
def test_families_with_heads_of_256_numbers(variant, change, tmp_path, monkeypatch):
    """They reach the kernel, and logits are those of the plain one. Gemma 4's layers without a window have wider heads,
    which only the plain one takes: two work lists in a step."""
    config = json.loads((GOLDEN / variant / "config.json").read_text())
    config.get("text_config", config).update(dict(head_dim=256, max_position_embeddings=1024) | change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    seen, launch, logits, prompt = set(), hopper.prefill_on_hopper, [], [i * 7 % 100 for i in range(150)]

    def look(out, *args):
        if len(out) > 1:  # one token is `on_hopper`
            seen.add(out.shape[2])
        launch(out, *args)

    monkeypatch.setattr(hopper, "prefill_on_hopper", look)
    for fits in (True, False):
        if not fits:
            hopper.on_hopper.cache_clear()
            monkeypatch.setattr(hopper, "fits_hopper", lambda *_: False)
        seen.clear()
        llm = LLM(str(tmp_path), load_format="dummy", dtype="bfloat16", num_blocks=100, max_num_batched_tokens=256,
                  seed=3, enforce_eager=True)
        if variant == "gemma4":  # which has no other scale of the scores than the norms' weights, and random ones are 1
            for layer in llm.runner.model.layers:
                layer.k_norm.weight.data.mul_(layer.config.head_dim ** -0.5)
        logits.append(prompt_logits(llm, prompt))
        assert seen == ({256} if fits else set())
    hopper.on_hopper.cache_clear()
    assert relative_error(*logits) < 0.02


# --------------------------------------------------------------------------------------------------
# On any machine
# --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, fits", [
    ({}, True), (dict(dtype=torch.float16, cache_dtype=torch.float16), True), (dict(head_dim=64), True),
    (dict(head_dim=256), True), (dict(group=8, head_dim=256), True), (dict(head_dim=512), False),
    (dict(group=7), True), (dict(group=64), True), (dict(group=3), False), (dict(group=5), False),
    *((dict(group=group, head_dim=256), True) for group in (3, 5, 6)), (dict(group=6, head_dim=64), False),
    (dict(group=65, head_dim=256), False), (dict(group=128), False), (dict(head_dim=96), False),
    (dict(block_size=16), False), (dict(cache_dtype=torch.float8_e4m3fn), False),
    (dict(dtype=torch.float32, cache_dtype=torch.float32), False), (dict(capability=(10, 0)), False),
    (dict(capability=(8, 9)), False), (dict(cuda=None), False)], ids=str)
def test_the_rule(change, fits, monkeypatch):
    given = dict(group=2, head_dim=128, block_size=64, dtype=torch.bfloat16, cache_dtype=torch.bfloat16,
                 capability=(9, 0), cuda="13.0") | change
    capability, cuda = given.pop("capability"), given.pop("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert hopper.fits_hopper(**given, device=torch.device("cuda")) == fits


@needs_kernel
def test_a_triton_in_which_it_does_not_compile(monkeypatch):
    """Prompts then get the plain kernel and its tiles, after one warning."""
    def refuse(*_):
        raise ImportError("no module named gluon")

    q, cache = torch.randn(5, 2, 16, device=DEVICE), torch.randn(2, 1, 64, 1, 16, device=DEVICE)
    table, lens, starts = (torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in ([[0]], [9], [0, 5]))
    args, options = (q, *cache, table, lens, starts, 0.25), dict(max_query_len=5, max_seq_len=9)
    expected = kernel.paged_attention(*args, **options)
    monkeypatch.setattr(hopper, "fits_hopper", lambda *_: True)
    monkeypatch.setattr(hopper, "box_of", refuse)
    hopper.on_hopper.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"kernel for all GPUs, .* \(no module named gluon\)") as seen:
            assert torch.equal(attention(*args, **options), expected)
            assert torch.equal(attention(*args, **options), expected)
        assert len(seen) == 1
        model = 2, 16, 64, q.dtype, q.dtype, q.device
        assert hopper.tokens_per_tile(*model) == tiles.prefill_config(2, 16, q.dtype, q.device)["TILE_M"] // 2
    finally:
        hopper.on_hopper.cache_clear()


@needs("gemma4", "kinds")
def test_tiles_of_a_model_with_heads_of_two_sizes(monkeypatch):
    """Gemma 4's layers without a window have other heads. Here Hopper's kernel takes those, else the rest."""
    monkeypatch.setattr(hopper, "on_hopper", lambda group, head_dim, *_: head_dim == 32)
    runner = LLM(str(GOLDEN / "gemma4"), device="cpu", num_blocks=9).runner
    runner.kernels = hopper.with_prefill(runner.kernels)
    plain = tiles.tokens_per_tile(2, 16, 16, runner.dtype, runner.kv_dtype, runner.device)
    assert [runner.tile_of(layer) for layer in range(6)] == [plain, plain, 32] * 2 and plain != 32
    work = runner.make_query_tiles([100, 1], [100, 5], 101, 2).tolist()
    first, second = runner.tile_sizes
    for size, entries in ((first, work[:101 // first + 2]), (second, work[101 // first + 2:])):
        assert sorted(entry for entry in entries if entry[0] >= 0) == [[0, i] for i in range(tiles.cdiv(100, size))]


def test_the_turns_of_programs():
    """The drawing in `_item`."""
    lines = (getattr(hopper._item, "fn", None) or hopper._item).__doc__.splitlines()
    drawn = [[int(word) for word in line.split("turn")[1].split()[1:]] for line in lines if "turn " in line and "  " in
             line.strip()]
    expected = [[turn * 3 + (program if turn % 2 == 0 else 2 - program) for program in range(3)] for turn in range(2)]
    assert drawn == expected


def test_long_contexts_of_one_sequence_stand_together_in_the_work_list():
    work = kernel.make_query_tiles([192, 192, 192], [7000, 7000, 500], 64).tolist()
    assert work == [[0, 2], [0, 1], [0, 0], [1, 2], [1, 1], [1, 0], [2, 2], [2, 1], [2, 0]]
