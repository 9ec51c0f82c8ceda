"""Prefill that only Hopper can run: warps with different tasks. An addition to chapter 1, and its longest kernel.

In `_prefill` of kernel.py all warps of a program do the same: they load a tile, multiply, compute exponentials.
Meanwhile the tensor cores of an H200 wait for a third of the time. FlashAttention-3 (Shah et al. 2024) gives warps
different tasks (**warp specialization**), which plain Triton cannot express on this card. **Gluon** can. It is Triton's
lower level: the program says which warps do what, and how a tensor lies in registers or memory (its **layout**). It
has three parts. They go through the same work list as the plain kernel:

    a copying warp       It asks the hardware's copying unit (TMA) for tiles. Copies run by themselves.
    two warpgroups       Each has 4 warps and takes 64 of the 128 rows of a tile of queries. It issues products
                         (wgmma), which the tensor cores compute by themselves, and waits for them.

The parts wait for each other at barriers in shared memory, which has two buffers each for tiles of q, K and V (with
heads of 256 numbers one for q, and tiles of 64 keys in place of 128: registers and shared memory hold no more):

    copying warp   K0 V0 K1 V1          K2      V2         K3      V3
                   |  |  |  |           ^       ^          ^       ^       ^  both warpgroups have released the buffer
                   v  v  v  v           |       |          |       |       v  the copy has arrived
    warpgroup 0    S0 softmax 0  S1 A0 softmax 1  S2 A1 softmax 2  S3 A2   S  scores: q times a tile of K
    warpgroup 1          S0 softmax 0  S1 A0 softmax 1  S2 A1 softmax 2    A  acc += weights times a tile of V

While one warpgroup computes a softmax, the tensor cores serve the other one. The copying warp runs ahead by two tiles
of keys, and by one of queries: each multiprocessor has one program, which takes entries of the list in turns.
"""
from collections import namedtuple
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from nanopaged import kernel, tiles
from nanopaged.optional_gluon import (
    async_load,
    box_of,
    compiles,
    fence_async_shared,
    gl,
    gluon_jit,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from nanopaged.optional_triton import launch_options, tl

HOPPER_TILE_M = 128  # (query token, query head) pairs of a tile
HOPPER_BLOCK_SIZE = 64  # a tile of keys is two blocks, or with wide heads one


def with_prefill(kernels: kernel.Kernels) -> kernel.Kernels:
    """The kernels, with this file's prefill for the models that it is made for."""
    return kernels._replace(attention=partial(kernels.attention, prefill=launch_prefill,
                                              tokens_per_tile=tokens_per_tile), tokens_per_tile=tokens_per_tile)


def tokens_per_tile(group: int, *model: Any) -> int:
    """`tiles.tokens_per_tile` of the prefill that runs."""
    if on_hopper(group, *model):
        return HOPPER_TILE_M // tiles.next_power_of_2(group)
    return tiles.tokens_per_tile(group, *model)


def launch_prefill(launch: kernel.Launch, query_tiles: Tensor) -> None:
    q, k_cache = launch.inputs[:2]
    model = launch.constants["GROUP"], q.shape[2], k_cache.shape[1], q.dtype, k_cache.dtype, q.device
    if on_hopper(*model):
        prefill_on_hopper(launch.out, *launch.inputs, query_tiles, launch.scales[0], launch.constants["WINDOW"])
    else:
        kernel.launch_prefill(launch, query_tiles)


@lru_cache
def on_hopper(group: int, head_dim: int, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype,
              device: torch.device) -> bool:
    """Whether the kernel of this file computes prefill. Model and device decide, never the batch, on which
    results therefore do not depend.

    The first call compiles the kernel. If this Triton has no Gluon, or another one, a warning says so.
    """
    if not fits_hopper(group, head_dim, block_size, dtype, cache_dtype, device):
        return False
    nothing = torch.full((1, 2), -1, dtype=torch.int32, device=device)
    q, cache = (torch.empty(*shape, head_dim, dtype=dtype, device=device)
                for shape in ((1, group), (1, block_size, 1)))
    slower = "much" if head_dim == 256 else "20 to 30%"
    return compiles(partial(prefill_on_hopper, q, q, cache, cache, nothing, nothing[0], nothing[0], None, nothing, 1.0,
                            0), "prompts are computed by the kernel for all GPUs, which is "
                    f"{slower} slower than the one for Hopper")


def fits_hopper(group: int, head_dim: int, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype,
                device: torch.device) -> bool:
    """Whether the prefill kernel that only Hopper runs is made for this model. Its tile of queries has room for groups
    of a power of two. Other groups are padded, which pays with 7 query heads per kv head, and with 3, 5 or 6 does not.
    With heads of 256 numbers padding always pays, because the plain kernel is much slower there."""
    padded = tiles.next_power_of_2(group)
    return (tiles.has_dependent_launch(device) and torch.cuda.get_device_capability(device) == (9, 0)
            and cache_dtype == dtype and dtype.itemsize == 2 and head_dim in (64, 128, 256)
            and block_size == HOPPER_BLOCK_SIZE and padded <= HOPPER_TILE_M // 2
            and (8 * group >= 7 * padded or head_dim == 256))


# --------------------------------------------------------------------------------------------------
# The kernel
# --------------------------------------------------------------------------------------------------

ROWS = tl.constexpr(64)  # of a warpgroup, the height of its products; tokens of a block

Ring = namedtuple("Ring", ["tiles", "full", "empty"])  # buffers, and two barriers for each: tile n is in n % BUFFERS
HopperBatch = namedtuple("HopperBatch", ["work", "num_items", "num_kv_heads", "seq_lens", "query_start_loc", "window"])
Item = namedtuple("Item", [
    "seq", "kv_head", "token", "end",  # the tile's first token in q, and where the sequence ends there
    "position", "seq_len",  # of that token; of the sequence
    "oldest", "start", "stop"])  # the first position that the tile sees; its tiles of keys, none if the list has ended
WarpRows = namedtuple("WarpRows", ["q", "position", "window"])  # of a warpgroup


def prefill_on_hopper(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
                      query_start_loc: Tensor, sinks: Tensor | None, query_tiles: Tensor, scale: float,
                      sliding_window: int) -> None:
    """The sequences with two or more new tokens. TMA copies a **box** of a tensor: 128 rows of q, or one block of a
    kv head. A group that is no power of two is padded with the head behind it, whose results are not stored."""
    (_, num_heads, head_dim), (_, block_size, num_kv_heads, _) = q.shape, k_cache.shape
    group, num_items = num_heads // num_kv_heads, len(query_tiles) * num_kv_heads
    padded = tiles.next_power_of_2(group)
    rows, block = [HOPPER_TILE_M // padded, padded, head_dim], [1, block_size, 1, head_dim]
    boxes = box_of(q, rows), box_of(k_cache, block), box_of(v_cache, block)
    hopper_prefill_kernel[(min(num_items, tiles.num_multiprocessors(q.device)),)](
        out, *boxes, block_tables, seq_lens, query_start_loc, sinks, query_tiles, num_items, num_kv_heads,
        sliding_window or 2**30, scale, *out.stride()[:2], block_tables.stride(0), GROUP=group,
        WINDOW=sliding_window > 0, num_warps=4, **launch_options(q.device))


@gluon_jit
def hopper_prefill_kernel(out, q_box, k_box, v_box, block_tables, seq_lens, query_start_loc, sinks, work, num_items,
                          num_kv_heads, window, scale, out_token, out_head, table_row, GROUP: tl.constexpr,
                          WINDOW: tl.constexpr, PDL: tl.constexpr):
    """work, scale: as for paged_attention_kernel; num_items: an item is an entry of work and a kv head. The lists at
    the end are of the second warpgroup and of the copying warp: warps, and registers of a thread."""
    WIDE: tl.constexpr = q_box.block_type.shape[2] > 128  # a thread holds 128 numbers of acc, so 32 of scores, not 64
    BLOCKS: tl.constexpr = 1 if WIDE else 2  # of a tile of keys
    q, k, v = _ring(q_box, 1, 1 if WIDE else 2), _ring(k_box, BLOCKS, 2), _ring(v_box, BLOCKS, 2)
    batch = HopperBatch(work, num_items, num_kv_heads, seq_lens, query_start_loc, window)
    kernel.wait_for_previous_kernel(PDL)
    gl.warp_specialize([
        (_compute, (out, q, k, v, batch, sinks, scale, out_token, out_head, 0, GROUP, WINDOW)),
        (_compute, (out, q, k, v, batch, sinks, scale, out_token, out_head, 1, GROUP, WINDOW)),
        (_copy, (q_box, k_box, v_box, block_tables, table_row, q, k, v, batch, GROUP, WINDOW)),
    ], [4, 1], [240, 24])


@gluon_jit
def _item(turn, batch, TOKENS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """What a program computes in a turn. Work begins with the longest contexts. Every other turn goes through the
    programs backwards, so that all have about as much to do:

        3 programs, turn 0    0 1 2
                    turn 1    5 4 3
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    i = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    entry = batch.work + gl.minimum(i, batch.num_items - 1) // batch.num_kv_heads * 2
    seq, first = gl.load(entry), gl.load(entry + 1) * TOKENS
    exists = (i < batch.num_items) & (seq >= 0)
    seq = gl.maximum(seq, 0)
    q_start, end = gl.load(batch.query_start_loc + seq), gl.load(batch.query_start_loc + seq + 1)
    seq_len = gl.load(batch.seq_lens + seq)
    position = seq_len - (end - q_start) + first
    oldest = gl.maximum(position - batch.window + 1, 0) if WINDOW else 0
    stop = gl.where(exists, gl.cdiv(gl.minimum(position + TOKENS, seq_len), TILE), 0)
    return Item(seq, i % batch.num_kv_heads, q_start + first, end, position, seq_len, oldest, oldest // TILE, stop)


# A barrier counts arrivals. When all that it expects have come, its next phase begins. A phase here is a round over the
# buffers: `full` ends round n // BUFFERS when tile n has arrived, and `empty` when both warpgroups have used it. A wait
# names the parity of the round that must be over; one before the first counts as over. For tiles 0 1 2 3 4:
#
#     the copying warp waits on `empty`   1 1 0 0 1    for round n // BUFFERS - 1: the buffer is released
#     warpgroups wait on `full`           0 0 1 1 0    for round n // BUFFERS: the tile is there

@gluon_jit
def _ring(box, BOXES: tl.constexpr, BUFFERS: tl.constexpr):
    """A ring for tiles of so many boxes."""
    shape: tl.constexpr = box.block_type.shape
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)  # the copying warp, and then the bytes that it expects
        mbarrier.init(empty.index(i), count=2)  # both warpgroups
    return Ring(gl.allocate_shared_memory(box.dtype, [BUFFERS, BOXES * shape[0]] + shape[1:], box.layout), full, empty)


@gluon_jit
def _acquire(ring, n):
    """The buffer for tile n, as soon as tile n - BUFFERS is released, and the barrier that waits for its bytes."""
    BUFFERS: tl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.empty.index(n % BUFFERS), (n // BUFFERS + 1) % 2)
    tile, full = ring.tiles.index(n % BUFFERS), ring.full.index(n % BUFFERS)
    mbarrier.expect(full, tile.shape[0] * tile.shape[1] * tile.shape[-1] * 2)
    return tile, full


@gluon_jit
def _arrived(ring, n):
    """Tile n [rows, dim], as soon as it is there."""
    BUFFERS: tl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.full.index(n % BUFFERS), n // BUFFERS % 2)
    SHAPE: tl.constexpr = [ring.tiles.shape[1] * ring.tiles.shape[2], ring.tiles.shape[-1]]
    return ring.tiles.index(n % BUFFERS).reshape(SHAPE)


@gluon_jit
def _release(ring, n):
    mbarrier.arrive(ring.empty.index(n % ring.tiles.shape[0]))


@gluon_jit
def _copy(q_box, k_box, v_box, block_tables, table_row, q, k, v, batch, GROUP: tl.constexpr, WINDOW: tl.constexpr):
    """The copying warp."""
    TOKENS: tl.constexpr = q_box.block_type.shape[0]
    BLOCKS: tl.constexpr = k.tiles.shape[1]
    TILE: tl.constexpr = BLOCKS * ROWS
    turn, n = 0, 0  # items and tiles of keys so far
    item = _item(turn, batch, TOKENS, TILE, WINDOW)
    while item.start < item.stop:
        tile, full = _acquire(q, turn)
        async_load(q_box, [item.token, item.kv_head * GROUP, 0], full, tile)
        turn += 1
        upcoming, table = item, block_tables + item.seq.to(gl.int64) * table_row
        for i in range(item.stop - item.start):
            at = BLOCKS * (item.stop - 1 - i)
            a = gl.load(table + at)  # behind the last block the table may hold anything
            b = gl.load(table + gl.minimum(at + BLOCKS - 1, (item.seq_len - 1) // ROWS))
            _copy_tile(k_box, a, b, item.kv_head, k, n)
            _copy_tile(v_box, a, b, item.kv_head, v, n)
            n += 1
            if i == 0:
                upcoming = _item(turn, batch, TOKENS, TILE, WINDOW)  # while the copies are under way
        item = upcoming


@gluon_jit
def _copy_tile(box, a, b, kv_head, ring, n):
    """The tile of blocks a and b, or of a alone."""
    tile, full = _acquire(ring, n)
    async_load(box, [a, 0, kv_head, 0], full, tile.slice(0, 1))
    if tile.shape[0] > 1:
        async_load(box, [b, 0, kv_head, 0], full, tile.slice(1, 1))


@gluon_jit
def _compute(out, q, k, v, batch, sinks, scale, out_token, out_head, HALF: tl.constexpr, GROUP: tl.constexpr,
             WINDOW: tl.constexpr):
    """A warpgroup: the first or the second 64 rows of each item. It goes from the last tile of keys to the first one.
    The tiles from `first_masked` on need a mask and come first, each by itself. Next, down to `first_whole`, no tile
    needs a mask, and the weighted sum is one tile behind. In the rest the windows of rows begin: they have a mask."""
    TOKENS: tl.constexpr = q.tiles.shape[1]
    PADDED: tl.constexpr = q.tiles.shape[2]
    DIM: tl.constexpr = q.tiles.shape[3]
    TILE: tl.constexpr = k.tiles.shape[1] * ROWS
    ACC: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])  # wgmma; 4 x 1 warps of 16 x DIM x 16
    ROW: tl.constexpr = gl.SliceLayout(1, ACC)
    WEIGHTS: tl.constexpr = gl.DotOperandLayout(0, ACC, 2)  # the left factor, 2 numbers in a register
    # Rows and columns of a thread (16 bytes), of a warp in threads, of the tensor in warps; columns are the inner axis.
    LINES: tl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=ROW)
    line, dim = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES)), gl.arange(0, DIM, layout=gl.SliceLayout(0, LINES))
    turn, n = 0, 0
    item = _item(turn, batch, TOKENS, TILE, WINDOW)
    while item.start < item.stop:
        my_q = _arrived(q, turn).slice(HALF * ROWS, ROWS)
        first = gl.minimum(item.position + HALF * (TOKENS // 2), item.seq_len - 1)
        last = gl.minimum(first + TOKENS // 2, item.seq_len) - 1
        rows = WarpRows(my_q, gl.minimum(first + row // PADDED, last), batch.window)
        sums = kernel.Sums(gl.zeros([ROWS, DIM], gl.float32, ACC), gl.full([ROWS], -float("inf"), gl.float32, ROW),
                    gl.zeros([ROWS], gl.float32, ROW))
        p = gl.zeros([ROWS, TILE], out.dtype.element_ty, WEIGHTS)
        first_masked, first_whole = gl.minimum((first + 1) // TILE, item.stop - 1), item.start
        if WINDOW:
            first_whole = gl.minimum(gl.cdiv(gl.maximum(last - batch.window + 1, 0), TILE), first_masked)
        for i in range(item.stop - first_masked):
            if i > 0:
                sums = _add(sums, p, _arrived(v, n - 1))
                _release(v, n - 1)
            p, sums = _masked_tile(sums, rows, k, v, n, (item.stop - 1 - i) * TILE, item, scale, LINES, WINDOW)
            n += 1
        # `sums` has the weights of this item's tiles before n, but the V of those before n - 1; p are n - 1's weights.
        for i in range(first_masked - first_whole):
            p, sums = _next_tile(p, sums, rows, k, v, n, scale)
            n += 1
        if WINDOW:
            for i in range(first_whole - item.start):
                sums = _add(sums, p, _arrived(v, n - 1))
                _release(v, n - 1)
                p, sums = _masked_tile(sums, rows, k, v, n, (first_whole - 1 - i) * TILE, item, scale, LINES, WINDOW)
                n += 1
        sums = _add(sums, p, _arrived(v, n - 1))
        _release(v, n - 1)
        # The buffer of q is free now. Through it each thread gets 16 bytes of a line in place of 4 of several.
        total = sums.sum
        if sinks is not None:  # as in `_normalize`
            head = item.kv_head * GROUP + gl.minimum(row % PADDED, GROUP - 1)
            total += gl.exp2(gl.load(sinks + head).to(gl.float32) * 1.4426950408889634 - sums.max)  # log2(e)
        my_q.store((sums.acc * (1.0 / total)[:, None]).to(out.dtype.element_ty))
        result = my_q.load(LINES)
        fence_async_shared()
        _release(q, turn)
        token, head = item.token + HALF * (TOKENS // 2) + line // PADDED, line % PADDED
        at = out + token.to(gl.int64) * out_token + (item.kv_head * GROUP + head) * out_head
        gl.store(at[:, None] + dim[None, :], result, mask=((token < item.end) & (head < GROUP))[:, None])
        turn += 1
        item = _item(turn, batch, TOKENS, TILE, WINDOW)


@gluon_jit
def _masked_tile(sums, rows, k, v, n, key, item, scale, LINES: tl.constexpr, WINDOW: tl.constexpr):
    """The weights of tile n, which begins at `key`, and the running sums without its V. Slots of V that hold anything
    become 0, because 0 * NaN is NaN: those after the last token, and those that left the window, whose blocks may have
    other holders."""
    TILE: tl.constexpr = k.tiles.shape[1] * ROWS
    scores = warpgroup_mma_wait(0, deps=[_scores(rows.q, _arrived(k, n))])
    _release(k, n)
    token = (key + gl.arange(0, TILE, layout=gl.SliceLayout(0, scores.type.layout)))[None, :]
    position = gl.convert_layout(rows.position, gl.SliceLayout(1, scores.type.layout))[:, None]
    seen = token <= position
    if WINDOW:
        seen &= token > position - rows.window
    weights, alpha, sums = _softmax(sums, gl.where(seen, scores, -float("inf")), scale, True, rows.q.dtype)
    tile = _arrived(v, n)
    if (key + TILE > item.seq_len) | (key < item.oldest):
        for part in gl.static_range(TILE // 32):
            lines = tile.slice(part * 32, 32)
            at = key + part * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, LINES))
            exists = (at >= item.oldest) & (at < item.seq_len)
            lines.store(gl.where(exists[:, None], lines.load(LINES), 0.0))
        fence_async_shared()
    return weights, kernel.Sums(sums.acc * alpha[:, None], sums.max, sums.sum)


@gluon_jit
def _next_tile(p, sums, rows, k, v, n, scale):
    """As `_masked_tile`, without a mask. p are the weights of tile n - 1, whose V is multiplied while the softmax of
    tile n begins."""
    scores = _scores(rows.q, _arrived(k, n))
    acc = warpgroup_mma(p, _arrived(v, n - 1), sums.acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])  # but for one product, all that were issued are complete
    _release(k, n)
    weights, alpha, sums = _softmax(sums, scores, scale, False, rows.q.dtype)
    acc, p, weights = warpgroup_mma_wait(0, deps=[acc, p, weights])
    _release(v, n - 1)
    return weights, kernel.Sums(acc * alpha[:, None], sums.max, sums.sum)


@gluon_jit
def _scores(q, k):
    """Issue the product of q and a tile of K."""
    TILE: tl.constexpr = k.shape[0]
    layout: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    zeros = gl.zeros([ROWS, TILE], gl.float32, layout)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon_jit
def _softmax(sums, scores, scale, MASKED: tl.constexpr, dtype: tl.constexpr):
    """`_online_softmax`, with its conversions between layouts, which move nothing. sums.acc stays as it is."""
    OF_ROW: tl.constexpr = gl.SliceLayout(1, scores.type.layout)
    SAME: tl.constexpr = sums.max.type.layout
    WEIGHTS: tl.constexpr = gl.DotOperandLayout(0, sums.acc.type.layout, 2)
    new_max = gl.maximum(sums.max, gl.convert_layout(gl.max(scores, 1), SAME) * scale)
    base = new_max
    if MASKED:
        base = gl.where(new_max == -float("inf"), 0.0, new_max)
    p = gl.exp2(scores * scale - gl.convert_layout(base, OF_ROW)[:, None])
    alpha, total = gl.exp2(sums.max - base), gl.convert_layout(gl.sum(p, 1), SAME)
    return gl.convert_layout(p.to(dtype), WEIGHTS), alpha, kernel.Sums(sums.acc, new_max, sums.sum * alpha + total)


@gluon_jit
def _add(sums, p, tile):
    """The running sums with a tile of V, times its weights."""
    acc, p = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, tile, sums.acc, is_async=True), p])
    return kernel.Sums(acc, sums.max, sums.sum)
