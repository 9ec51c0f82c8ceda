"""Chapter 1: attention over a paged cache.

**What is cached.** For every token, each attention layer computes queries, keys and values (Q, K, V): for each head a
vector of head_dim numbers. Query heads that share one kv head (one K, one V) are a **group**. The result of a query is
the average of V over the tokens up to the query's token, with weights softmax(scale * Q . K). The K and V of a token
never change, and every later token reads them again. A **KV cache** therefore keeps them.

**Paging.** Nobody knows how long a text will be, so no part of the cache is reserved for it. The cache is a pool of
**blocks** of `block_size` token slots. A sequence may hold any blocks, in any order; its **block table** lists them:

    block_size 4, a sequence of 10 tokens          k_cache [num_blocks, block_size, num_kv_heads, head_dim]

    block table       [ 5 | 2 | 7 ]                 block 2 : token 4  5  6  7
                        |   |   |                   block 5 : token 0  1  2  3
    its tokens       0..3 4..7 8..9                 block 7 : token 8  9  .  .    <- two slots still empty

    token t is in slot  block_table[t // block_size] * block_size + t % block_size

Each layer has its own k_cache and v_cache, and a block id is the same index in all of them, so a sequence needs one
table. **Paged attention** finds K and V through the table, and its result is the same (Kwon et al. 2023, section 4.1).

**Causality.** A token must not see later ones. In one step a sequence brings `query_len` new tokens: a whole prompt or
a chunk of it (**prefill**), or the one token sampled last (**decode**). Each layer first stores these tokens' K and V.
The cache then holds `seq_len` tokens. Query i, at position seq_len - query_len + i, attends to the keys up to its own:

    a chunk of 3 tokens after 4 cached ones           key 0 1 2 3 4 5 6
                                query 0, position 4       x x x x x . .
                                query 1, position 5       x x x x x x .      . is masked
                                query 2, position 6       x x x x x x x

A prompt may therefore come in any chunks. Decode is a chunk of one token, which needs no causal mask.

**Contents.** Chapter 2 and README's tour need the first section alone.

    In plain torch                read it: attention in ten lines, then windows and fp8, then writing K and V
    In Triton                     the same on a GPU: first how to read a kernel
        filling the cache         norm, rope and `store_kv` in one launch
        launching attention       a launch for the sequences with one new token, and one for the others
        the attention kernel      softmax in one pass; what decode and prefill have in common
        decode; prefill           one new token; many
        splits of a context       skip it at first: a long context in parts that are computed at the same time

Other kernels belong to features, in nanopaged/features: fused.py, fused_experts.py, fp8.py, pick.py, and two other
forms of attention, hopper.py and cascade.py.
"""
import math
from collections import namedtuple
from typing import Any, Callable, NamedTuple

import nanopaged  # noqa: F401  before torch: it silences a warning of torch's
import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged import tiles
from nanopaged.optional_triton import gdc_launch_dependents, gdc_wait, jit, launch_options, require_triton, tl
from nanopaged.tiles import make_query_tiles, programs_per_context


# --------------------------------------------------------------------------------------------------
# In plain torch
# --------------------------------------------------------------------------------------------------

def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention of one sequence: q [query_len, num_heads, head_dim], k, v [num_keys, num_kv_heads, head_dim], visible
    [query_len, num_keys]. torch wants [batch, heads, tokens, head_dim]. With 6 heads and 2 kv heads, groups of 3, it
    gets a batch of 3: the first head of each group, the second, the third. All read the same K and V. (With a group's
    heads side by side torch 2.11's result was wrong on a GPU.)"""
    group = q.shape[1] // k.shape[1]
    q = q.unflatten(1, (-1, group)).permute(2, 1, 0, 3)  # [group, kv heads, query_len, head_dim]
    k, v = k.transpose(0, 1).expand(group, -1, -1, -1), v.transpose(0, 1).expand(group, -1, -1, -1)
    return F.scaled_dot_product_attention(q, k, v, visible, scale=scale).permute(2, 1, 0, 3).flatten(1, 2)


def paged_attention_plain(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
                          query_start_loc: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """Causal attention of every sequence's new tokens over its whole context in the paged cache.

    q                [num_tokens, num_heads, head_dim], the new tokens of all sequences, one after another
    k_cache, v_cache [num_blocks, block_size, num_kv_heads, head_dim]; for Triton the last stride must be 1
    block_tables     [num_seqs, max_blocks] int32; entries after a sequence's last block may be anything
    seq_lens         [num_seqs] int32, tokens in the cache, this step's included
    query_start_loc  [num_seqs + 1] int32, cumulative query lengths; a sequence with no new token is padding
    scale            factor of the scores, usually head_dim ** -0.5
    Returns out, like q; for tokens of padding it holds anything.
    """
    out, block_size, starts = torch.empty_like(q) if out is None else out, k_cache.shape[1], query_start_loc.tolist()
    for table, seq_len, start, end in zip(block_tables.long(), seq_lens.tolist(), starts, starts[1:]):
        if start < end:
            key_at = torch.arange(seq_len, device=q.device)
            query_at = key_at[seq_len - (end - start):, None]
            # block_size 4, table [5, 2]:  key_at 0 1 2 3 4 5   block 5 5 5 5 2 2   offset 0 1 2 3 0 1
            block, offset = table[key_at // block_size], key_at % block_size
            k, v = k_cache[block, offset], v_cache[block, offset]
            out[start:end] = attend(q[start:end], k, v, key_at <= query_at, scale)
    return out


def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x / scale as fp8 (e4m3), clamped to -448 .. 448. Attention multiplies by the scale."""
    largest_fp8 = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest_fp8, largest_fp8).to(dtype)


def as_bytes(x: Tensor) -> Tensor:
    """An fp8 tensor as bytes, which every torch can index on a CPU."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def add_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [.., tokens, heads, head_dim] with a key more, whose V is 0 and whose score is the query head's sink: in
    one more dimension of the head, that key is 1, and queries are sink / scale."""
    q = torch.cat([q, (sinks / scale).to(q.dtype).expand(q.shape[:-1])[..., None]], -1)
    k, v = (F.pad(x, (0, 1, 0, 0, 0, 1)) for x in (k, v))
    k[..., -1, :, -1] = 1
    return q, k, v


def paged_attention_reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
                              query_start_loc: Tensor, scale: float, *, sliding_window: int = 0,
                              sinks: Tensor | None = None, out: Tensor | None = None, k_scale: float = 1.0,
                              v_scale: float = 1.0, **_) -> Tensor:
    """`paged_attention_plain`, with more. Other arguments of `paged_attention` are ignored.

    sliding_window   how many tokens a token sees, itself included; 0: no limit
    sinks            [num_heads], the score of one more key, whose V is 0; None: there is none
    k_scale, v_scale K and V are the stored numbers times these: 1, except for an fp8 cache (`to_fp8`)
    """
    if not sliding_window and sinks is None and k_cache.dtype is q.dtype and k_scale == v_scale == 1:
        return paged_attention_plain(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale, out)
    out, block_size, starts = torch.empty_like(q) if out is None else out, k_cache.shape[1], query_start_loc.tolist()
    for table, seq_len, start, end in zip(block_tables.long(), seq_lens.tolist(), starts, starts[1:]):
        if start < end:
            queries, first, window = q[start:end], seq_len - (end - start), sliding_window or seq_len
            key_at = torch.arange(max(0, first - window + 1), seq_len, device=q.device)  # no query sees earlier keys
            query_at = torch.arange(first, seq_len, device=q.device)[:, None]
            visible = (key_at <= query_at) & (key_at > query_at - window)
            block, offset = table[key_at // block_size], key_at % block_size
            k, v = (as_bytes(cache)[block, offset].view(cache.dtype).to(q.dtype) for cache in (k_cache, v_cache))
            if sinks is not None:
                queries, k, v = add_sinks(queries, k, v, sinks, scale * k_scale)
                visible = F.pad(visible, (0, 1), value=True)
            out[start:end] = attend(queries, k, v, visible, scale * k_scale)[..., :q.shape[-1]]
    return out if v_scale == 1 else out.mul_(v_scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, in float32, times weight in weight's type (Zhang and Sennrich 2019)."""
    return (F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(weight.dtype) * weight).to(x.dtype)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding, "rope" (Su et al. 2021): x [num_tokens, heads, head_dim], rotation [num_tokens, 1,
    head_dim]. Element i of a head's first half and element i of its second half are a point in a plane. Rope rotates
    this point by the angle of (position, i). The product of a query and a key then depends on their positions only
    through the distance."""
    cos, sin = rotation.chunk(2, dim=-1)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)], dim=-1).to(x.dtype)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each new token's k and v [num_tokens, num_kv_heads, head_dim] into its slot of slot_mapping [num_tokens].
    Slot -1: nothing is written, because the token is padding, or its K and V are in a block that was found. A cache
    must allow the view [num_slots, num_kv_heads, head_dim]."""
    slots = slot_mapping.long()
    if len(slots) and slots.min() < 0:  # on a GPU the host waits here for the result
        written = slots >= 0
        k, v, slots = k[written], v[written], slots[written]
    for cache, new in ((k_cache, k), (v_cache, v)):
        as_bytes(cache).view(-1, *cache.shape[2:]).index_copy_(0, slots, as_bytes(new.to(cache.dtype)))


def rotate_and_store_reference(qkv: Tensor, num_heads: int, rotation: Tensor | None, q_norm: Tensor | None,
                               k_norm: Tensor | None, eps: float, k_cache: Tensor, v_cache: Tensor,
                               slot_mapping: Tensor, k_scale: float = 1.0, v_scale: float = 1.0) -> Tensor:
    """The steps between a layer's projection and attention: norm and rope of q and k, then `store_kv`. Returns q.

    qkv              [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    rotation         [num_tokens, head_dim] float32: cosines, then sines, of each token's angles; None: no rope
    q_norm, k_norm   [head_dim], weights of an RMS norm over each head, with eps; None: no norm
    """
    num_kv_heads = k_cache.shape[2]
    qk, v = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        qk = rms_norm(qk, torch.cat([q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)]), eps)
    if rotation is not None:
        qk = rotate(qk, rotation[:, None])
    q, k = qk.split([num_heads, num_kv_heads], dim=1)
    if k_cache.element_size() == 1:
        k, v = to_fp8(k, k_scale, k_cache.dtype), to_fp8(v, v_scale, v_cache.dtype)
    store_kv(k, v, k_cache, v_cache, slot_mapping)
    return q


class Kernels(NamedTuple):
    """The functions of a step that write and read the cache, in torch or in Triton."""
    rotate_and_store: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    in_triton: bool = False
    tokens_per_tile: Callable[..., int] = tiles.tokens_per_tile  # query tokens of a prefill tile; torch has no tiles


TORCH = Kernels(rotate_and_store_reference, paged_attention_reference)


# --------------------------------------------------------------------------------------------------
# In Triton
#
# `kernel[(n, 2)](...)` launches a **grid** of 2n programs; `tl.program_id(0)` is a program's place on the first axis. A
# program is several warps of 32 threads, but its code deals with whole tensors: `tl.load` loads from a tensor of
# addresses, `tl.dot` is a matrix product. The sizes of tensors are powers of two, and **masks** say which elements
# exist: where a mask is false, a load takes `other` and a store writes nothing. Triton compiles a kernel for each
# combination of values of its `tl.constexpr` parameters, so an `if` over them costs nothing. A loop is a pipeline with
# num_stages stages: it loads the next num_stages - 1 tiles while it computes. The compiler divides this work among the
# threads, and arranges its loads, so K and V have the plain layout. vLLM's CUDA kernel spells it out: a warp takes a KV
# block, and a few threads load 16 bytes of K, which is stored as [block, kv head, dim / x, slot, x], where x numbers
# are 16 bytes, so that neighbouring threads read neighbouring addresses. On a CPU, Triton's interpreter runs a kernel
# line by line, also under a debugger: `python engine.py --prompt "ROMEO:" --attention triton --enforce-eager`.
#
# **The GPU.** An H200 has 132 multiprocessors, and each runs a few programs at a time. Its memories, fastest first:
#
#     registers       256 KiB per multiprocessor   scores and running sums of the programs that run there
#     shared memory   228 KiB per multiprocessor   K, V of 64 tokens x 128 bf16 numbers: 32 KiB for each pipeline stage
#     L2 cache        50 MB for all                block tables; K and V that several programs read at the same time
#     HBM             141 GB, 4.2 TB/s (measured)  the pool, q, out, the partial sums of splits (and the weights)
# --------------------------------------------------------------------------------------------------
# In Triton: filling the cache
# --------------------------------------------------------------------------------------------------

def rotate_and_store(qkv: Tensor, num_heads: int, rotation: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None,
                     eps: float, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: float = 1.0,
                     v_scale: float = 1.0) -> Tensor:
    """`rotate_and_store_reference` in one launch."""
    (num_tokens, _, head_dim), num_kv_heads = qkv.shape, k_cache.shape[2]
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    optional = (qkv if x is None else x for x in (rotation, q_norm, k_norm))  # a launch needs tensors, read or not
    rotate_and_store_kernel[(num_tokens, 2)](
        qkv, q, *optional, eps, k_cache, v_cache, slot_mapping, 1 / k_scale, 1 / v_scale, qkv.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3], ROTATE=rotation is not None, NORM=q_norm is not None,
        **tiles.store_constants(num_heads, num_kv_heads, head_dim, k_cache.shape[1]), **launch_options(qkv.device))
    return q


@jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """With programmatic dependent launch (PDL), a kernel's programs start while the previous kernel still runs. They
    wait here for that kernel's results; then they allow the kernel after this one to start early. Before the wait they
    may load what kernels before the previous one have written. Every program waits, also one that has no work: the next
    kernel relies on that."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@jit
def _norm_and_rope(at, head, i, valid, norm, rotation, eps, HALF: tl.constexpr, ROTATE: tl.constexpr,
                   NORM: tl.constexpr, PDL: tl.constexpr):
    """Some heads of one token as two halves in float32, after norm and rope."""
    if NORM:
        norm_a = tl.load(norm + i, mask=i < HALF, other=0.0).to(tl.float32)
        norm_b = tl.load(norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    if ROTATE:
        cos = tl.load(rotation + i, mask=i < HALF, other=0.0)
        sin = tl.load(rotation + HALF + i, mask=i < HALF, other=0.0)
    wait_for_previous_kernel(PDL)
    a = tl.load(at + head * 2 * HALF + i, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(at + head * 2 * HALF + HALF + i, mask=valid, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a, b = a * scale * norm_a, b * scale * norm_b
    if ROTATE:
        a, b = a * cos - b * sin, b * cos + a * sin
    return a, b


@jit
def _store(at, x, factor, mask):
    """Store x into the cache, scaled and clamped if the cache is fp8."""
    if at.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32) * factor, -448.0), 448.0).to(tl.float8e4nv)
    tl.store(at, x, mask=mask)


@jit
def rotate_and_store_kernel(qkv, q_out, rotation, q_norm, k_norm, eps, k_cache, v_cache, slot_mapping, k_factor,
                            v_factor, qkv_token, kc_block, kc_slot, kc_head, vc_block, vc_slot, vc_head,
                            BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
                            HEADS_PADDED: tl.constexpr, KV_PADDED: tl.constexpr, HALF_PADDED: tl.constexpr,
                            ROTATE: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr):
    """Grid (token, 2): program 0 takes the token's q, program 1 its k and v. A program holds its heads as two halves
    [heads, HALF], because rope combines element i of one half with element i of the other."""
    token = tl.program_id(0).to(tl.int64)
    at, rotation = qkv + token * qkv_token, rotation + token * 2 * HALF
    i = tl.arange(0, HALF_PADDED)[None, :]
    if tl.program_id(1) == 0:
        head = tl.arange(0, HEADS_PADDED)[:, None]
        valid = (head < HEADS) & (i < HALF)
        q_a, q_b = _norm_and_rope(at, head, i, valid, q_norm, rotation, eps, HALF, ROTATE, NORM, PDL)
        q_at = q_out + (token * HEADS + head) * 2 * HALF + i
        tl.store(q_at, q_a, mask=valid)
        tl.store(q_at + HALF, q_b, mask=valid)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)  # 64 bits: a pool may have more than 2^31 elements
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        kv_head = tl.arange(0, KV_PADDED)[:, None]
        written = (kv_head < tl.where(slot >= 0, KV_HEADS, 0)) & (i < HALF)  # slot -1: nothing
        k, v = at + HEADS * 2 * HALF, at + (HEADS + KV_HEADS + kv_head) * 2 * HALF + i
        k_a, k_b = _norm_and_rope(k, kv_head, i, written, k_norm, rotation, eps, HALF, ROTATE, NORM, PDL)
        v_a, v_b = tl.load(v, mask=written, other=0.0), tl.load(v + HALF, mask=written, other=0.0)
        k_at = k_cache + block * kc_block + offset * kc_slot + kv_head * kc_head + i
        _store(k_at, k_a, k_factor, written)
        _store(k_at + HALF, k_b, k_factor, written)
        v_at = v_cache + block * vc_block + offset * vc_slot + kv_head * vc_head + i
        _store(v_at, v_a, v_factor, written)
        _store(v_at + HALF, v_b, v_factor, written)


# --------------------------------------------------------------------------------------------------
# In Triton: launching attention
# --------------------------------------------------------------------------------------------------

class Launch(NamedTuple):
    """What the launches of one call of `paged_attention` have in common. A launch needs a tensor even where it reads
    none: `out` stands in for the sums of splits, and seq_lens for the work list."""
    out: Tensor
    inputs: tuple[Any, ...]  # q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, sinks
    scales: tuple[float, float]  # of the scores, times log2(e) (exp2 is the hardware's exponential); of the result
    strides: tuple[int, ...]  # of q, of out, of block_tables
    constants: dict[str, Any]  # of tiles.kernel_constants


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
                    query_start_loc: Tensor, scale: float, *, max_query_len: int, max_seq_len: int,
                    sliding_window: int = 0, sinks: Tensor | None = None, out: Tensor | None = None,
                    num_decodes: int | None = None, query_tiles: Tensor | None = None, k_scale: float = 1.0,
                    v_scale: float = 1.0, prefill: Callable[..., None] | None = None,
                    decode: Callable[..., None] | None = None,
                    tokens_per_tile: Callable[..., int] = tiles.tokens_per_tile, **_: Any) -> Tensor:
    """`paged_attention_reference` in Triton. It takes more arguments:

    max_query_len, max_seq_len   upper bounds; any give the same result. max_query_len above 1 launches prefill, too;
                                 max_seq_len bounds the splits of a context (parts that a program can take alone)
    num_decodes      all sequences with one new token are among the first num_decodes (default: anywhere)
    query_tiles      prefill's work list, [n, 2] int32, from `make_query_tiles` (default: made here; waits for the GPU)
    prefill, decode  launch other kernels (features/hopper.py, cascade.py); tokens_per_tile: of that prefill
    """
    out = torch.empty_like(q) if out is None else out
    (_, num_heads, head_dim), (_, block_size, num_kv_heads, _) = q.shape, k_cache.shape
    group = num_heads // num_kv_heads
    if v_cache.element_size() == 1 and any(n % 2 for n in (head_dim, *v_cache.stride()[:3], v_cache.data_ptr())):
        raise ValueError(f"an fp8 V is read in pairs, so head_dim {head_dim}, the strides {v_cache.stride()[:3]} and "
                         "the address must be even")
    require_triton(q.device)
    launch = Launch(
        out, (q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, sinks),
        (scale * k_scale * math.log2(math.e), v_scale),  # scores are linear in K, and the result is linear in V
        (*q.stride()[:2], *out.stride()[:2], block_tables.stride(0)),
        tiles.kernel_constants(num_kv_heads, group, head_dim, block_size, sliding_window, q.dtype, k_cache.stride(),
                               v_cache.stride()))
    if max_query_len > 1:
        if query_tiles is None:
            tokens = tokens_per_tile(group, head_dim, block_size, q.dtype, k_cache.dtype, q.device)
            query_tiles = make_query_tiles(query_start_loc.diff().tolist(), seq_lens.tolist(), tokens).to(q.device)
        if len(query_tiles):
            (prefill or launch_prefill)(launch, query_tiles)
    if num_decodes := len(seq_lens) if num_decodes is None else num_decodes:
        (decode or launch_decode)(launch, num_decodes, max_seq_len)
    return out


def launch_prefill(launch: Launch, query_tiles: Tensor) -> None:
    """Attention of the sequences with two or more new tokens."""
    out, inputs, scales, strides, constants = launch
    q, sums, num_splits = inputs[0], (out, out), 1
    paged_attention_kernel[(len(query_tiles) * constants["KV_HEADS"],)](
        out, *sums, *inputs, query_tiles, *scales, num_splits, *strides, PREFILL=True, ONE_PROGRAM=True,
        ONE_SPLIT=False, **constants, **tiles.prefill_config(constants["GROUP"], q.shape[2], q.dtype, q.device),
        **launch_options(q.device))


def launch_decode(launch: Launch, num_decodes: int, max_seq_len: int) -> None:
    """Attention of the sequences with one new token, all among the first num_decodes."""
    out, inputs, scales, strides, constants = launch
    q, k_cache, seq_lens = inputs[0], inputs[1], inputs[4]
    num_contexts, num_splits = num_decodes * constants["KV_HEADS"], tiles.split_bound(max_seq_len)
    programs = programs_per_context(num_contexts, num_splits)
    config = tiles.decode_config(num_contexts, programs, constants["GROUP"], q.shape[2], q.dtype, k_cache.dtype,
                                 q.device)
    sums = (out, out) if programs == 1 else empty_sums(q, num_decodes, num_splits)
    paged_attention_kernel[(num_contexts, programs)](
        out, *sums, *inputs, seq_lens, *scales, num_splits, *strides, PREFILL=False, ONE_PROGRAM=programs == 1,
        ONE_SPLIT=programs > 1 and programs == num_splits, **constants, **config, **launch_options(q.device))
    if programs > 1:
        merge_splits(launch, sums, config["TILE_N"])


def empty_sums(q: Tensor, num_seqs: int, num_splits: int) -> tuple[Tensor, Tensor]:
    """Room for the running sums of each split: split_acc and split_sums of the kernel."""
    shape = num_seqs, q.shape[1], num_splits
    return q.new_empty(*shape, q.shape[2], dtype=torch.float32), q.new_empty(*shape, 2, dtype=torch.float32)


def merge_splits(launch: Launch, sums: tuple[Tensor, Tensor], tile_n: int) -> None:
    """Fill `out` from the sums of all splits."""
    out, (*_, seq_lens, query_start_loc, sinks), (_, v_scale), (_, _, out_token, out_head, _), constants = launch
    num_seqs, num_heads, num_splits, head_dim = sums[0].shape
    merge_splits_kernel[(num_seqs, num_heads)](
        out, *sums, seq_lens, query_start_loc, sinks, v_scale, out_token, out_head, num_splits, HEAD_DIM=head_dim,
        DIM_PADDED=constants["DIM_PADDED"], TILE_N=tile_n, WINDOW=constants["WINDOW"], num_warps=1,
        **launch_options(out.device))


TRITON = Kernels(rotate_and_store, paged_attention, in_triton=True)


# --------------------------------------------------------------------------------------------------
# In Triton: the attention kernel
#
# **Softmax in one pass.** vLLM's first CUDA kernel stores a context's scores, then normalizes them. The kernel here
# reads each **tile** of the context, say the K and V of 64 tokens, once. It keeps a maximum m of the scores and two
# running sums, l of exp(s - m) and acc of exp(s - m) * v. A tile that raises m to m' first multiplies l and acc by
# alpha = exp(m - m'). The result is acc / l (Milakov and Gimelshein 2018; Dao et al. 2022). No exponent is above 0, so
# nothing overflows:
#
#     tile 1: scores 1 0, values 10 20    m = 1                   l = 1.368    acc = 17.36
#     tile 2: score  2,   value  40       m = 2, alpha = 0.368    l = 1.503    acc = 46.39    result 30.86
# --------------------------------------------------------------------------------------------------

# The kernel's functions pass each other these tuples. The compiler knows every value of Sizes.
Sizes = namedtuple("Sizes", [
    "KV_HEADS", "GROUP", "HEAD_DIM", "DIM_PADDED",  # GROUP query heads share a kv head; DIM_PADDED is a power of two
    "BLOCK_SIZE", "KC_BLOCK", "KC_SLOT", "VC_BLOCK", "VC_SLOT",  # slots of a block; strides of the caches
    "WINDOW",  # tokens that a token sees, itself included; 0: no limit
    "TILE_M", "TILE_N",  # queries of a tile; tokens of a tile of keys
    "PRECISION"])  # of float32 products; "ieee" is exact
Queries = namedtuple("Queries", [
    "q", "q_token", "q_head", "out", "out_token", "out_head", "sinks",  # tensors and their strides
    "seq", "kv_head", "q_start",  # the sequence, the kv head, the sequence's first token in q
    "num_tokens",  # query tokens: the sequence's new ones (cascade.py: one of each of several sequences)
    "first"])  # of them in this tile
Keys = namedtuple("Keys", [
    "table", "k", "v",  # the sequence's block table; the caches, at this kv head
    "seq_len", "oldest", "end"])  # the queries of this tile see positions in [oldest, end)
Sums = namedtuple("Sums", [
    "acc",  # the weighted sum of values of each query: [n, DIM_PADDED], in decode [DIM_PADDED, n]
    "max",  # the largest score of each query, times scale, which has a factor of log2(e): weights are powers of 2
    "sum"])  # the sum of the weights of each query


@jit
def paged_attention_kernel(out, split_acc, split_sums, q, k_cache, v_cache, block_tables, seq_lens, query_start_loc,
                           sinks, work, scale, v_scale, num_splits, q_token, q_head, out_token, out_head, table_seq,
                           KC_BLOCK: tl.constexpr, KC_SLOT: tl.constexpr, KC_HEAD: tl.constexpr, VC_BLOCK: tl.constexpr,
                           VC_SLOT: tl.constexpr, VC_HEAD: tl.constexpr, PREFILL: tl.constexpr, KV_HEADS: tl.constexpr,
                           GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
                           BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, WINDOW: tl.constexpr,
                           PRECISION: tl.constexpr, ONE_PROGRAM: tl.constexpr, ONE_SPLIT: tl.constexpr,
                           PDL: tl.constexpr):
    """A program takes one kv head and a tile of one sequence's queries. A query belongs to one token and one query
    head. The tile has all GROUP heads of the kv head, so the program loads K and V once for all of them. A sequence's
    query length alone picks its launch, so with the same chunks a text gets the same bits in any batch:

                 new tokens   queries of a tile                 grid
        decode   1            GROUP                             (sequence and kv head, programs that share its splits)
        prefill  2 or more    TILE_M // GROUP tokens by GROUP   (entry of work and kv head)

    work          prefill: query_tiles [n, 2], (sequence, tile of its queries); sequence -1 is padding
    split_acc, split_sums   [sequence, head, num_splits, HEAD_DIM or 2], the Sums of each split, if not ONE_PROGRAM
    """
    wait_for_previous_kernel(PDL)
    TOKENS: tl.constexpr = TILE_M // GROUP
    seq, kv_head, first = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, 0
    if PREFILL:
        entry = work + 2 * seq  # it is the index of an entry
        seq, first = tl.load(entry), tl.load(entry + 1) * TOKENS
        if seq < 0:
            return
    q_start = tl.load(query_start_loc + seq).to(tl.int64)
    query_len = (tl.load(query_start_loc + seq + 1) - q_start).to(tl.int32)
    seq_len = tl.load(seq_lens + seq)
    is_decode = query_len == 1
    if is_decode == PREFILL:  # the other launch computes it; without new tokens it is padding of a decode launch
        return
    first_position = seq_len - query_len + first
    oldest, end = 0, tl.minimum(first_position + TOKENS, seq_len)
    if WINDOW:
        oldest = tl.maximum(first_position - WINDOW + 1, 0)
    if ONE_SPLIT:
        split_len = split_length(seq_len, TILE_N)
        # The context may have fewer splits. Without a tile the store at the end would write elsewhere.
        if (oldest // split_len + tl.program_id(1)) * split_len >= end:
            return
    k, v = k_cache + kv_head.to(tl.int64) * KC_HEAD, v_cache + kv_head.to(tl.int64) * VC_HEAD
    queries = Queries(q, q_token, q_head, out, out_token, out_head, sinks, seq, kv_head, q_start, query_len, first)
    keys = Keys(block_tables + seq.to(tl.int64) * table_seq, k, v, seq_len, oldest, end)
    # Sizes is built inside each call: stored in a variable, its values would become run-time values.
    if PREFILL:
        _prefill(queries, keys, first_position, scale, v_scale,
                 Sizes(KV_HEADS, GROUP, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, KC_BLOCK, KC_SLOT, VC_BLOCK, VC_SLOT, WINDOW,
                       TILE_M, TILE_N, PRECISION))
    else:
        _decode(queries, keys, split_acc, split_sums, num_splits, scale, v_scale, ONE_PROGRAM, ONE_SPLIT,
                Sizes(KV_HEADS, GROUP, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, KC_BLOCK, KC_SLOT, VC_BLOCK, VC_SLOT, WINDOW,
                      TILE_M, TILE_N, PRECISION))


@jit
def load_queries(queries, keys, index, sizes):
    """Some queries of a tile: q [n, DIM_PADDED], positions and heads [n], the results' addresses, which exist.

        index         0     1     2     3     4     5        with GROUP 2
        new token     0     0     1     1     2     2        after `first`
        head          0     1     0     1     0     1        of the group

    **A group of any size** works. TILE_M is a power of two of at least GROUP, and as many whole groups as it holds are
    used: with GROUP 7 (Qwen2.5-0.5B) 64 rows of prefill have 9 tokens by 7 heads, and decode's 8 columns have 7 heads.
    The rest of the tile is masked: row 63 would be the first query of the next tile.
    """
    new, head = queries.first + index // sizes.GROUP, queries.kv_head * sizes.GROUP + index % sizes.GROUP
    dim = tl.arange(0, sizes.DIM_PADDED)
    exists = (index < sizes.TILE_M // sizes.GROUP * sizes.GROUP) & (new < queries.num_tokens)
    valid = exists[:, None] & (dim < sizes.HEAD_DIM)[None, :]
    token = (queries.q_start + new)[:, None]
    at = queries.q + token * queries.q_token + head[:, None] * queries.q_head + dim[None, :]
    q = tl.load(at, mask=valid, other=0.0)
    if keys.k.dtype.element_ty == tl.float8e4nv:
        q = q.to(tl.float16)  # the type to which the hardware converts fp8
    out = queries.out + token * queries.out_token + head[:, None] * queries.out_head + dim[None, :]
    return q, keys.seq_len - queries.num_tokens + new, head, out, valid


@jit
def _block_of(keys, token, sizes):
    """The block of the tile that begins with `token`; if tiles may cross blocks, the block of each token of the tile.
    (With TILE_N 64, blocks of 64 give one block id, and blocks of 16 give 64 ids: four blocks, 16 times each.)
    The compiler cannot prefetch a load whose address comes from another load, as K's comes from the block id. The loops
    therefore load block ids one tile ahead, but none after the sequence's last block: these may be anything."""
    tokens = token if sizes.BLOCK_SIZE % sizes.TILE_N == 0 else token + tl.arange(0, sizes.TILE_N)
    return tl.load(keys.table + tl.minimum(tokens, keys.seq_len - 1) // sizes.BLOCK_SIZE).to(tl.int64)


@jit
def _slots_of(block, tile, sizes):
    """Offsets [TILE_N] of a tile's tokens in the caches of K and V."""
    token = tl.arange(0, sizes.TILE_N)
    in_one_block: tl.constexpr = sizes.BLOCK_SIZE % sizes.TILE_N == 0
    offset = tile % sizes.BLOCK_SIZE + token if in_one_block else (tile + token) % sizes.BLOCK_SIZE
    return block * sizes.KC_BLOCK + offset * sizes.KC_SLOT, block * sizes.VC_BLOCK + offset * sizes.VC_SLOT


@jit
def _load_tile(at, exists, inside, like, MASKED: tl.constexpr, sizes):
    """A tile of K or V. MASKED reads 0 for slots after the last token, which hold garbage, and for blocks that left the
    window, which may have other holders by now: a weight of 0 would not remove a NaN from V."""
    if MASKED:
        tile = tl.load(at, mask=exists & inside, other=0.0)
    elif sizes.HEAD_DIM < sizes.DIM_PADDED:
        tile = tl.load(at, mask=inside, other=0.0)
    else:
        tile = tl.load(at)
    return tile.to(like.dtype)


@jit
def initial_sums(ROWS: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr):
    """The running sums before the first key."""
    return Sums(tl.zeros([ROWS, COLUMNS], tl.float32), tl.full([QUERIES], -float("inf"), tl.float32),
                tl.zeros([QUERIES], tl.float32))


@jit
def _online_softmax(sums, scores, scale, AXIS: tl.constexpr, MASKED: tl.constexpr):
    """The weights p of a tile's scores along AXIS, the factor alpha for acc, and each query's new maximum and sum."""
    new_max = tl.maximum(sums.max, tl.max(scores, AXIS) * scale)
    base = new_max
    if MASKED:  # the maximum of a query that has seen no key yet is -inf, and -inf - -inf is NaN
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
    p = tl.exp2(scores * scale - tl.expand_dims(base, AXIS))
    alpha = tl.exp2(sums.max - base)
    return p, alpha, new_max, sums.sum * alpha + tl.sum(p, AXIS)


@jit
def _normalize(sums, sinks, head, v_scale, AXIS: tl.constexpr):
    """The result: acc over the sum of weights along AXIS; 0 where no key was seen. A sink is one more key, with V 0."""
    weights = sums.sum
    if sinks is not None:
        weights += tl.exp2(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 - sums.max)  # log2(e)
    return sums.acc / tl.expand_dims(tl.where(weights == 0, 1.0, weights), AXIS) * v_scale


# --------------------------------------------------------------------------------------------------
# In Triton: decode, one query token (the section on splits says why its context is in splits)
# --------------------------------------------------------------------------------------------------

@jit
def _fp8_values_dot(v_at, slot_v, exists, p, sizes):
    """V transposed [dim, TILE_N] @ p [TILE_N, heads] for an fp8 V. The hardware transposes elements of 16 bits, but not
    of 8 bits. The program therefore loads pairs of dims and transposes the pairs:

        memory, token t       | dim 0  dim 1 | dim 2  dim 3 | ...      a pair is 16 bits
        even [pair, TILE_N]     dim 0          dim 2                   the low byte of each pair
        odd  [pair, TILE_N]            dim 1          dim 3            the high byte
    """
    pair = tl.arange(0, sizes.DIM_PADDED // 2)
    v = tl.load(v_at.to(tl.pointer_type(tl.int16)) + pair[:, None] + (slot_v // 2)[None, :],
                mask=exists[None, :] & (pair < sizes.HEAD_DIM // 2)[:, None], other=0)
    even = v.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(p.dtype)
    odd = (v >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(p.dtype)
    both = tl.join(tl.dot(even, p), tl.dot(odd, p))  # [DIM_PADDED // 2, heads, 2]
    return tl.reshape(tl.permute(both, (0, 2, 1)), (sizes.DIM_PADDED, p.shape[1]))


@jit
def _decode_tile(sums, q, keys, slots, tile, end, scale, sizes):
    """The running sums after one more tile of keys. Tensor cores multiply at least 16 rows by 8 columns, and a group
    often has fewer than 16 heads. The products are therefore transposed, with the heads as columns, of which 8 suffice:

        K [TILE_N, dim]              @  q [dim, heads]     =  scores [TILE_N, heads], a softmax down each column
        V transposed [dim, TILE_N]   @  p [TILE_N, heads]  =  update of acc [dim, heads]
    """
    slot_k, slot_v = slots
    dim = tl.arange(0, sizes.DIM_PADDED)
    token = tile + tl.arange(0, sizes.TILE_N)
    exists = token < end
    if sizes.WINDOW:
        exists &= token >= keys.oldest
    inside = dim < sizes.HEAD_DIM
    k = _load_tile(keys.k + dim[None, :] + slot_k[:, None], exists[:, None], inside[None, :], q, True, sizes)
    scores = tl.where(exists[:, None], tl.dot(k, q, input_precision=sizes.PRECISION), -float("inf"))
    p, alpha, new_max, new_sum = _online_softmax(sums, scores, scale, 0, True)
    p = p.to(q.dtype)
    if keys.v.dtype.element_ty == tl.float8e4nv:
        update = _fp8_values_dot(keys.v, slot_v, exists, p, sizes)
    else:
        v = _load_tile(keys.v + dim[:, None] + slot_v[None, :], exists[None, :], inside[:, None], q, True, sizes)
        update = tl.dot(v, p, input_precision=sizes.PRECISION)
    return Sums(sums.acc * alpha[None, :] + update, new_max, new_sum)


@jit
def _decode(queries, keys, split_acc, split_sums, num_splits, scale, v_scale, ONE_PROGRAM: tl.constexpr,
            ONE_SPLIT: tl.constexpr, sizes):
    """The result of one query token. The columns are its GROUP heads, then padding."""
    column = tl.arange(0, sizes.TILE_M)
    q, _, head, out, valid = load_queries(queries, keys, column, sizes)
    seq_head = queries.seq.to(tl.int64) * sizes.KV_HEADS * sizes.GROUP + queries.kv_head * sizes.GROUP + column
    total = decode_splits(initial_sums(sizes.DIM_PADDED, sizes.TILE_M, sizes.TILE_M), tl.trans(q), keys, split_acc,
                          split_sums, seq_head * num_splits, sizes.GROUP, scale, ONE_PROGRAM, ONE_SPLIT, sizes)
    if ONE_PROGRAM:
        tl.store(out, tl.trans(_normalize(total, queries.sinks, head, v_scale, 0)), mask=valid)


@jit
def decode_splits(sums, q, keys, split_acc, split_sums, at, num_columns, scale, ONE_PROGRAM: tl.constexpr,
                  ONE_SPLIT: tl.constexpr, sizes):
    """A program computes a run of a context's splits, one after another, for the first num_columns columns of q
    [DIM_PADDED, TILE_M]. `sums` are the running sums before its first tile: empty, or in cascade.py those of a common
    beginning. Returns the sums of all splits, which only ONE_PROGRAM fills. The additions have one order in all modes:

        a context of 5 splits       | 0 | 1 | 2 | 3 | 4 |      a program has
        ONE_PROGRAM                 | program 0         |      all splits, merged into `total` (vLLM's V1)
        neither, 2 programs         | program 0 | 1     |      a run of splits, each stored for merge_splits_kernel (V2)
        ONE_SPLIT                   | 0 | 1 | 2 | 3 | 4 |      one split, stored once, after the loop

        in plain loops:             for split in the program's splits:
                                        for tile in split: sums = _decode_tile(sums, tile)
                                        merge the sums into `total`, or store them

    Triton pipelines no loads in a nested loop or a loop with a branch. This is therefore one loop over all tiles. Its
    last part runs for every tile, but takes effect only if `ends`, on the last tile of a split:

        300 tokens, splits of 128, TILE_N 64        tile   0    64    128  192    256
                                                    split  0    0     1    1      2
                                                    ends   .    x     .    x      x

    at: for each column, the index of its split 0 in split_acc and split_sums
    """
    start, end = keys.oldest, keys.end
    split_len = split_length(keys.seq_len, sizes.TILE_N)
    split = start // split_len
    if not ONE_PROGRAM:
        num_visible_splits = tl.cdiv(end, split_len) - split  # of the window, or of the whole context
        splits_per_program = 1 if ONE_SPLIT else tl.cdiv(num_visible_splits, tl.num_programs(1))
        split += splits_per_program * tl.program_id(1)  # this program's first split
        start = tl.maximum(start, split * split_len)
        end = tl.minimum(end, (split + splits_per_program) * split_len)
    start = start // sizes.TILE_N * sizes.TILE_N  # tiles of keys begin at multiples of TILE_N
    column, dim = tl.arange(0, sizes.TILE_M), tl.arange(0, sizes.DIM_PADDED)
    total = initial_sums(sizes.DIM_PADDED, sizes.TILE_M, sizes.TILE_M)  # of the splits before this one
    block = _block_of(keys, start, sizes)
    for tile in range(start, end, sizes.TILE_N):
        slots = _slots_of(block, tile, sizes)
        block = _block_of(keys, tile + sizes.TILE_N, sizes)
        sums = _decode_tile(sums, q, keys, slots, tile, end, scale, sizes)
        if not ONE_SPLIT:  # which has no end inside the loop, and stores behind it
            ends = tile + sizes.TILE_N >= tl.minimum((split + 1) * split_len, end)
            if ONE_PROGRAM:
                total = _where(ends, _merge(total, sums), total)
            else:
                complete = column < tl.where(ends, num_columns, 0)
                _store_sums(split_acc, split_sums, at + split, sums, complete, dim, sizes.HEAD_DIM)
            sums = _where(ends, Sums(0.0, -float("inf"), 0.0), sums)  # the next split begins with nothing
            split += ends.to(tl.int32)
    if ONE_SPLIT:
        _store_sums(split_acc, split_sums, at + split, sums, column < num_columns, dim, sizes.HEAD_DIM)
    return total


# --------------------------------------------------------------------------------------------------
# In Triton: prefill, many query tokens
# --------------------------------------------------------------------------------------------------

@jit
def _attend(sums, scores, v, token, exists, position, scale, MASKED: tl.constexpr, sizes):
    """The running sums of some queries after a tile with scores [queries, TILE_N] and values [TILE_N, DIM_PADDED]."""
    if MASKED:
        seen = (token[None, :] <= position[:, None]) & exists[None, :]
        if sizes.WINDOW:
            seen &= token[None, :] > position[:, None] - sizes.WINDOW
        scores = tl.where(seen, scores, -float("inf"))
    p, alpha, new_max, new_sum = _online_softmax(sums, scores, scale, 1, MASKED)
    acc = tl.dot(p.to(v.dtype), v, sums.acc * alpha[:, None], input_precision=sizes.PRECISION)
    return Sums(acc, new_max, new_sum)


@jit
def _prefill_tiles(a, b, q, position, keys, block, start, stop, scale, MASKED: tl.constexpr, sizes):
    """The running sums of both halves after the tiles of keys [start, stop), and the block of the next tile."""
    for tile in range(start, stop, sizes.TILE_N):
        slot_k, slot_v = _slots_of(block, tile, sizes)
        block = _block_of(keys, tile + sizes.TILE_N, sizes)
        dim = tl.arange(0, sizes.DIM_PADDED)
        token = tile + tl.arange(0, sizes.TILE_N)
        exists = token < keys.end
        if sizes.WINDOW:
            exists &= token >= keys.oldest
        inside = dim < sizes.HEAD_DIM
        k = _load_tile(keys.k + dim[:, None] + slot_k[None, :], exists[None, :], inside[:, None], q[0], MASKED, sizes)
        v = _load_tile(keys.v + dim[None, :] + slot_v[:, None], exists[:, None], inside[None, :], q[0], MASKED, sizes)
        scores_a = tl.dot(q[0], k, input_precision=sizes.PRECISION)  # k is transposed: [DIM_PADDED, TILE_N]
        if sizes.DIM_PADDED <= 256:
            scores_b = tl.dot(q[1], k, input_precision=sizes.PRECISION)
        a = _attend(a, scores_a, v, token, exists, position[0], scale, MASKED, sizes)
        if sizes.DIM_PADDED <= 256:
            b = _attend(b, scores_b, v, token, exists, position[1], scale, MASKED, sizes)
    return a, b, block


@jit
def _prefill(queries, keys, first_position, scale, v_scale, sizes):
    """The result of TILE_M queries, as two halves a and b: the softmax of one half overlaps with the matrix products of
    the other. Without a window every query sees the tiles of keys before the diagonal, so these need no mask:

        3 query tokens, TILE_N 4        key 0 1 2 3 | 4 5 6 7 | 8
        at position 6                       x x x x   x x x .   .
        at position 7                       x x x x   x x x x   .
        at position 8                       x x x x   x x x x   x
                                            no mask   masked

    Heads of more than 256 numbers leave registers for one accumulator: `a` has all queries, and b none.
    """
    HALF: tl.constexpr = sizes.TILE_M // 2 if sizes.DIM_PADDED <= 256 else sizes.TILE_M
    index = tl.arange(0, HALF)
    q_a, position_a, head_a, out_a, valid_a = load_queries(queries, keys, index, sizes)
    q_b, position_b, head_b, out_b, valid_b = load_queries(queries, keys, HALF + index, sizes)
    a, b = initial_sums(HALF, sizes.DIM_PADDED, HALF), initial_sums(HALF, sizes.DIM_PADDED, HALF)
    q, position = (q_a, q_b), (position_a, position_b)
    start = keys.oldest // sizes.TILE_N * sizes.TILE_N
    block = _block_of(keys, start, sizes)
    if not sizes.WINDOW:
        diagonal = (first_position + 1) // sizes.TILE_N * sizes.TILE_N
        a, b, block = _prefill_tiles(a, b, q, position, keys, block, start, diagonal, scale, False, sizes)
        start = diagonal
    a, b, block = _prefill_tiles(a, b, q, position, keys, block, start, keys.end, scale, True, sizes)
    tl.store(out_a, _normalize(a, queries.sinks, head_a, v_scale, 1), mask=valid_a)
    if sizes.DIM_PADDED <= 256:
        tl.store(out_b, _normalize(b, queries.sinks, head_b, v_scale, 1), mask=valid_b)


# --------------------------------------------------------------------------------------------------
# In Triton: splits of a context, in decode
#
# The rule of softmax in one pass also merges the sums of two parts of a context. In decode a long context can therefore
# be cut into **splits** of several tiles that are computed in parallel (flash-decoding, Dao et al. 2023; vLLM's "V2").
# Prefill has no splits: the queries of a prompt are usually enough for many programs.
#
# **When does decode split a context?** A context of 128 tokens or fewer is one split. Above that it always has splits,
# whose length follows from the context's length alone (`split_length`). Only the programs that compute them depend on
# the batch (`programs_per_context`): with 160 or more pairs of a sequence and a kv head, one program takes all splits
# of a context and merges them itself. With fewer pairs several programs share them, and merge_splits_kernel merges what
# they stored. Both add in the same order (`_merge`). If the compiler fuses both alike, the bits are the same.
# --------------------------------------------------------------------------------------------------

MIN_SPLIT, MID_SPLIT, MAX_SPLITS = (tl.constexpr(n) for n in (tiles.MIN_SPLIT, tiles.MID_SPLIT, tiles.MAX_SPLITS))
MERGE_UNROLL = tl.constexpr(8)  # splits that merge_splits_kernel loads at a time (measured on an H200)


@jit
def split_length(seq_len, TILE_N: tl.constexpr):
    """Tokens per split, a multiple of TILE_N, whatever the batch and the grid; nanopaged/tiles.py has a table."""
    sixteenth = tl.cdiv(seq_len, 16 * TILE_N) * TILE_N
    least = tl.cdiv(seq_len, MAX_SPLITS * TILE_N) * TILE_N
    return tl.maximum(tl.minimum(tl.maximum(sixteenth, MIN_SPLIT), MID_SPLIT), least)


@jit
def _where(condition, yes, no):
    """The running sums `yes` if the condition holds, else `no`."""
    return Sums(tl.where(condition, yes.acc, no.acc), tl.where(condition, yes.max, no.max),
                tl.where(condition, yes.sum, no.sum))


@jit
def _merge(total, split):
    """The sums of the splits so far and of this one, as one."""
    new_max = tl.maximum(total.max, split.max)
    base = tl.where(new_max == -float("inf"), 0.0, new_max)
    alpha, beta = tl.exp2(total.max - base), tl.exp2(split.max - base)
    return Sums(total.acc * alpha[None, :] + split.acc * beta[None, :], new_max, total.sum * alpha + split.sum * beta)


@jit
def load_sums(split_acc, split_sums, at, exists, dim, HEAD_DIM: tl.constexpr):
    """A split's sums for each column; where none exist, the sums before the first key."""
    acc = tl.load(split_acc + at[None, :] * HEAD_DIM + dim[:, None], mask=exists[None, :] & (dim < HEAD_DIM)[:, None],
                  other=0.0)
    return Sums(acc, tl.load(split_sums + 2 * at, mask=exists, other=-float("inf")),
                tl.load(split_sums + 2 * at + 1, mask=exists, other=0.0))


@jit
def _store_sums(split_acc, split_sums, at, sums, exists, dim, HEAD_DIM: tl.constexpr):
    tl.store(split_acc + at[None, :] * HEAD_DIM + dim[:, None], sums.acc,
             mask=exists[None, :] & (dim < HEAD_DIM)[:, None])
    tl.store(split_sums + 2 * at, sums.max, mask=exists)
    tl.store(split_sums + 2 * at + 1, sums.sum, mask=exists)


@jit
def merge_splits_kernel(out, split_acc, split_sums, seq_lens, query_start_loc, sinks, v_scale, out_token, out_head,
                        num_splits, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, TILE_N: tl.constexpr,
                        WINDOW: tl.constexpr, PDL: tl.constexpr):
    """Grid (sequence, head): merge the sums of its splits and normalize (vLLM's reduce kernel)."""
    seq, head = tl.program_id(0), tl.program_id(1)
    q_start = tl.load(query_start_loc + seq).to(tl.int64)
    query_len = tl.load(query_start_loc + seq + 1) - q_start
    seq_len = tl.load(seq_lens + seq)
    wait_for_previous_kernel(PDL)
    if query_len != 1:
        return
    split_len = split_length(seq_len, TILE_N)
    first, last = 0, (seq_len - 1) // split_len
    if WINDOW:
        first = tl.maximum(seq_len - WINDOW, 0) // split_len
    dim = tl.arange(0, DIM_PADDED)
    at = (seq.to(tl.int64) * tl.num_programs(1) + head) * num_splits + tl.arange(0, 1)
    total = initial_sums(DIM_PADDED, 1, 1)
    for split in range(first, last + 1, MERGE_UNROLL):
        for i in tl.static_range(MERGE_UNROLL):  # unrolled, so that the loads do not wait for each other
            exists = (split + i + tl.arange(0, 1)) <= last
            total = _merge(total, load_sums(split_acc, split_sums, at + split + i, exists, dim, HEAD_DIM))
    out_at = out + q_start * out_token + head * out_head + dim[:, None]
    tl.store(out_at, _normalize(total, sinks, head, v_scale, 0), mask=(dim < HEAD_DIM)[:, None])
