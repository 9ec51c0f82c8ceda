"""Chapter 1: attention over a paged cache.

A sequence's keys and values do not lie in one piece. The cache is a pool of **blocks** of
`block_size` token slots, and a sequence owns any blocks in any order, listed in its **block table**:

    block_size 4, a sequence of 10 tokens          k_cache [num_blocks, block_size, num_kv_heads, head_dim]

    block table       [ 5 | 2 | 7 ]                 block 2 : token 4  5  6  7
                        |   |   |                   block 5 : token 0  1  2  3
    its tokens       0..3 4..7 8..9                 block 7 : token 8  9  .  .    <- two slots still empty

    token t is in slot  block_table[t // block_size] * block_size + t % block_size

Attention has to walk that table; nothing else about it changes (Kwon et al. 2023, section 4.1). This
file has the two ways to do it, with the same arguments, and likewise what fills the cache:

    paged_attention_reference   plain torch: gather the slots, then ordinary attention. The CPU's path.
    paged_attention             one Triton kernel that reads K and V where they are. The GPU's path.
    store_kv                    writes new K and V into their slots.
    rotate_and_store            the same, with what a model does to q and k on the way: norm and rope, in one launch.

**Why softmax can be computed in pieces.** With m the largest score seen so far, keep the sums
`l = sum exp(s - m)` and `acc = sum exp(s - m) v`. When a new piece raises m to m', both sums are
multiplied by exp(m - m') and go on; `acc / l` at the end is the softmax average, whatever the pieces
were (Milakov and Gimelshein 2018; Dao et al. 2022). So one program needs only one tile of K and V
at a time. The same rule merges sums of different programs, so a long context can be cut into
**splits** that run side by side and are merged afterwards (flash-decoding, Dao et al. 2023; vLLM's "V2").

**An fp8 cache** (e4m3: 8 bits, 3 of them after the point) has K / k_scale and V / v_scale, one factor each for a layer.
Attention is linear enough for that: k_scale joins the scale of the scores, and v_scale multiplies the result.

**What a program does.** The batch is flat: `q` holds every sequence's new tokens, one after another,
`query_start_loc` says where each sequence begins. A program owns one kv head and one tile of queries
of one sequence. The `group` query heads that share the kv head are in the same tile, so each tile
of K and V is read once for all of them. There are two shapes of program, and a sequence gets its
shape from its own query length alone, so its result does not depend on who shares the batch, bit for bit:

    decode   query length 1: `group` queries; the context is cut into splits by the sequence's own length,
             and each of the programs that the grid has for it takes a run of them
    prefill  longer: TILE_M queries = TILE_M // group tokens x group heads; whole context, one program. It attends with
             one half of them after the other: while the softmax of a half is computed, the matrix units work for the other
"""
import math
import os
import warnings
from functools import lru_cache
from importlib.util import find_spec
from typing import Callable, NamedTuple

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch's complaint, where nothing needs numpy
import torch
import torch.nn.functional as F

if not torch.cuda.is_available() and find_spec("numpy"):
    # Without a GPU the kernel runs in Triton's interpreter, which needs numpy. The variable is read on import.
    os.environ.setdefault("TRITON_INTERPRET", "1")
try:
    import triton
    import triton.language as tl
except ImportError:  # macOS and Windows have no Triton: the torch path is all there is, and the names below stay inert
    triton = None

    class tl:
        constexpr = int

INTERPRETED = triton is not None and not isinstance(tl.cdiv, triton.JITFunction)  # as Triton was when it was imported

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no Triton, or one without Nvidia's part
    gdc_launch_dependents = gdc_wait = None

# Triton compiles a kernel again for other values of an integer (1, multiples of 16) and other alignments of a pointer. These
# change from step to step, and nobody wants to wait for a compiler in the midst of serving.
UNSTEADY = ["block_tables", "seq_lens", "query_start_loc", "query_tiles", "slot_mapping"]
jit = (triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=UNSTEADY) if triton
       else lambda function: function)

# A context is cut into pieces of a sixteenth of its tokens, but of 128 to 512, and never into more than 32 pieces:
# smaller ones cost more in merging than they gain.
MAX_SPLITS = 32
MIN_SPLIT, MID_SPLIT = 128, 512
MANY_CONTEXTS = 160  # (sequence, kv head) pairs that fill the device with one program each
FP8_MAX = 448.0  # the largest e4m3 number


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


# --------------------------------------------------------------------------------------------------
# The same function in plain torch
# --------------------------------------------------------------------------------------------------

def paged_attention_reference(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale, *,
                              max_query_len=None, max_seq_len=None, sliding_window=0, out=None, plan=None, k_scale=1.0,
                              v_scale=1.0, **_):
    """What `paged_attention` computes, in plain torch; same arguments (those it has no use for are ignored).

    Sequences with the same number of new tokens are one rectangular problem. A decode step is therefore
    one gather and one attention call, however many sequences there are.

    plan: a dict that the calls of one step may share: which slots each problem reads is worked out once, not per layer
    """
    out = torch.empty_like(q) if out is None else out
    group = q.shape[1] // k_cache.shape[2]
    plan = {} if plan is None else plan
    if sliding_window not in plan:
        plan[sliding_window] = list(_rectangles(block_tables, seq_lens, query_start_loc, k_cache.shape[1],
                                                group, sliding_window, q.dtype))
    for rows, slots, mask in plan[sliding_window]:
        out[rows] = _attend_rectangle(q[rows], k_cache, v_cache, slots, mask, scale * k_scale)
    return out if v_scale == 1 else out.mul_(v_scale)


def _rectangles(block_tables, seq_lens, query_start_loc, block_size, group, sliding_window, dtype):
    """For S sequences with Q new tokens each and at most K in the cache: their rows of q [S, Q], the slots to read
    [S, K], and the mask to add to the scores, 0 or -inf [S, 1, group * Q, K]."""
    query_lens = query_start_loc.diff()
    for Q in query_lens.unique().tolist():
        if Q == 0:  # padding
            continue
        members = (query_lens == Q).nonzero()[:, 0]  # [S]
        rows = query_start_loc[members, None] + torch.arange(Q, device=members.device)
        lens = seq_lens[members, None].long()  # [S, 1]
        key_position = torch.arange(int(lens.max()), device=members.device)  # [K]
        query_position = lens - Q + torch.arange(Q, device=members.device)  # [S, Q]
        visible = key_position <= query_position[:, :, None]  # [S, Q, K]
        oldest = torch.zeros_like(lens)
        if sliding_window:
            visible &= key_position > query_position[:, :, None] - sliding_window
            oldest = (lens - Q - sliding_window + 1).clamp(min=0)
        # A hidden key contributes 0 * value, and 0 * NaN is NaN: an unused slot must not be read, whatever is in it.
        # So a position that this sequence does not have, or no longer has, reads one that it does have.
        position = key_position.clamp(oldest, lens - 1)  # [S, K]
        slots = block_tables[members].gather(1, position // block_size).long() * block_size + position % block_size
        mask = torch.zeros(visible.shape, dtype=dtype, device=members.device).masked_fill_(~visible, -math.inf)
        yield rows, slots, mask[:, None].repeat(1, 1, group, 1)


def _attend_rectangle(q, k_cache, v_cache, slots, mask, scale):
    """Attention for S sequences of Q new tokens each: q [S, Q, num_heads, head_dim], result alike."""
    (S, Q, num_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[2]
    k = _read_slots(k_cache, slots, q.dtype)  # [S, num_kv_heads, K, head_dim]
    v = _read_slots(v_cache, slots, q.dtype)
    # The query heads of one kv head become more query rows of that head, so K and V are not repeated.
    q = q.view(S, Q, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).reshape(S, num_kv_heads, -1, head_dim)
    o = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return o.view(S, num_kv_heads, -1, Q, head_dim).permute(0, 3, 1, 2, 4).reshape(S, Q, num_heads, head_dim)


def _read_slots(cache, slots, dtype):
    flat = _bytes(cache).flatten(0, 1)  # a view of a pool whose blocks are contiguous
    picked = flat.index_select(0, slots.flatten()).view(cache.dtype)
    return picked.view(*slots.shape, *cache.shape[2:]).to(dtype).transpose(1, 2)


def _bytes(cache):
    """An fp8 cache as bytes, which torch can index on a CPU."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


# --------------------------------------------------------------------------------------------------
# Filling the cache
# --------------------------------------------------------------------------------------------------

def store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale=1.0, v_scale=1.0):
    """Write each new token's K and V into its slot.

    k, v: [num_tokens, num_kv_heads, head_dim]; k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim];
    slot_mapping: [num_tokens], block_id * block_size + offset, or -1: this token's K and V are not written
    (padding, or a token whose block is shared and already holds them). An fp8 cache gets K / k_scale and V / v_scale, cut off
    at 448 and -448; any other gets K and V as they are, and wants scales of 1, by which attention will multiply. On a CPU, and
    without Triton, slots must be evenly spaced, as in a cache whose blocks lie one after another.
    """
    if k.device.type == "cpu" or triton is None:
        if slot_mapping.numel() and slot_mapping.min() < 0:
            keep = slot_mapping >= 0
            k, v, slot_mapping = k[keep], v[keep], slot_mapping[keep]
        slots = slot_mapping.long()
        for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
            _bytes(cache).view(-1, *cache.shape[2:]).index_copy_(0, slots, _bytes(_scaled(new, scale, cache.dtype)))
    elif len(k):
        launch_store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def _scaled(x, scale, dtype):
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype.itemsize == 1 else x.to(dtype)


def launch_store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale=1.0, v_scale=1.0):
    """The kernel behind `store_kv`, by itself so that the interpreter can be asked for it on a CPU."""
    num_kv_heads, head_dim = k.shape[1:]
    store_kv_kernel[(len(k),)](
        k, v, k_cache, v_cache, slot_mapping, 1 / k_scale, 1 / v_scale, *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3],
        *v_cache.stride()[:3], BLOCK_SIZE=k_cache.shape[1], HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HEADS_PADDED=_next_power_of_2(num_kv_heads), DIM_PADDED=_next_power_of_2(head_dim))


@jit
def store_kv_kernel(k, v, k_cache, v_cache, slot_mapping, k_factor, v_factor, k_token, k_head, v_token, v_head,
                    kc_block, kc_slot, kc_head, vc_block, vc_slot, vc_head,
                    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                    HEADS_PADDED: tl.constexpr, DIM_PADDED: tl.constexpr):
    """One program per token: copies [HEADS, HEAD_DIM] of K and of V."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)  # 64 bits: a pool of more than 2^31 elements is normal
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head = tl.arange(0, HEADS_PADDED)[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    valid = (head < HEADS) & (dim < HEAD_DIM)
    new_k = tl.load(k + token * k_token + head * k_head + dim, mask=valid, other=0.0)
    new_v = tl.load(v + token * v_token + head * v_head + dim, mask=valid, other=0.0)
    _store(k_cache + block * kc_block + offset * kc_slot + head * kc_head + dim, new_k, k_factor, valid)
    _store(v_cache + block * vc_block + offset * vc_slot + head * vc_head + dim, new_v, v_factor, valid)


@jit
def _store(at, x, factor, mask):
    """x into the cache, scaled if that is fp8."""
    if at.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32) * factor, -448.0), 448.0).to(tl.float8e4nv)
    tl.store(at, x, mask=mask)


def rotate_and_store_reference(qkv, num_heads, rotation, q_norm, k_norm, eps, k_cache, v_cache, slot_mapping, k_scale=1.0,
                               v_scale=1.0):
    """What becomes of q, k and v between their projection and attention: norm, rotate, store k and v, return q.

    qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; returns q [num_tokens, num_heads, head_dim]
    rotation: [num_tokens, head_dim] float32, the cosines of each token's angles, then their sines; None: no rope
    q_norm, k_norm: [head_dim] weights of an RMS norm over each head, with eps; None: no norm
    """
    num_kv_heads = k_cache.shape[2]
    qk, v = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        qk = rms_norm(qk, torch.cat([q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)]), eps)
    if rotation is not None:
        qk = rotate(qk, rotation[:, None])
    q, k = qk.split([num_heads, num_kv_heads], dim=1)
    store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return q


def rms_norm(x, weight, eps: float):
    """x / rms(x) * weight over the last dimension, computed in float32 (Zhang and Sennrich 2019)."""
    exact = x.float()
    mean_square = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square() / x.shape[-1]
    return (exact * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight


def rotate(x, rotation):
    """Rotary position embedding (Su et al. 2021): x [num_tokens, heads, head_dim], rotation [num_tokens, 1, head_dim].

    Element i of the first half and element i of the second are one point of a plane, turned by the angle of
    (position, i). A product of two turned vectors then depends on the distance of their positions only.
    """
    cos, sin = rotation.chunk(2, dim=-1)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)], dim=-1).to(x.dtype)


def rotate_and_store(qkv, num_heads, rotation, q_norm, k_norm, eps, k_cache, v_cache, slot_mapping, k_scale=1.0, v_scale=1.0):
    """`rotate_and_store_reference` in one launch; everything in float32 between the load and the store."""
    num_tokens, all_heads, head_dim = qkv.shape
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    num_kv_heads = k_cache.shape[2]
    rotate_and_store_kernel[(num_tokens, 2)](
        qkv, q, rotation if rotation is not None else qkv, q_norm if q_norm is not None else qkv,
        k_norm if k_norm is not None else qkv, eps, k_cache, v_cache, slot_mapping, 1 / k_scale, 1 / v_scale, qkv.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3], BLOCK_SIZE=k_cache.shape[1], HEADS=num_heads,
        KV_HEADS=num_kv_heads, HALF=head_dim // 2, HEADS_PADDED=_next_power_of_2(num_heads),
        KV_PADDED=_next_power_of_2(num_kv_heads), HALF_PADDED=_next_power_of_2(head_dim // 2),
        ROTATE=rotation is not None, NORM=q_norm is not None, num_warps=4 if num_heads * head_dim <= 4096 else 8,
        **early_launch(qkv.device))
    return q


@jit
def _wait_for_the_kernel_before(EARLY: tl.constexpr):
    """A kernel that was launched EARLY takes its place on the device while the one before it still runs. Here it waits for
    what that one writes, and lets the next one in (Nvidia's programmatic dependent launch): about a microsecond less
    before each of the two or three kernels of every layer that are launched so."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@jit
def rotate_and_store_kernel(qkv, q_out, rotation, q_norm, k_norm, eps, k_cache, v_cache, slot_mapping, k_factor, v_factor,
                            qkv_token, kc_block, kc_slot, kc_head, vc_block, vc_slot, vc_head,
                            BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
                            HEADS_PADDED: tl.constexpr, KV_PADDED: tl.constexpr, HALF_PADDED: tl.constexpr,
                            ROTATE: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr):
    """Two programs per token, one for q and one for k and v. A head is held as its two halves, because rope turns the one
    against the other."""
    _wait_for_the_kernel_before(EARLY)
    token = tl.program_id(0).to(tl.int64)
    row, rotation = qkv + token * qkv_token, rotation + token * 2 * HALF
    i = tl.arange(0, HALF_PADDED)[None, :]
    if tl.program_id(1) == 0:
        head = tl.arange(0, HEADS_PADDED)[:, None]
        valid = (head < HEADS) & (i < HALF)
        q_a, q_b = _turned_halves(row, head, i, valid, q_norm, rotation, eps, HALF, ROTATE, NORM)
        q_at = q_out + (token * HEADS + head) * 2 * HALF + i
        tl.store(q_at, q_a, mask=valid)
        tl.store(q_at + HALF, q_b, mask=valid)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        kv_head = tl.arange(0, KV_PADDED)[:, None]
        wanted = (kv_head < tl.where(slot >= 0, KV_HEADS, 0)) & (i < HALF)
        v = row + (HEADS + KV_HEADS + kv_head) * 2 * HALF + i
        v_a, v_b = tl.load(v, mask=wanted, other=0.0), tl.load(v + HALF, mask=wanted, other=0.0)
        k_a, k_b = _turned_halves(row + HEADS * 2 * HALF, kv_head, i, wanted, k_norm, rotation, eps, HALF, ROTATE, NORM)
        k_at = k_cache + block * kc_block + offset * kc_slot + kv_head * kc_head + i
        _store(k_at, k_a, k_factor, wanted)
        _store(k_at + HALF, k_b, k_factor, wanted)
        v_at = v_cache + block * vc_block + offset * vc_slot + kv_head * vc_head + i
        _store(v_at, v_a, v_factor, wanted)
        _store(v_at + HALF, v_b, v_factor, wanted)


@jit
def _turned_halves(row, head, i, valid, norm, rotation, eps, HALF: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr):
    """Both halves of some heads of one token in float32, normed and turned."""
    a = tl.load(row + head * 2 * HALF + i, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(row + head * 2 * HALF + HALF + i, mask=valid, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a = a * scale * tl.load(norm + i, mask=i < HALF, other=0.0).to(tl.float32)
        b = b * scale * tl.load(norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    if ROTATE:
        cos = tl.load(rotation + i, mask=i < HALF, other=0.0)
        sin = tl.load(rotation + HALF + i, mask=i < HALF, other=0.0)
        a, b = a * cos - b * sin, b * cos + a * sin
    return a, b


# --------------------------------------------------------------------------------------------------
# The kernel
# --------------------------------------------------------------------------------------------------

@jit
def _slots_of(block, tile, TILE_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, KC_BLOCK: tl.constexpr, KC_SLOT: tl.constexpr,
              VC_BLOCK: tl.constexpr, VC_SLOT: tl.constexpr):
    """Offsets [TILE_N] of a tile's tokens in the caches of K and V."""
    # Where a tile never crosses a block's end, one table entry serves all of it; else each token has its own.
    offset = tile % BLOCK_SIZE + tl.arange(0, TILE_N) if BLOCK_SIZE % TILE_N == 0 else (tile + tl.arange(0, TILE_N)) % BLOCK_SIZE
    return block * KC_BLOCK + offset * KC_SLOT, block * VC_BLOCK + offset * VC_SLOT


@jit
def _block_of(table, token, seq_len, TILE_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Physical block of the tile that begins with `token`, or of each of its tokens. The table is padded with anything,
    so it is never read behind the sequence's last block."""
    tokens = token if BLOCK_SIZE % TILE_N == 0 else token + tl.arange(0, TILE_N)
    return tl.load(table + tl.minimum(tokens, seq_len - 1) // BLOCK_SIZE).to(tl.int64)


@jit
def _query_rows(q, out, row, first, query_len, seq_len, q_start, kv_head, q_token, q_head, out_token, out_head, cache,
                GROUP: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Some rows of a tile, each a (query token, head of the group): their queries [rows, DIM_PADDED], the position of each
    row's token in its sequence, where the results go, and which are there. A group that is no power of two leaves rows over."""
    query, head, dim = first + row // GROUP, kv_head * GROUP + row % GROUP, tl.arange(0, DIM_PADDED)
    valid = ((row < TOKENS * GROUP) & (query < query_len))[:, None] & (dim < HEAD_DIM)[None, :]
    token = (q_start + query)[:, None]
    queries = tl.load(q + token * q_token + head[:, None] * q_head + dim[None, :], mask=valid, other=0.0)
    if cache.dtype.element_ty == tl.float8e4nv:
        queries = queries.to(tl.float16)  # what hardware turns fp8 into
    return queries, seq_len - query_len + query, out + token * out_token + head[:, None] * out_head + dim[None, :], valid


@jit
def _load_tile(at, exists, inside, like, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """A tile of K or V. Slots behind the last token hold garbage, those before the window belong to others, and 0 * NaN =
    NaN: they must not even be loaded."""
    if MASKED:
        tile = tl.load(at, mask=exists & inside, other=0.0)
    elif PADDED:
        tile = tl.load(at, mask=inside, other=0.0)
    else:
        tile = tl.load(at)
    return tile.to(like.dtype)


@jit
def _prefill_tile(acc_a, max_a, sum_a, acc_b, max_b, sum_b, q_a, q_b, position_a, position_b, k_base, v_base, slot_k, slot_v,
                  tile, oldest, end, scale, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
                  WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Attend to the keys of one tile with both halves of the queries: q [TILE_M // 2, DIM_PADDED] each. Without MASKED every
    row sees every key, so nothing has to be compared."""
    dim = tl.arange(0, DIM_PADDED)
    token = tile + tl.arange(0, TILE_N)
    exists = token < end
    if WINDOW:
        exists &= token >= oldest
    PADDED: tl.constexpr = HEAD_DIM < DIM_PADDED
    k = _load_tile(k_base + dim[:, None] + slot_k[None, :], exists[None, :], (dim < HEAD_DIM)[:, None], q_a, MASKED, PADDED)
    v = _load_tile(v_base + dim[None, :] + slot_v[:, None], exists[:, None], (dim < HEAD_DIM)[None, :], q_a, MASKED, PADDED)
    scores_a = tl.dot(q_a, k, input_precision=PRECISION)  # k is transposed: [DIM_PADDED, TILE_N]
    scores_b = tl.dot(q_b, k, input_precision=PRECISION)
    acc_a, max_a, sum_a = _attend(acc_a, max_a, sum_a, scores_a, v, token, exists, position_a, scale, WINDOW, MASKED, PRECISION)
    acc_b, max_b, sum_b = _attend(acc_b, max_b, sum_b, scores_b, v, token, exists, position_b, scale, WINDOW, MASKED, PRECISION)
    return acc_a, max_a, sum_a, acc_b, max_b, sum_b


@jit
def _attend(acc, row_max, row_sum, scores, v, token, exists, position, scale, WINDOW: tl.constexpr, MASKED: tl.constexpr,
            PRECISION: tl.constexpr):
    """Running sums of some rows after a tile with these scores [rows, TILE_N] and values [TILE_N, DIM_PADDED]."""
    if MASKED:
        seen = (token[None, :] <= position[:, None]) & exists[None, :]
        if WINDOW:
            seen &= token[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    base = new_max
    if MASKED:  # a row that has seen no key yet has maximum -inf, and -inf - -inf is NaN
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
    p = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(row_max - base)
    row_sum = row_sum * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_max, row_sum


@jit
def _decode_tile(acc, col_max, col_sum, q, k_base, v_base, slot_k, slot_v, tile, oldest, end, scale, TILE_N: tl.constexpr,
                 HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr):
    """The same for one query token, on its side: q [DIM_PADDED, heads], scores [TILE_N, heads], acc [DIM_PADDED, heads].
    Tensor cores multiply 16 rows by 8 columns at least. A group of 2 heads fills 2 of 8 columns, but would fill 2 of 16 rows."""
    dim = tl.arange(0, DIM_PADDED)
    token = tile + tl.arange(0, TILE_N)
    exists = token < end
    if WINDOW:
        exists &= token >= oldest
    k = tl.load(k_base + dim[None, :] + slot_k[:, None], mask=exists[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    scores = tl.dot(k.to(q.dtype), q, input_precision=PRECISION)
    scores = tl.where(exists[:, None], scores, -float("inf"))
    new_max = tl.maximum(col_max, tl.max(scores, 0) * scale)
    base = tl.where(new_max == -float("inf"), 0.0, new_max)  # -inf - -inf is NaN
    p = tl.exp2(scores * scale - base[None, :])
    shrink = tl.exp2(col_max - base)
    col_sum = col_sum * shrink + tl.sum(p, 0)
    p = p.to(q.dtype)
    if v_base.dtype.element_ty == tl.float8e4nv:
        # Tensor cores want the values of a dim side by side, token after token, and memory has those of a token. Hardware
        # can turn that round for 16 bits, not for 8; so what is read, and turned, is pairs of fp8 numbers.
        pair = tl.arange(0, DIM_PADDED // 2)
        v = tl.load(v_base.to(tl.pointer_type(tl.int16)) + pair[:, None] + (slot_v // 2)[None, :],
                    mask=exists[None, :] & (pair < HEAD_DIM // 2)[:, None], other=0)
        even = v.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(q.dtype)
        odd = (v >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(q.dtype)
        both = tl.join(tl.dot(even, p), tl.dot(odd, p))  # [DIM_PADDED // 2, heads, 2]
        update = tl.reshape(tl.permute(both, (0, 2, 1)), (DIM_PADDED, p.shape[1]))
    else:
        v = tl.load(v_base + dim[:, None] + slot_v[None, :], mask=exists[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
        update = tl.dot(v, p, input_precision=PRECISION)
    return acc * shrink[None, :] + update, new_max, col_sum


@jit
def _nothing(ROWS: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr):
    """Running sums before the first key: weighted values, largest score, sum of weights."""
    return tl.zeros([ROWS, COLUMNS], tl.float32), tl.full([QUERIES], -float("inf"), tl.float32), tl.zeros([QUERIES], tl.float32)


@jit
def _merge(acc, col_max, col_sum, split_acc, split_max, split_sum):
    """Add the sums of a split to those before it. Splits are merged with this function one after another, in one program
    or by `merge_splits_kernel`: the same additions, so the same bits (the compiler fuses multiplications with them alike in
    both; test_attention_does_not_depend_on_the_batch would notice if not)."""
    new_max = tl.maximum(col_max, split_max)
    base = tl.where(new_max == -float("inf"), 0.0, new_max)
    before, now = tl.exp2(col_max - base), tl.exp2(split_max - base)
    return acc * before[None, :] + split_acc * now[None, :], new_max, col_sum * before + split_sum * now


@jit
def _average(acc, sums, v_scale):
    """Weighted values over the sum of weights; 0 where nothing was seen."""
    return acc / tl.where(sums == 0, 1.0, sums) * v_scale


@jit
def split_of(seq_len, TILE_N: tl.constexpr, MIN_SPLIT: tl.constexpr, MID_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Tokens per split. It follows from the sequence's length alone, never from the batch or the grid."""
    sixteenth, least = tl.cdiv(seq_len, 16 * TILE_N) * TILE_N, tl.cdiv(seq_len, MAX_SPLITS * TILE_N) * TILE_N
    return tl.maximum(tl.minimum(tl.maximum(sixteenth, MIN_SPLIT), MID_SPLIT), least)


@jit
def paged_attention_kernel(out, split_acc, split_sums, q, k_cache, v_cache, block_tables, seq_lens, query_start_loc,
                           query_tiles, scale, v_scale, num_splits, q_token, q_head, out_token, out_head, table_row,
                           KC_BLOCK: tl.constexpr, KC_SLOT: tl.constexpr, KC_HEAD: tl.constexpr, VC_BLOCK: tl.constexpr,
                           VC_SLOT: tl.constexpr, VC_HEAD: tl.constexpr, DECODE: tl.constexpr, KV_HEADS: tl.constexpr,
                           GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                           TILE_M: tl.constexpr, TILE_N: tl.constexpr, WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr,
                           MID_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, PRECISION: tl.constexpr, ALONE: tl.constexpr,
                           EARLY: tl.constexpr):
    """DECODE: program (sequence and kv head, one of the programs that share its splits); num_splits is the most that any
    sequence has. Otherwise: program (entry of query_tiles and kv head). Programs start in the order of the first axis: the
    heads of a sequence, which lie side by side in memory, run at the same time, and the longest tiles of all heads begin
    first."""
    _wait_for_the_kernel_before(EARLY)
    TOKENS: tl.constexpr = TILE_M // GROUP  # query tokens per tile
    kv_head = tl.program_id(0) % KV_HEADS
    if DECODE:
        seq, first = tl.program_id(0) // KV_HEADS, 0
    else:
        entry = query_tiles + 2 * (tl.program_id(0) // KV_HEADS)
        seq, first = tl.load(entry), tl.load(entry + 1) * TOKENS
        if seq < 0:  # padding
            return
    q_start = tl.load(query_start_loc + seq).to(tl.int64)
    query_len = (tl.load(query_start_loc + seq + 1) - q_start).to(tl.int32)
    if (query_len == 1) != DECODE:  # the other launch's sequence, or padding
        return
    seq_len = tl.load(seq_lens + seq)
    first_position = seq_len - query_len + first
    start, end = 0, tl.minimum(first_position + TOKENS, seq_len)  # keys that any row sees
    if WINDOW:
        start = tl.maximum(first_position - WINDOW + 1, 0)  # clamped first: division truncates toward zero
    oldest = start
    table = block_tables + seq.to(tl.int64) * table_row
    k_base, v_base = k_cache + kv_head.to(tl.int64) * KC_HEAD, v_cache + kv_head.to(tl.int64) * VC_HEAD

    # In each loop the block ids are loaded one tile ahead: a load that waits for another load is not pipelined.
    if DECODE:  # this program has all of the sequence's splits, or shares them with others, a run of splits each
        split_len = split_of(seq_len, TILE_N, MIN_SPLIT, MID_SPLIT, MAX_SPLITS)
        split = start // split_len
        if not ALONE:
            run = tl.cdiv(tl.cdiv(seq_len, split_len) - split, tl.num_programs(1))
            split += run * tl.program_id(1)
            start, end = tl.maximum(start, split * split_len), tl.minimum(end, (split + run) * split_len)
        start = start // TILE_N * TILE_N
        row = tl.arange(0, TILE_M)  # a column, below
        q_tile, _, out_at, valid = _query_rows(q, out, row, first, query_len, seq_len, q_start, kv_head, q_token, q_head, out_token,
                                               out_head, k_cache, GROUP, TOKENS, HEAD_DIM, DIM_PADDED)
        q_tile, head, dim = tl.trans(q_tile), kv_head * GROUP + row % GROUP, tl.arange(0, DIM_PADDED)
        acc, col_max, col_sum = _nothing(DIM_PADDED, TILE_M, TILE_M)  # of the split
        all_acc, all_max, all_sum = _nothing(DIM_PADDED, TILE_M, TILE_M)  # of those before it
        block = _block_of(table, start, seq_len, TILE_N, BLOCK_SIZE)
        for tile in range(start, end, TILE_N):
            slot_k, slot_v = _slots_of(block, tile, TILE_N, BLOCK_SIZE, KC_BLOCK, KC_SLOT, VC_BLOCK, VC_SLOT)
            block = _block_of(table, tile + TILE_N, seq_len, TILE_N, BLOCK_SIZE)
            acc, col_max, col_sum = _decode_tile(
                acc, col_max, col_sum, q_tile, k_base, v_base, slot_k, slot_v, tile, oldest, end, scale, TILE_N, HEAD_DIM,
                DIM_PADDED, WINDOW, PRECISION)
            # At a split's end its sums are merged or stored, and begin anew. That is done, or masked, in every tile,
            # because a branch would end the pipelining of loads.
            ends = tile + TILE_N >= tl.minimum((split + 1) * split_len, end)
            if ALONE:
                new_acc, new_max, new_sum = _merge(all_acc, all_max, all_sum, acc, col_max, col_sum)
                all_acc, all_max = tl.where(ends, new_acc, all_acc), tl.where(ends, new_max, all_max)
                all_sum = tl.where(ends, new_sum, all_sum)
            else:
                piece = (seq.to(tl.int64) * KV_HEADS * GROUP + head) * num_splits + split  # [sequence, head, split]
                complete = row < tl.where(ends, GROUP, 0)
                tl.store(split_acc + piece[None, :] * HEAD_DIM + dim[:, None], acc, mask=(dim < HEAD_DIM)[:, None] & complete[None, :])
                tl.store(split_sums + 2 * piece, col_max, mask=complete)
                tl.store(split_sums + 2 * piece + 1, col_sum, mask=complete)
            acc, col_max = tl.where(ends, 0.0, acc), tl.where(ends, -float("inf"), col_max)
            col_sum = tl.where(ends, 0.0, col_sum)
            split += ends.to(tl.int32)
        if ALONE:
            tl.store(out_at, tl.trans(_average(all_acc, all_sum[None, :], v_scale)), mask=valid)
    else:
        HALF: tl.constexpr = TILE_M // 2
        row = tl.arange(0, HALF)
        q_a, position_a, out_a, valid_a = _query_rows(q, out, row, first, query_len, seq_len, q_start, kv_head, q_token, q_head,
                                                      out_token, out_head, k_cache, GROUP, TOKENS, HEAD_DIM, DIM_PADDED)
        q_b, position_b, out_b, valid_b = _query_rows(q, out, HALF + row, first, query_len, seq_len, q_start, kv_head, q_token, q_head,
                                                      out_token, out_head, k_cache, GROUP, TOKENS, HEAD_DIM, DIM_PADDED)
        acc_a, max_a, sum_a = _nothing(HALF, DIM_PADDED, HALF)
        acc_b, max_b, sum_b = _nothing(HALF, DIM_PADDED, HALF)
        start = start // TILE_N * TILE_N
        block = _block_of(table, start, seq_len, TILE_N, BLOCK_SIZE)
        if not WINDOW:  # tiles before the diagonal are seen by every row and need no mask
            diagonal = (first_position + 1) // TILE_N * TILE_N
            for tile in range(start, diagonal, TILE_N):
                slot_k, slot_v = _slots_of(block, tile, TILE_N, BLOCK_SIZE, KC_BLOCK, KC_SLOT, VC_BLOCK, VC_SLOT)
                block = _block_of(table, tile + TILE_N, seq_len, TILE_N, BLOCK_SIZE)
                acc_a, max_a, sum_a, acc_b, max_b, sum_b = _prefill_tile(
                    acc_a, max_a, sum_a, acc_b, max_b, sum_b, q_a, q_b, position_a, position_b, k_base, v_base, slot_k, slot_v,
                    tile, oldest, end, scale, TILE_N, HEAD_DIM, DIM_PADDED, WINDOW, False, PRECISION)
            start = diagonal
        for tile in range(start, end, TILE_N):
            slot_k, slot_v = _slots_of(block, tile, TILE_N, BLOCK_SIZE, KC_BLOCK, KC_SLOT, VC_BLOCK, VC_SLOT)
            block = _block_of(table, tile + TILE_N, seq_len, TILE_N, BLOCK_SIZE)
            acc_a, max_a, sum_a, acc_b, max_b, sum_b = _prefill_tile(
                acc_a, max_a, sum_a, acc_b, max_b, sum_b, q_a, q_b, position_a, position_b, k_base, v_base, slot_k, slot_v,
                tile, oldest, end, scale, TILE_N, HEAD_DIM, DIM_PADDED, WINDOW, True, PRECISION)
        tl.store(out_a, _average(acc_a, sum_a[:, None], v_scale), mask=valid_a)
        tl.store(out_b, _average(acc_b, sum_b[:, None], v_scale), mask=valid_b)


@jit
def merge_splits_kernel(out, split_acc, split_sums, seq_lens, query_start_loc, v_scale, out_token, out_head, num_splits,
                        HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, TILE_N: tl.constexpr, WINDOW: tl.constexpr,
                        MIN_SPLIT: tl.constexpr, MID_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, EARLY: tl.constexpr):
    """Program (sequence, head): the sums of its splits, merged, and the average.

    split_acc [sequence, head, split, HEAD_DIM]; split_sums [sequence, head, split, 2]: largest score, sum of weights
    """
    _wait_for_the_kernel_before(EARLY)
    seq, head = tl.program_id(0), tl.program_id(1)
    q_start = tl.load(query_start_loc + seq).to(tl.int64)
    if tl.load(query_start_loc + seq + 1) - q_start != 1:
        return
    seq_len = tl.load(seq_lens + seq)
    split_len = split_of(seq_len, TILE_N, MIN_SPLIT, MID_SPLIT, MAX_SPLITS)
    first, last = 0, (seq_len - 1) // split_len
    if WINDOW:
        first = tl.maximum(seq_len - WINDOW, 0) // split_len
    dim = tl.arange(0, DIM_PADDED)[:, None]
    piece = (seq.to(tl.int64) * tl.num_programs(1) + head) * num_splits + tl.arange(0, 1)
    acc, col_max, col_sum = _nothing(DIM_PADDED, 1, 1)
    for few in range(first, last + 1, 8):
        for i in tl.static_range(8):  # unrolled, so that the loads do not wait for each other
            at, live = piece + few + i, (few + i + tl.arange(0, 1)) <= last
            one_max = tl.load(split_sums + 2 * at, mask=live, other=-float("inf"))
            one_sum = tl.load(split_sums + 2 * at + 1, mask=live, other=0.0)
            one_acc = tl.load(split_acc + at[None, :] * HEAD_DIM + dim, mask=live[None, :] & (dim < HEAD_DIM), other=0.0)
            acc, col_max, col_sum = _merge(acc, col_max, col_sum, one_acc, one_max, one_sum)
    tl.store(out + q_start * out_token + head * out_head + dim, _average(acc, col_sum[None, :], v_scale), mask=dim < HEAD_DIM)


# --------------------------------------------------------------------------------------------------
# Launching it
# --------------------------------------------------------------------------------------------------

def paged_attention(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale, *,
                    max_query_len, max_seq_len, sliding_window=0, out=None, num_decodes=None, query_tiles=None, k_scale=1.0,
                    v_scale=1.0, **_):
    """Causal attention of every sequence's new tokens over its whole context in the paged cache.

    q                [num_tokens, num_heads, head_dim], the new tokens of all sequences, one after another
    k_cache, v_cache [num_blocks, block_size, num_kv_heads, head_dim]; the last stride is 1, others are read (even, if fp8)
    block_tables     [num_seqs, max_blocks] int32; entries behind a sequence's last block may be anything
    seq_lens         [num_seqs] int32, tokens in the cache, this step's included
    query_start_loc  [num_seqs + 1] int32, cumulative query lengths
    scale            factor on the scores, usually head_dim ** -0.5
    max_query_len, max_seq_len   upper bounds; they size the grid and do not change the result
    sliding_window   0, or how many tokens a token sees, itself included
    num_decodes      sequences with one new token are all among the first so many (default: anywhere)
    query_tiles      the prefill's work list, [n, 2] int32, from `make_query_tiles` (default: built here, which
                     waits for the GPU)
    k_scale, v_scale what the cache's K and V are to be multiplied by
    Returns out, like q. Sequences with no new token are padding and nothing is written for them.
    """
    out = torch.empty_like(q) if out is None else out
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_seqs, group = len(seq_lens), num_heads // num_kv_heads
    num_decodes = num_seqs if num_decodes is None else num_decodes
    if v_cache.element_size() == 1 and any(n % 2 for n in (head_dim, *v_cache.stride()[:3], v_cache.data_ptr())):
        raise ValueError(f"an fp8 V is read in pairs, so head_dim {head_dim}, the strides {v_cache.stride()[:3]} and the address "
                         "must be even")
    require_triton(q.device)
    scale_log2 = scale * k_scale * math.log2(math.e)  # exp2 is the hardware's exponential
    strides = (*q.stride()[:2], *out.stride()[:2], block_tables.stride(0))
    shape = kernel_constants(num_kv_heads, group, head_dim, block_size, sliding_window, q.dtype, k_cache.stride(), v_cache.stride())
    early = early_launch(q.device)
    shared_memory = _shared_memory(q.device)
    if max_query_len > 1:
        config = tile_config("prefill", group, head_dim, q.element_size(), shared_memory, k_cache.element_size())
        if query_tiles is None:
            query_tiles = make_query_tiles(query_start_loc.diff().tolist(), seq_lens.tolist(),
                                           tokens_per_tile(group, head_dim, q.dtype, q.device)).to(q.device)
        if len(query_tiles):
            paged_attention_kernel[(len(query_tiles) * num_kv_heads,)](
                out, out, out, q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, query_tiles,
                scale_log2, v_scale, 1, *strides, DECODE=False, ALONE=True, **shape, **config, **early)
    if num_decodes:
        num_splits = split_bound(max_seq_len)
        sharing = programs_per_context(num_decodes * num_kv_heads, num_splits)
        stages = decode_stages(num_decodes * num_kv_heads, head_dim * k_cache.element_size(), q.device) if sharing == 1 else 3
        config = tile_config("decode", group, head_dim, q.element_size(), shared_memory, k_cache.element_size(), stages)
        split_acc = split_sums = out
        if sharing > 1:
            split_acc = q.new_empty(num_decodes, num_heads, num_splits, head_dim, dtype=torch.float32)
            split_sums = q.new_empty(num_decodes, num_heads, num_splits, 2, dtype=torch.float32)
        paged_attention_kernel[(num_decodes * num_kv_heads, sharing)](
            out, split_acc, split_sums, q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, block_tables,
            scale_log2, v_scale, num_splits, *strides, DECODE=True, ALONE=sharing == 1, **shape, **config, **early)
        if sharing > 1:
            names = ("HEAD_DIM", "DIM_PADDED", "WINDOW", "MIN_SPLIT", "MID_SPLIT", "MAX_SPLITS")
            merge_splits_kernel[(num_decodes, num_heads)](
                out, split_acc, split_sums, seq_lens, query_start_loc, v_scale, *out.stride()[:2], num_splits,
                **{name: shape[name] for name in names}, TILE_N=config["TILE_N"], num_warps=1, **early)
    return out


def require_triton(device: torch.device) -> None:
    """Raise ValueError if the kernel cannot run on this device."""
    if triton is None or (device.type == "cpu" and not INTERPRETED):
        raise ValueError("the Triton kernel needs Triton and a CUDA device, or on a CPU Triton's interpreter, which needs numpy and "
                         "the environment variable TRITON_INTERPRET=1 before any package imports triton; attention='torch' works "
                         "everywhere")


def programs_per_context(num_contexts: int, num_splits: int) -> int:
    """How many programs share the splits of a (sequence, kv head). Many contexts fill the device by themselves; then one
    program takes all splits of its context, and nothing has to be merged afterwards. The result is the same bits; the
    numbers are an H200's."""
    return 1 if num_contexts >= MANY_CONTEXTS else min(num_splits, max(4, cdiv(1024, num_contexts)))


def decode_stages(num_contexts: int, row: int, device) -> int:
    """Pipeline stages for one program per context. For rows of 256 bytes (16 bits, head_dim 128) three stages leave room
    for three programs on each multiprocessor of an H200 (as Triton 3.6 compiles them). If there are just a few more
    programs than that, these would run alone after the others; with four stages there is room for two, each reads further
    ahead, and two rounds come out nearly even."""
    return 4 if row == 256 and 3 < num_contexts / _num_multiprocessors(device) < 4 else 3


def split_bound(max_seq_len: int) -> int:
    """How many splits a context of up to max_seq_len tokens can have."""
    return min(MAX_SPLITS, cdiv(max_seq_len, MIN_SPLIT))


def make_query_tiles(query_lens: list[int], seq_lens: list[int], tokens_per_tile: int) -> torch.Tensor:
    """The prefill's work list, [n, 2] int32 on the CPU: (sequence, tile of its queries), longest context first.

    A tile takes as long as its context; the longest one, started first, does not end up running alone.
    Sequences with one new token are the decode launch's.
    """
    tiles = [(seq, tile) for seq, n in enumerate(query_lens) if n > 1 for tile in range(cdiv(n, tokens_per_tile))]
    tiles.sort(key=lambda entry: query_lens[entry[0]] - seq_lens[entry[0]] - entry[1] * tokens_per_tile)
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 2)


@lru_cache
def kernel_constants(num_kv_heads: int, group: int, head_dim: int, block_size: int, sliding_window: int, dtype: torch.dtype,
                     k_strides: tuple, v_strides: tuple) -> dict:
    """What a model's shape fixes at compile time. Strides of the cache are among it, because the kernel adds up many addresses."""
    return dict(KC_BLOCK=k_strides[0], KC_SLOT=k_strides[1], KC_HEAD=k_strides[2], VC_BLOCK=v_strides[0], VC_SLOT=v_strides[1],
                VC_HEAD=v_strides[2], KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim,
                DIM_PADDED=max(16, _next_power_of_2(head_dim)), BLOCK_SIZE=block_size, WINDOW=sliding_window, MIN_SPLIT=MIN_SPLIT,
                MID_SPLIT=MID_SPLIT, MAX_SPLITS=MAX_SPLITS, PRECISION="ieee" if dtype == torch.float32 else "tf32")


@lru_cache
def tile_config(phase: str, group: int, head_dim: int, element_size: int, shared_memory: int, cache_element_size: int = 0,
                most_stages: int = 3) -> dict:
    """Tile sizes, warps and pipeline stages of a launch. A small rule, because autotuning would time at start-up.

    shared_memory: bytes that the device gives a block. A tile of K and one of V wait in it for each stage, beside the
    queries; stages are given up first, then tile width. TILE_N also decides the order of additions, so a device
    always uses the same one for a model, whatever most_stages, which see in `decode_stages`.
    """
    heads, dims = _next_power_of_2(group), max(16, _next_power_of_2(head_dim))
    num_warps = 4
    if phase == "decode":
        tile_m, row = max(8, heads), dims * (cache_element_size or element_size)  # bytes of one head of one token
    else:
        row = dims * element_size
        tile_m = max(64 if row <= 256 else 32, heads)
        if row <= 256 and shared_memory > 200 * 1024:  # Hopper: two warpgroups, each with 64 rows of either half
            tile_m, num_warps = max(256, heads), 8
    for tile_n, stages in ((64, most_stages), (64, 3), (64, 2), (32, 2), (32, 1), (16, 1)):
        if row > 256 and tile_n * stages > 64:  # float32 or a large head: in prefill the accumulators need the registers
            continue
        if tile_m * dims * element_size + 2 * tile_n * stages * row <= shared_memory:
            break
    return dict(TILE_M=tile_m, TILE_N=tile_n, num_warps=num_warps, num_stages=stages)


def tokens_per_tile(group: int, head_dim: int, dtype: torch.dtype, device) -> int:
    """Query tokens in a tile of the prefill, as `make_query_tiles` wants to know."""
    return tile_config("prefill", group, head_dim, dtype.itemsize, _shared_memory(device))["TILE_M"] // group


@lru_cache
def early_launch(device) -> dict:
    """Arguments that launch a kernel early, where the device can do it: Nvidia's, from Hopper on."""
    if (device.type == "cuda" and torch.version.cuda and gdc_wait and os.environ.get("TRITON_INTERPRET") != "1"
            and torch.cuda.get_device_capability(device) >= (9, 0)):
        return dict(EARLY=True, launch_pdl=True)
    return dict(EARLY=False)


@lru_cache
def _num_multiprocessors(device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache
def _shared_memory(device) -> int:
    """Bytes of shared memory that a block can have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 1 << 20


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Kernels(NamedTuple):
    """The two functions that touch the cache, in one of their two forms."""
    rotate_and_store: Callable
    attention: Callable


TRITON = Kernels(rotate_and_store, paged_attention)
TORCH = Kernels(rotate_and_store_reference, paged_attention_reference)
