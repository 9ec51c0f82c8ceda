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

Each layer has its own k_cache and v_cache, and a block id is the same index in all of them. A sequence therefore
needs one table. **Paged attention** finds K and V through the table and computes the same result (Kwon et al. 2023,
section 4.1). For one kv head with head_dim 128, a block of 16 slots has 16 x 128 numbers of K, 2,048 in all. The K of
token t is k_cache[block_table[t // block_size], t % block_size, kv head].

**Causality.** A token must not see later ones. In one step a sequence brings `query_len` new tokens: a whole prompt or
a chunk of it (**prefill**), or the one token sampled last (**decode**). Each layer first stores these tokens' K and V.
The cache then holds `seq_len` tokens. Query i, at position seq_len - query_len + i, attends to the keys up to its own:

    a chunk of 3 tokens after 4 cached ones           key 0 1 2 3 4 5 6
                                query 0, position 4       x x x x x . .
                                query 1, position 5       x x x x x x .      . is masked
                                query 2, position 6       x x x x x x x

A prompt may therefore come in any chunks. Decode is a chunk of one token, which needs no causal mask.

**Contents.** Chapter 2 and README's tour need the first section alone. A reader of paging may stop after the second.

    In plain torch               read it: attention in ten lines, then windows and fp8, then writing K and V
    In Triton                    the same on a GPU: filling the cache, launching attention, the kernel, decode, prefill
    In Triton: splits, cascade   skip them at first: a long context in parts; contexts that begin with the same blocks
    Between the products         skip the rest: few rows, small kernels, mixtures of experts, sampling; then Hopper
"""
import math
from collections import namedtuple
from functools import lru_cache
from typing import Callable, NamedTuple

import nanopaged  # noqa: F401  before torch: it silences a warning of torch's
import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged import tiles
from nanopaged.optional_triton import gdc_launch_dependents, gdc_wait, jit, launch_options, require_triton, tl, triton
from nanopaged.sampling_params import HASH, SMALLEST_TEMPERATURE
from nanopaged.tiles import cdiv, make_query_tiles, programs_per_context


# --------------------------------------------------------------------------------------------------
# In plain torch
# --------------------------------------------------------------------------------------------------

def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention of one sequence: q [query_len, num_heads, head_dim], k, v [num_keys, num_kv_heads, head_dim], visible
    [query_len, num_keys]. torch wants [batch, heads, tokens, head_dim]. With 6 heads and 2 kv heads, groups of 3, it
    gets a batch of 3: the first head of each group, the second, the third. All read the same K and V."""
    group = q.shape[1] // k.shape[1]  # with a group's heads side by side in a batch, torch 2.11 errs on a GPU
    heads = q.unflatten(1, (-1, group)).permute(2, 1, 0, 3)
    k, v = k.transpose(0, 1).expand(group, -1, -1, -1), v.transpose(0, 1).expand(group, -1, -1, -1)
    return F.scaled_dot_product_attention(heads, k, v, visible, scale=scale).permute(2, 1, 0, 3).flatten(1, 2)


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


def paged_attention_reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
                              query_start_loc: Tensor, scale: float, *, sliding_window: int = 0,
                              out: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, **_) -> Tensor:
    """`paged_attention_plain`, with windows and an fp8 cache. Other arguments of `paged_attention` are ignored.

    sliding_window   how many tokens a token sees, itself included; 0: no limit
    k_scale, v_scale K and V are the stored numbers times these: 1, except for an fp8 cache (`to_fp8`)
    """
    if not sliding_window and k_cache.dtype is q.dtype and k_scale == v_scale == 1:
        return paged_attention_plain(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale, out)
    out, block_size, starts = torch.empty_like(q) if out is None else out, k_cache.shape[1], query_start_loc.tolist()
    for table, seq_len, start, end in zip(block_tables.long(), seq_lens.tolist(), starts, starts[1:]):
        if start < end:
            first, window = seq_len - (end - start), sliding_window or seq_len
            key_at = torch.arange(max(0, first - window + 1), seq_len, device=q.device)  # no query sees earlier keys
            query_at = torch.arange(first, seq_len, device=q.device)[:, None]
            visible = (key_at <= query_at) & (key_at > query_at - window)
            block, offset = table[key_at // block_size], key_at % block_size
            k, v = (as_bytes(cache)[block, offset].view(cache.dtype).to(q.dtype) for cache in (k_cache, v_cache))
            out[start:end] = attend(q[start:end], k, v, visible, scale * k_scale)
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

    Slot -1: nothing is written, because the token is padding, or a block that was found has them. A cache must
    allow the view [num_slots, num_kv_heads, head_dim].
    """
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


TORCH = Kernels(rotate_and_store_reference, paged_attention_reference)


# --------------------------------------------------------------------------------------------------
# In Triton
#
# `kernel[(n, 2)](...)` launches a **grid** of 2n programs; `tl.program_id(0)` is a program's place on the first axis. A
# program is several warps of 32 threads, but its text deals with whole tensors: `tl.load` loads from a tensor of
# addresses, `tl.dot` is a matrix product. The sizes of tensors are powers of two, and **masks** say which elements
# exist: where a mask is false, a load takes `other` and a store writes nothing. Triton compiles a kernel for each
# combination of values of its `tl.constexpr` parameters, so an `if` over them costs nothing. A loop is a pipeline with
# num_stages stages: it loads the next num_stages - 1 tiles while it computes. The compiler divides this work among the
# threads; vLLM's CUDA kernel spells it out (a warp takes a KV block, a few threads load 16 bytes of K). On a CPU,
# Triton's interpreter runs a kernel line by line, also under a debugger: `python engine.py --prompt "ROMEO:"
# --attention triton --enforce-eager`.
#
# **The GPU.** An H200 has 132 multiprocessors, and each runs a few programs at a time. Its memories, fastest first:
#
#     registers       256 KiB per multiprocessor   scores and running sums of the programs that run there
#     shared memory   228 KiB per multiprocessor   K, V of 64 tokens x 128 bf16 numbers: 32 KiB for each pipeline stage
#     L2 cache        50 MB for all                block tables; K and V that several programs read at the same time
#     HBM             141 GB, 4.2 TB/s (measured)  the pool, q, out, the partial sums of splits (and the weights)
#
# **The layout of K.** vLLM's CUDA kernel stores K as [block, kv head, dim / x, slot, x], where x numbers are 16 bytes,
# so that neighbouring threads read neighbouring addresses. Triton arranges its loads itself, so K and V can have the
# plain layout.
# --------------------------------------------------------------------------------------------------

# Kernels may read a global only if it is a constexpr.
FP8_MAX = tl.constexpr(448)  # the largest fp8 number (e4m3)


# --------------------------------------------------------------------------------------------------
# In Triton: filling the cache
# --------------------------------------------------------------------------------------------------

def rotate_and_store(qkv: Tensor, num_heads: int, rotation: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None,
                     eps: float, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: float = 1.0,
                     v_scale: float = 1.0) -> Tensor:
    """`rotate_and_store_reference` in one launch."""
    (num_tokens, _, head_dim), num_kv_heads = qkv.shape, k_cache.shape[2]
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    optional = (qkv if x is None else x for x in (rotation, q_norm, k_norm))  # the launch needs a tensor, read or not
    rotate_and_store_kernel[(num_tokens, 2)](
        qkv, q, *optional, eps, k_cache, v_cache, slot_mapping, 1 / k_scale, 1 / v_scale, qkv.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3], ROTATE=rotation is not None, NORM=q_norm is not None,
        **tiles.store_constants(num_heads, num_kv_heads, head_dim, k_cache.shape[1]), **launch_options(qkv.device))
    return q


@jit
def _wait_for_previous_kernel(PDL: tl.constexpr):
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
    _wait_for_previous_kernel(PDL)
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
        x = tl.minimum(tl.maximum(x.to(tl.float32) * factor, -FP8_MAX), FP8_MAX).to(tl.float8e4nv)
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

def tokens_per_tile(group: int, head_dim: int, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype,
                    device: torch.device) -> int:
    """Query tokens in a tile of prefill, as `make_query_tiles` needs it."""
    if on_hopper(group, head_dim, block_size, dtype, cache_dtype, device):
        return tiles.HOPPER_TILE_M // tiles.next_power_of_2(group)
    return tiles.prefill_config(group, head_dim, dtype, device)["TILE_M"] // group


@lru_cache
def on_hopper(group: int, head_dim: int, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype,
              device: torch.device) -> bool:
    """Whether the kernel at the end of this file computes prefill. Model and device decide, never the batch: a text
    keeps its bits.

    The first call compiles the kernel. If this Triton has no Gluon, or another one, a warning says so.
    """
    if not tiles.fits_hopper(group, head_dim, block_size, dtype, cache_dtype, device):
        return False
    try:
        nothing = torch.full((1, 2), -1, dtype=torch.int32, device=device)
        q, cache = (torch.empty(*shape, head_dim, dtype=dtype, device=device)
                    for shape in ((1, group), (1, block_size, 1)))
        prefill_on_hopper(q, q, cache, cache, nothing, nothing[0], nothing[0], nothing, 1.0, 0)
    except Exception as error:  # Gluon is experimental: what a Triton to come raises is not known
        import warnings
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        warnings.warn(f"prompts are computed by the kernel for all GPUs, which is 20 to 30% slower than the one for "
                      f"Hopper: Triton {triton.__version__} does not compile that one ({reason}); 3.6 to 3.9 do")
        return False
    return True


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
                    query_start_loc: Tensor, scale: float, *, max_query_len: int, max_seq_len: int,
                    sliding_window: int = 0, out: Tensor | None = None, num_decodes: int | None = None,
                    query_tiles: Tensor | None = None, cascade: tuple[Tensor, Tensor, int] | None = None,
                    k_scale: float = 1.0, v_scale: float = 1.0, **_) -> Tensor:
    """`paged_attention_reference` in Triton. It takes more arguments:

    max_query_len, max_seq_len   upper bounds, which do not change the result: above 1 new token prefill is launched,
                                 too; max_seq_len bounds the splits of a context (parts that a program can take alone)
    num_decodes      all sequences with one new token are among the first num_decodes (default: anywhere)
    query_tiles      prefill's work list, [n, 2] int32, from `make_query_tiles` (default: made here; waits for the GPU)
    cascade          sequences with one new token that have blocks in common: entries [n, 4] int32 (first sequence,
                     number of sequences, first token, end); num_common_tokens [num_seqs] int32; columns of a tile

    An fp8 v_cache is read in pairs, so head_dim, its other strides and its address must be even.
    """
    out = torch.empty_like(q) if out is None else out
    head_dim, group = q.shape[2], q.shape[1] // k_cache.shape[2]
    model = group, head_dim, k_cache.shape[1], q.dtype, k_cache.dtype, q.device
    if v_cache.element_size() == 1 and any(n % 2 for n in (head_dim, *v_cache.stride()[:3], v_cache.data_ptr())):
        raise ValueError(f"an fp8 V is read in pairs, so head_dim {head_dim}, the strides {v_cache.stride()[:3]} and "
                         "the address must be even")
    require_triton(q.device)
    inputs = (q, k_cache, v_cache, block_tables, seq_lens, query_start_loc)
    scales = (scale * k_scale * math.log2(math.e), v_scale)  # scores are linear in K, and the result is linear in V
    strides = (*q.stride()[:2], *out.stride()[:2], block_tables.stride(0))
    constants = tiles.kernel_constants(k_cache.shape[2], group, head_dim, k_cache.shape[1], sliding_window, q.dtype,
                                       k_cache.stride(), v_cache.stride())
    if max_query_len > 1:
        if query_tiles is None:
            tokens = tokens_per_tile(*model)
            query_tiles = make_query_tiles(query_start_loc.diff().tolist(), seq_lens.tolist(), tokens).to(q.device)
        if len(query_tiles) and on_hopper(*model):
            prefill_on_hopper(out, *inputs, query_tiles, scales[0], sliding_window)
        elif len(query_tiles):
            paged_attention_kernel[(len(query_tiles) * k_cache.shape[2],)](
                out, out, out, *inputs, query_tiles, *scales, 1, *strides, PHASE="prefill", ONE_PROGRAM=True,
                ONE_SPLIT=False, **constants, **tiles.prefill_config(group, head_dim, q.dtype, q.device),
                **launch_options(q.device))
    num_decodes = len(seq_lens) if num_decodes is None else num_decodes
    if num_decodes:
        _launch_decode(out, inputs, num_decodes, max_seq_len, scales, strides, constants,
                       None if sliding_window else cascade)
    return out


def _launch_decode(out: Tensor, inputs: tuple, num_decodes: int, max_seq_len: int, scales: tuple, strides: tuple,
                   constants: dict, cascade: tuple[Tensor, Tensor, int] | None) -> None:
    """Attention of the sequences with one new token."""
    q, k_cache, _, _, seq_lens, query_start_loc = inputs
    _, num_heads, head_dim = q.shape
    num_contexts, num_splits = num_decodes * k_cache.shape[2], tiles.split_bound(max_seq_len)
    sharing = programs_per_context(num_contexts, num_splits)
    one_program = sharing == 1 and not cascade
    split_acc = split_sums = out  # stand-ins, if one program has a whole context; so is seq_lens for work, below
    if not one_program:
        split_acc = q.new_empty(num_decodes, num_heads, num_splits, head_dim, dtype=torch.float32)
        split_sums = q.new_empty(num_decodes, num_heads, num_splits, 2, dtype=torch.float32)
    config = tiles.decode_config(num_contexts, 2 if cascade else sharing, constants["GROUP"], head_dim, q.dtype,
                                 k_cache.dtype, q.device)
    launches = [("decode", seq_lens, (num_contexts, sharing), config)]
    if cascade:
        launches = _cascade_launches(cascade, k_cache.shape[2], num_splits, (num_contexts, sharing), config)
    for phase, work, grid, tile in launches:
        paged_attention_kernel[grid](
            out, split_acc, split_sums, *inputs, work, *scales, num_splits, *strides, PHASE=phase,
            ONE_PROGRAM=one_program, ONE_SPLIT=not one_program and grid[1] == num_splits, **constants, **tile,
            **launch_options(q.device))
    if not one_program:
        merge_splits_kernel[(num_decodes, num_heads)](
            out, split_acc, split_sums, seq_lens, query_start_loc, scales[1], *strides[2:4], num_splits,
            HEAD_DIM=head_dim, DIM_PADDED=constants["DIM_PADDED"], TILE_N=config["TILE_N"], WINDOW=constants["WINDOW"],
            num_warps=1, **launch_options(q.device))


TRITON = Kernels(rotate_and_store, paged_attention)


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
    "q", "q_token", "q_head", "out", "out_token", "out_head",  # tensors and their strides
    "seq", "kv_head", "q_start",  # the sequence, the kv head, the sequence's first token in q
    "num_tokens",  # query tokens: prefill, the sequence's new ones; decode, 1; prefix (cascade), one of each sequence
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
                           work, scale, v_scale, num_splits, q_token, q_head, out_token, out_head, table_seq,
                           KC_BLOCK: tl.constexpr, KC_SLOT: tl.constexpr, KC_HEAD: tl.constexpr, VC_BLOCK: tl.constexpr,
                           VC_SLOT: tl.constexpr, VC_HEAD: tl.constexpr, PHASE: tl.constexpr, KV_HEADS: tl.constexpr,
                           GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
                           BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, WINDOW: tl.constexpr,
                           PRECISION: tl.constexpr, ONE_PROGRAM: tl.constexpr, ONE_SPLIT: tl.constexpr,
                           PDL: tl.constexpr):
    """A program takes one kv head and a tile of one sequence's queries. A query is that of one token and one
    query head. The tile has all GROUP heads of the kv head, so the program loads K and V once for all of them. A
    sequence's query length alone picks its launch, so the result has the same bits in any batch:

        PHASE    new tokens   queries of a tile                 grid
        decode   1            GROUP                             (sequence and kv head, programs that share its splits)
        prefill  2 or more    TILE_M // GROUP tokens by GROUP   (entry of work and kv head)
        prefix, suffix: decode with a cascade (in the last section on attention)

    work          prefill: query_tiles [n, 2], (sequence, tile of its queries); sequence -1 is padding
                  prefix: the entries of a cascade [n, 4]; suffix: num_common_tokens [sequence]
    split_acc, split_sums   [sequence, head, num_splits, HEAD_DIM or 2], the Sums of each split, if not ONE_PROGRAM
    scale         of the scores, times log2(e), because exp2 is the hardware's exponential
    """
    DECODE: tl.constexpr = PHASE != "prefill"
    _wait_for_previous_kernel(PDL)
    TOKENS: tl.constexpr = TILE_M // GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    if PHASE == "prefill":
        entry = work + 2 * (tl.program_id(0) // KV_HEADS)
        seq, first = tl.load(entry), tl.load(entry + 1) * TOKENS
        if seq < 0:
            return
    elif PHASE == "prefix":
        entry = work + 4 * (tl.program_id(0) // KV_HEADS)
        seq, first = tl.load(entry), 0
    else:
        seq, first = tl.program_id(0) // KV_HEADS, 0
    q_start = tl.load(query_start_loc + seq).to(tl.int64)
    query_len = (tl.load(query_start_loc + seq + 1) - q_start).to(tl.int32)
    seq_len = tl.load(seq_lens + seq)
    if (query_len == 1) != DECODE:  # a sequence of the other launch, or padding
        return
    first_position, num_tokens = seq_len - query_len + first, query_len
    oldest, end = 0, tl.minimum(first_position + TOKENS, seq_len)
    if WINDOW:
        oldest = tl.maximum(first_position - WINDOW + 1, 0)
    if PHASE == "prefix":  # the new tokens of several sequences, as if they were one sequence's
        num_tokens, oldest, end = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
        if num_tokens == 0:  # room in a recorded step
            return
    elif PHASE == "suffix":
        oldest = tl.load(work + seq)
    if ONE_SPLIT:
        split_len = split_length(seq_len, TILE_N)
        if (oldest // split_len + tl.program_id(1)) * split_len >= end:  # the context has fewer splits
            return
    table = block_tables + seq.to(tl.int64) * table_seq
    k, v = k_cache + kv_head.to(tl.int64) * KC_HEAD, v_cache + kv_head.to(tl.int64) * VC_HEAD
    queries = Queries(q, q_token, q_head, out, out_token, out_head, seq, kv_head, q_start, num_tokens, first)
    keys = Keys(table, k, v, seq_len, oldest, end)
    # Sizes is built inside each call: stored in a variable, its values would become run-time values.
    if DECODE:
        _decode(queries, keys, split_acc, split_sums, num_splits, scale, v_scale, PHASE == "suffix", ONE_PROGRAM,
                ONE_SPLIT,
                Sizes(KV_HEADS, GROUP, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, KC_BLOCK, KC_SLOT, VC_BLOCK, VC_SLOT, WINDOW,
                      TILE_M, TILE_N, PRECISION))
    else:
        _prefill(queries, keys, first_position, scale, v_scale,
                 Sizes(KV_HEADS, GROUP, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, KC_BLOCK, KC_SLOT, VC_BLOCK, VC_SLOT, WINDOW,
                       TILE_M, TILE_N, PRECISION))


@jit
def _load_queries(queries, keys, index, sizes):
    """Some queries of a tile: q [n, DIM_PADDED], positions [n], addresses of the results, and which of them exist. If
    GROUP does not divide TILE_M, the last ones stay unused.

        index         0     1     2     3     4     5        with GROUP 2
        new token     0     0     1     1     2     2        after `first`
        head          0     1     0     1     0     1        of the group
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
    return q, keys.seq_len - queries.num_tokens + new, out, valid


@jit
def _block_of(keys, token, sizes):
    """The block of the tile that begins with `token`; if tiles may cross blocks, the block of each token of the tile.
    (With TILE_N 64, blocks of 64 give one block id, and blocks of 16 give 64 ids: four blocks, 16 times each.)
    The compiler cannot prefetch a load whose address comes from another load, as K's comes from the block id. The loops
    therefore load block ids one tile ahead. No program reads the table after the sequence's last block, where it may
    hold anything."""
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
def _initial_sums(ROWS: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr):
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
def _normalize(acc, weights, v_scale):
    """The result: acc over the sum of weights; 0 where no key was seen."""
    return acc / tl.where(weights == 0, 1.0, weights) * v_scale


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
    scores = tl.dot(k, q, input_precision=sizes.PRECISION)
    scores = tl.where(exists[:, None], scores, -float("inf"))
    p, alpha, new_max, new_sum = _online_softmax(sums, scores, scale, 0, True)
    p = p.to(q.dtype)
    if keys.v.dtype.element_ty == tl.float8e4nv:
        update = _fp8_values_dot(keys.v, slot_v, exists, p, sizes)
    else:
        v = _load_tile(keys.v + dim[:, None] + slot_v[None, :], exists[None, :], inside[:, None], q, True, sizes)
        update = tl.dot(v, p, input_precision=sizes.PRECISION)
    return Sums(sums.acc * alpha[None, :] + update, new_max, new_sum)


@jit
def _decode(queries, keys, split_acc, split_sums, num_splits, scale, v_scale, RESUMES: tl.constexpr,
            ONE_PROGRAM: tl.constexpr, ONE_SPLIT: tl.constexpr, sizes):
    """The result of one query token. A program computes a run of the context's splits, one after the other:

        a context of 5 splits       | 0 | 1 | 2 | 3 | 4 |      a program has (the order of additions is always the same)
        ONE_PROGRAM                 | program 0         |      all splits, merged into `total` (vLLM's V1)
        neither, 2 programs         | program 0 | 1     |      a run of splits, each stored for merge_splits_kernel (V2)
        ONE_SPLIT                   | 0 | 1 | 2 | 3 | 4 |      one split, stored once behind the loop

        in plain loops:             for split in the program's splits:
                                        for tile in split: sums = _decode_tile(sums, tile)
                                        merge the sums into `total`, or store them

    Triton pipelines no loads in a nested loop or a loop with a branch. This is therefore one loop over all tiles. Its
    last part runs for every tile, but takes effect only if `ends`, on the last tile of a split:

        300 tokens, splits of 128, TILE_N 64        tile   0    64    128  192    256
                                                    split  0    0     1    1      2
                                                    ends   .    x     .    x      x
    """
    start, end = keys.oldest, keys.end
    split_len = split_length(keys.seq_len, sizes.TILE_N)
    split = start // split_len
    if not ONE_PROGRAM:
        num_splits_left = tl.cdiv(end, split_len) - split
        splits_per_program = 1 if ONE_SPLIT else tl.cdiv(num_splits_left, tl.num_programs(1))
        split += splits_per_program * tl.program_id(1)  # this program's first split
        start = tl.maximum(start, split * split_len)
        end = tl.minimum(end, (split + splits_per_program) * split_len)
    start = start // sizes.TILE_N * sizes.TILE_N  # tiles of keys begin at multiples of TILE_N
    column = tl.arange(0, sizes.TILE_M)
    q, _, out, valid = _load_queries(queries, keys, column, sizes)
    q, head, dim = tl.trans(q), queries.kv_head * sizes.GROUP + column % sizes.GROUP, tl.arange(0, sizes.DIM_PADDED)
    # Columns: the GROUP heads of this sequence, then padding; with prefix those of each sequence of the entry. Of these
    # num_columns, `begun` are those whose sums the prefix launch has stored, `complete` those that are stored now.
    seq = queries.seq.to(tl.int64) + column // sizes.GROUP
    at, num_columns = (seq * sizes.KV_HEADS * sizes.GROUP + head) * num_splits, sizes.GROUP * queries.num_tokens
    sums = _initial_sums(sizes.DIM_PADDED, sizes.TILE_M, sizes.TILE_M)  # of the split
    total = _initial_sums(sizes.DIM_PADDED, sizes.TILE_M, sizes.TILE_M)  # of the splits before it
    if RESUMES:
        # The prefix launch may have stopped inside a split, the first one here: go on from its sums.
        begun = column < tl.where(start % split_len > 0, num_columns, 0)
        sums = _load_sums(split_acc, split_sums, at + split, begun, dim, sizes.HEAD_DIM)
    block = _block_of(keys, start, sizes)
    for tile in range(start, end, sizes.TILE_N):
        slots = _slots_of(block, tile, sizes)
        block = _block_of(keys, tile + sizes.TILE_N, sizes)
        sums = _decode_tile(sums, q, keys, slots, tile, end, scale, sizes)
        if not ONE_SPLIT:
            ends = tile + sizes.TILE_N >= tl.minimum((split + 1) * split_len, end)
            if ONE_PROGRAM:
                total = _where(ends, _merge(total, sums), total)
            else:
                complete = column < tl.where(ends, num_columns, 0)
                _store_sums(split_acc, split_sums, at + split, sums, complete, dim, sizes.HEAD_DIM)
            sums = _where(ends, Sums(0.0, -float("inf"), 0.0), sums)
            split += ends.to(tl.int32)
    if ONE_SPLIT:
        _store_sums(split_acc, split_sums, at + split, sums, column < num_columns, dim, sizes.HEAD_DIM)
    elif ONE_PROGRAM:
        tl.store(out, tl.trans(_normalize(total.acc, total.sum[None, :], v_scale)), mask=valid)


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
        scores_b = tl.dot(q[1], k, input_precision=sizes.PRECISION)
        a = _attend(a, scores_a, v, token, exists, position[0], scale, MASKED, sizes)
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
    """
    HALF: tl.constexpr = sizes.TILE_M // 2
    index = tl.arange(0, HALF)
    q_a, position_a, out_a, valid_a = _load_queries(queries, keys, index, sizes)
    q_b, position_b, out_b, valid_b = _load_queries(queries, keys, HALF + index, sizes)
    a, b = _initial_sums(HALF, sizes.DIM_PADDED, HALF), _initial_sums(HALF, sizes.DIM_PADDED, HALF)
    q, position = (q_a, q_b), (position_a, position_b)
    start = keys.oldest // sizes.TILE_N * sizes.TILE_N
    block = _block_of(keys, start, sizes)
    if not sizes.WINDOW:
        diagonal = (first_position + 1) // sizes.TILE_N * sizes.TILE_N
        a, b, block = _prefill_tiles(a, b, q, position, keys, block, start, diagonal, scale, False, sizes)
        start = diagonal
    a, b, block = _prefill_tiles(a, b, q, position, keys, block, start, keys.end, scale, True, sizes)
    tl.store(out_a, _normalize(a.acc, a.sum[:, None], v_scale), mask=valid_a)
    tl.store(out_b, _normalize(b.acc, b.sum[:, None], v_scale), mask=valid_b)


# --------------------------------------------------------------------------------------------------
# In Triton: splits of a context, in decode
#
# The rule of softmax in one pass also merges the sums of two parts of a context. In decode a long context can therefore
# be cut into **splits** of several tiles that are computed in parallel (flash-decoding, Dao et al. 2023; vLLM's "V2").
# Prefill has no splits: the queries of a prompt are usually enough for many programs.
# --------------------------------------------------------------------------------------------------

MIN_SPLIT, MID_SPLIT, MAX_SPLITS = (tl.constexpr(n) for n in (tiles.MIN_SPLIT, tiles.MID_SPLIT, tiles.MAX_SPLITS))
MERGE_UNROLL = tl.constexpr(8)  # splits that merge_splits_kernel loads at a time (measured on an H200)


@jit
def split_length(seq_len, TILE_N: tl.constexpr):
    """Tokens per split, a multiple of TILE_N; nanopaged/tiles.py has a table. The length depends on the sequence alone.
    The batch and the grid therefore do not change the order of additions."""
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
    """The sums of the splits so far and of this one, as one. ONE_PROGRAM and merge_splits_kernel call this in the same
    order. Their bits are the same if the compiler fuses multiplications and additions alike in both."""
    new_max = tl.maximum(total.max, split.max)
    base = tl.where(new_max == -float("inf"), 0.0, new_max)
    alpha, beta = tl.exp2(total.max - base), tl.exp2(split.max - base)
    return Sums(total.acc * alpha[None, :] + split.acc * beta[None, :], new_max, total.sum * alpha + split.sum * beta)


@jit
def _load_sums(split_acc, split_sums, at, exists, dim, HEAD_DIM: tl.constexpr):
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
def merge_splits_kernel(out, split_acc, split_sums, seq_lens, query_start_loc, v_scale, out_token, out_head, num_splits,
                        HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, TILE_N: tl.constexpr, WINDOW: tl.constexpr,
                        PDL: tl.constexpr):
    """Grid (sequence, head): merge the sums of its splits and normalize (vLLM's reduce kernel)."""
    seq, head = tl.program_id(0), tl.program_id(1)
    q_start = tl.load(query_start_loc + seq).to(tl.int64)
    query_len = tl.load(query_start_loc + seq + 1) - q_start
    seq_len = tl.load(seq_lens + seq)
    _wait_for_previous_kernel(PDL)
    if query_len != 1:
        return
    split_len = split_length(seq_len, TILE_N)
    first, last = 0, (seq_len - 1) // split_len
    if WINDOW:
        first = tl.maximum(seq_len - WINDOW, 0) // split_len
    dim = tl.arange(0, DIM_PADDED)
    at = (seq.to(tl.int64) * tl.num_programs(1) + head) * num_splits + tl.arange(0, 1)
    total = _initial_sums(DIM_PADDED, 1, 1)
    for split in range(first, last + 1, MERGE_UNROLL):
        for i in tl.static_range(MERGE_UNROLL):  # unrolled, so that the loads do not wait for each other
            exists = (split + i + tl.arange(0, 1)) <= last
            total = _merge(total, _load_sums(split_acc, split_sums, at + split + i, exists, dim, HEAD_DIM))
    out_at = out + q_start * out_token + head * out_head + dim[:, None]
    tl.store(out_at, _normalize(total.acc, total.sum[None, :], v_scale), mask=(dim < HEAD_DIM)[:, None])


# --------------------------------------------------------------------------------------------------
# In Triton: cascade
#
# Sequences whose tables begin with the same blocks stand side by side (see nanopaged/features/cascade.py). The prefix
# launch computes the tiles that they have in common. A program takes the new tokens of all of them as its columns, as
# if they were one sequence's, and reads K and V once. The suffix launch computes the other tiles, and goes on from the
# sums of a split that the prefix launch has begun. merge_splits_kernel merges all splits.
# --------------------------------------------------------------------------------------------------

def _cascade_launches(cascade: tuple[Tensor, Tensor, int], num_kv_heads: int, num_splits: int, grid: tuple[int, int],
                      config: dict[str, int]) -> list[tuple[str, Tensor, tuple[int, int], dict[str, int]]]:
    """(phase, work, grid, configuration) of the two launches in place of decode's, which has this grid and config."""
    entries, num_common_tokens, columns = cascade
    of_prefix = config | dict(TILE_M=columns, num_stages=tiles.PREFIX_STAGES[columns])
    return [("prefix", entries, (len(entries) * num_kv_heads, num_splits), of_prefix),
            ("suffix", num_common_tokens, grid, config)]


# --------------------------------------------------------------------------------------------------
# Between the products: what follows makes a step faster and adds no idea.
#
# A library (cuBLAS) computes the large matrix products of a step. These kernels compute what stands between them, each
# in one launch where plain torch needs several, and products of few rows. `nanopaged/features/fused.py` puts them into
# the model, and graphs.py beside it into sampling. Each names the plain form that it replaces. What does not
# depend on the previous kernel, above all weights, is loaded before a program waits for that kernel. A row is one of a
# matrix here: x has one for each token, and in front of the logits one for each logit row.
# --------------------------------------------------------------------------------------------------

# Of `few_rows_linear`, for 2 rows and more. Within these limits the products of Qwen3, 0.6B to 8B, are faster than the
# library's on an H200.
MOST_FEW_ROWS, FEWEST_PROGRAMS = 16, 64
MOST_FEW_ROWS_FP8 = 64  # with weights in FP8
SMALL_INNER_SIZE = 1024  # up to here a program has fewer rows of the weight, so that there are enough programs
MOST_16_BIT_ROWS = 8  # of x, with weights in FP8; with more, turning the weights into 16 bits takes the longest


def add_and_norm(x: Tensor | tuple[Tensor, ...], residual: Tensor, weight: Tensor, bias: Tensor | None,
                 eps: float) -> tuple[Tensor, Tensor]:
    """(norm(sum), sum) of x and residual, with `model.Norm`. x [T, D], or partial products of it [count, T, D]; a
    tuple: those of several GPUs. The sum is taken in float32 and rounded once."""
    parts = tuple(x) if isinstance(x, tuple) else (x,)
    (num_rows, size), (out, total) = residual.shape, (torch.empty_like(residual), torch.empty_like(residual))
    padded, in_chain = tiles.next_power_of_2(size), takes_rows(num_rows, residual.dtype, residual.device)
    add_and_norm_kernel[(num_rows,)](
        parts, residual, weight, weight if bias is None else bias, out, total, eps, num_rows,
        COUNT=len(parts[0]) if parts[0].dim() == 3 else 1, SIZE=size, PADDED=padded, CENTER=bias is not None,
        num_warps=min(16, max(4, padded // 128)), **launch_options(residual.device, in_chain=in_chain))
    return out, total


@jit
def add_and_norm_kernel(parts, residual, weight, bias, out, total, eps, num_rows, COUNT: tl.constexpr,
                        SIZE: tl.constexpr, PADDED: tl.constexpr, CENTER: tl.constexpr, PDL: tl.constexpr):
    """Grid (token,). CENTER: layer norm, else RMS norm."""
    i = tl.arange(0, PADDED)
    inside, row = i < SIZE, tl.program_id(0).to(tl.int64)
    factor = tl.load(weight + i, mask=inside, other=0.0)
    _wait_for_previous_kernel(PDL)
    x = tl.load(residual + row * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    for gpu in tl.static_range(len(parts)):
        for n in tl.static_range(COUNT):
            x += tl.load(parts[gpu] + (n * num_rows + row) * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    rounded = x.to(total.dtype.element_ty)
    tl.store(total + row * SIZE + i, rounded, mask=inside)
    x = rounded.to(tl.float32)
    if CENTER:
        x = tl.where(inside, x - tl.sum(x, 0) / SIZE, 0.0)
    x = x / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    if CENTER:
        x = x * factor.to(tl.float32) + tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    else:
        x = x.to(factor.dtype).to(tl.float32) * factor.to(tl.float32)
    tl.store(out + row * SIZE + i, x.to(out.dtype.element_ty), mask=inside)


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """`model.activate`."""
    out = x.new_empty(len(x), x.shape[1] // (2 if gated else 1))
    tile = min(1024, tiles.next_power_of_2(out.shape[1]))
    activate_kernel[(len(x), cdiv(out.shape[1], tile))](
        x, out, out.shape[1], TILE=tile, GATED=gated, ACTIVATION=activation, **launch_options(x.device, in_chain=False))
    return out


@jit
def activate_kernel(x, out, size, TILE: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
                    PDL: tl.constexpr):
    """Grid (token, tile of the result's columns)."""
    _wait_for_previous_kernel(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = x + row * size * (2 if GATED else 1) + i
    gate = tl.load(at, mask=i < size, other=0.0)
    up = gate
    if GATED:
        up = tl.load(at + size, mask=i < size, other=0.0)
    tl.store(out + row * size + i, _activate(gate, up, GATED, ACTIVATION), mask=i < size)


@jit
def _activate(gate, up, GATED: tl.constexpr, ACTIVATION: tl.constexpr):
    """Rounded as in plain torch: after the activation, and after the product."""
    x = gate.to(tl.float32)
    if ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "silu" or ACTIVATION == "swish":
        y = x * tl.sigmoid(x)
    else:  # gelu_tanh; tanh(z) is 2 * sigmoid(2 * z) - 1
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    y = y.to(gate.dtype)
    if GATED:
        y = (y.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    return y


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize` of nanopaged/features/fp8.py, in one launch."""
    (num_rows, size), padded = x.shape, tiles.next_power_of_2(x.shape[1])
    out, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(num_rows, 1, dtype=torch.float32)
    quantize_rows_kernel[(num_rows,)](x, out, scale, SIZE=size, PADDED=padded, num_warps=min(16, max(4, padded // 512)),
                                      **launch_options(x.device))
    return out, scale


@jit
def quantize_rows_kernel(x, out, scale, SIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    """Grid (row,)."""
    i, row = tl.arange(0, PADDED), tl.program_id(0).to(tl.int64)
    _wait_for_previous_kernel(PDL)
    numbers = tl.load(x + row * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(numbers), 0), 1e-30) / 448.0
    tl.store(scale + row, factor)
    tl.store(out + row * SIZE + i, (numbers / factor).to(out.dtype.element_ty), mask=i < SIZE)


def takes_rows(num_rows: int, dtype: torch.dtype, device: torch.device, is_fp8: bool = False) -> bool:
    """Whether `few_rows_linear` is to compute products of so many rows. For several rows it needs Hopper's shared
    memory, and 16-bit numbers: tensor cores are slow in float32. is_fp8: the weight"""
    is_able = dtype.itemsize == 2 and tiles.shared_memory(device) > tiles.LARGE_SHARED_MEMORY
    return num_rows <= 1 or is_able and num_rows <= (MOST_FEW_ROWS_FP8 if is_fp8 else MOST_FEW_ROWS)


def has_few_rows(x: Tensor, weight: Tensor, count: int = 1) -> bool:
    """Whether `few_rows_linear` is to compute this product, or `count` partial products of it."""
    is_fp8 = weight.itemsize == 1
    rows = few_rows_form(x.shape[1] // count, 8, False, False, x.itemsize)["ROWS"]
    fills_card = len(x) <= 1 or is_fp8 or cdiv(len(weight), rows) * count >= FEWEST_PROGRAMS
    return fills_card and takes_rows(len(x), x.dtype, x.device, is_fp8)


def few_rows_form(size: int, padded: int, gated: bool, is_fp8: bool, itemsize: int) -> dict[str, int]:
    """Of `few_rows_kernel`: rows of the weight in a program, numbers of a row in a tile, and tiles that the loop's
    pipeline holds. size: of the inner dimension. Of a large product that is not gated a multiprocessor has one program,
    and many small tiles are on their way. (The fastest of 12 to 20 forms for the products of Qwen3-0.6B, of 8B in the
    whole model, and of 8B in FP8, on an H200.)"""
    if size <= SMALL_INNER_SIZE or is_fp8:
        tile = 256 if is_fp8 or gated and padded == 8 else 128
        return dict(ROWS=64 if is_fp8 else 32, TILE=tile, STAGES=3 if tile == 256 and padded != 16 else 4)
    tile, stages = (128, 3) if gated else (64, 14)
    tile_bytes = (64 * (2 if gated else 1) + padded) * tile * itemsize
    return dict(ROWS=64, TILE=tile, STAGES=min(stages, tiles.LARGE_SHARED_MEMORY // tile_bytes))


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None, activation: str = "",
                    gated: bool = False, count: int = 1, scale: Tensor | None = None) -> Tensor:
    """F.linear for x [T, in], T up to 16, and weight [out, in]; with an activation, `model.activate` of it (gated: the
    first half of the weight's rows is the gate). The library's kernels are made for many rows, and are not in the chain
    of dependent launches. count above 1: partial products [count, T, out], each of a part of the inner dimension.
    scale: of a weight in FP8, [out, 1]. T is up to 64, and from 9 on x is quantised, too."""
    num_rows, size = x.shape
    num_out = len(weight) // (2 if gated else 1)
    out = x.new_empty(*[count] * (count > 1), num_rows, num_out) if out is None else out
    if not num_rows:  # of logits, in a step that samples nothing
        return out
    options = dict(BIAS=bias is not None, GATED=gated, ACTIVATION=activation, **launch_options(x.device))
    is_fp8, bias, scale = scale is not None, weight if bias is None else bias, weight if scale is None else scale
    if num_rows > 1:
        x, x_scale = quantize_rows(x) if is_fp8 and num_rows > MOST_16_BIT_ROWS else (x, x)
        padded = max(8, tiles.next_power_of_2(num_rows))
        form = few_rows_form(size // count, padded, gated, is_fp8, x.itemsize)
        few_rows_kernel[(cdiv(num_out, form["ROWS"]), count)](
            x, x_scale, weight, scale, bias, out, num_rows, num_out, SIZE=size, PART=size // count, PADDED=padded,
            **form, **options)
        return out
    # The fastest of 27 forms for ten products on an H200; with FP8 of eleven for Qwen3-8B's.
    tile = tiles.next_power_of_2(size)
    tile = min(4096 if size <= 4096 else 2048, tile) if is_fp8 else min(2048, max(1, tile // 2))
    rows = 2 if is_fp8 else max(2, 2048 // tile)
    one_row_kernel[(cdiv(num_out, rows),)](x, weight, scale, bias, out, num_out, SIZE=size, ROWS=rows, TILE=tile,
                                           **options)
    return out


@jit
def one_row_kernel(x, weight, scale, bias, out, num_out, SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
                   BIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    """Grid (ROWS rows of the weight,). A program adds up ROWS x TILE products side by side, and sums them at the end.
    The loop loads a tile of weights before it needs it, the first one before the program waits. A thread loads 8
    numbers at a time, of x and of the weight: of FP8 it could load 16, but x would go through shared memory then."""
    row, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.max_contiguous(tl.arange(0, TILE), 8)
    at, exists = weight + row.to(tl.int64)[:, None] * SIZE + i[None, :], (row < num_out)[:, None]
    up_at = at + num_out.to(tl.int64) * SIZE
    gate = _load_weights(at, exists, i, SIZE)
    up = gate
    sums, up_sums = tl.zeros([ROWS, TILE], tl.float32), tl.zeros([ROWS, TILE], tl.float32)
    if GATED:
        up = _load_weights(up_at, exists, i, SIZE)
    _wait_for_previous_kernel(PDL)
    for start in range(0, SIZE, TILE):
        factor = tl.load(x + start + i, mask=start + i < SIZE, other=0.0).to(tl.float32)[None, :]
        sums += gate.to(tl.float32) * factor
        gate = _load_weights(at + start + TILE, exists, start + TILE + i, SIZE)  # after the last tile: none
        if GATED:
            up_sums += up.to(tl.float32) * factor
            up = _load_weights(up_at + start + TILE, exists, start + TILE + i, SIZE)
    y, up_y = tl.sum(sums, 1), tl.sum(up_sums, 1)
    if weight.dtype.element_ty == tl.float8e4nv:
        y *= tl.load(scale + row, mask=row < num_out, other=0.0)
        if GATED:
            up_y *= tl.load(scale + num_out + row, mask=row < num_out, other=0.0)
    if BIAS:
        y += tl.load(bias + row, mask=row < num_out, other=0.0).to(tl.float32)
        if GATED:
            up_y += tl.load(bias + num_out + row, mask=row < num_out, other=0.0).to(tl.float32)
    y = y.to(out.dtype.element_ty)
    if ACTIVATION != "":
        y = _activate(y, up_y.to(out.dtype.element_ty), GATED, ACTIVATION)
    tl.store(out + row, y, mask=row < num_out)


@jit
def few_rows_kernel(x, x_scale, weight, scale, bias, out, num_rows, num_out, SIZE: tl.constexpr, PART: tl.constexpr,
                    PADDED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
                    BIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    """Grid (ROWS rows of the weight, part of the inner dimension). The rows of x are columns, as queries are in decode:
    tensor cores multiply 16 rows of the weight by 8 columns at least, and x is padded to PADDED columns. The loop's
    pipeline loads the weights after the wait: loading a tile before was slower, but for the smallest product.

    The hardware turns FP8 into float16 in one instruction, and into bfloat16 in several. Beside weights in FP8 a
    bfloat16 x therefore becomes float16, times 2 ** -4: numbers up to 2 ** 20 stay finite, from 2 ** -10 on exact."""
    row, column, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, TILE)
    start, row_exists, column_exists = tl.program_id(1) * PART, (row < num_out)[:, None], (column < num_rows)[None, :]
    at = weight + row.to(tl.int64)[:, None] * SIZE + start + i[None, :]
    up_at, x_at = at + num_out.to(tl.int64) * SIZE, x + column[None, :] * SIZE + start + i[:, None]
    sums, up_sums = tl.zeros([ROWS, PADDED], tl.float32), tl.zeros([ROWS, PADDED], tl.float32)
    IS_FP8: tl.constexpr = weight.dtype.element_ty == tl.float8e4nv
    QUANTIZED: tl.constexpr = x.dtype.element_ty == tl.float8e4nv
    FACTOR: tl.constexpr = 2.0 ** -4 if IS_FP8 and x.dtype.element_ty == tl.bfloat16 else 1.0
    _wait_for_previous_kernel(PDL)
    for k in tl.range(0, PART, TILE, num_stages=STAGES):
        inside = k + i < PART
        factors = tl.load(x_at + k, mask=inside[:, None] & column_exists, other=0.0)
        if FACTOR != 1.0:
            # A product would be computed in float16: the compiler narrows it, although bfloat16 has larger numbers.
            factors = tl.fma(factors.to(tl.float32), FACTOR, 0.0).to(tl.float16)
        gate = tl.load(at + k, mask=row_exists & inside[None, :], other=0.0)
        sums = tl.dot(gate.to(factors.dtype), factors, sums, input_precision="ieee")
        if GATED:
            up = tl.load(up_at + k, mask=row_exists & inside[None, :], other=0.0)
            up_sums = tl.dot(up.to(factors.dtype), factors, up_sums, input_precision="ieee")
    if QUANTIZED:
        of_column = tl.load(x_scale + column, mask=column < num_rows, other=0.0)[None, :]
        sums, up_sums = sums * of_column, up_sums * of_column
    if FACTOR != 1.0:
        sums, up_sums = sums / FACTOR, up_sums / FACTOR
    if IS_FP8:
        sums *= tl.load(scale + row, mask=row < num_out, other=0.0)[:, None]
        if GATED:
            up_sums *= tl.load(scale + num_out + row, mask=row < num_out, other=0.0)[:, None]
    if BIAS:
        sums += tl.load(bias + row, mask=row < num_out, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_sums += tl.load(bias + num_out + row, mask=row < num_out, other=0.0).to(tl.float32)[:, None]
    y = sums.to(out.dtype.element_ty)
    if ACTIVATION != "":
        y = _activate(y, up_sums.to(out.dtype.element_ty), GATED, ACTIVATION)
    at_out = out + (tl.program_id(1) * num_rows + column)[None, :].to(tl.int64) * num_out
    tl.store(at_out + row[:, None], y, mask=row_exists & column_exists)


@jit
def _load_weights(at, exists, column, SIZE: tl.constexpr):
    """.cg keeps weights, which are read once, out of the L1 cache."""
    return tl.load(at, mask=exists & (column < SIZE)[None, :], other=0.0, cache_modifier=".cg")


# --------------------------------------------------------------------------------------------------
# Mixtures of experts (nanopaged/features/experts.py)
# --------------------------------------------------------------------------------------------------

def experts_form(num_rows: int, top_k: int, count: int, gated: bool, dtype: torch.dtype,
                 shared_memory: int) -> dict[str, int]:
    """Of `experts_kernel`, for num_rows tokens that choose top_k of `count` experts each: rows of a weight and columns
    of a program, numbers of a row in a tile, and what the loop's pipeline holds. A program of few columns waits for
    memory, and one of many for the tensor cores. (H200, Qwen3-30B-A3B's shape)"""
    mean, is_large = num_rows * top_k / count, dtype.itemsize <= 2 and shared_memory > tiles.LARGE_SHARED_MEMORY
    most = 128 if is_large and mean >= 128 else 64
    columns = 8 if num_rows <= 8 else min(most, max(16, tiles.next_power_of_2(int(2 * mean))))
    rows, tile, stages, warps = 64, 64, 2, 4
    if is_large and columns <= 16:
        rows, tile, stages, warps = (64, 128, 3, 4) if gated else (128, 64, 5, 8)
    elif is_large:
        rows, tile, stages, warps = (128, 64, 4, 8) if gated else (256, 32, 6, 8) if columns > 64 else (256, 64, 4, 8)
    return dict(ROWS=rows, COLUMNS=columns, TILE=tile * 2 // dtype.itemsize, STAGES=stages, num_warps=warps)


def mix_experts(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normalized: bool, activation: str,
                *scales: Tensor) -> Tensor:
    """`Experts.forward` of nanopaged/features/experts.py as partial products [top_k, T, D]: a token's results, times
    their scores. x [T, D], logits of the router [T, E] or partial products of it, gate_up [E, 2 * I, D], down [E, D,
    I]. scales: of weights in FP8, [E, 2 * I, 1] and [E, D, 1]; what is multiplied with these is quantised, too."""
    num_rows, (_, size, inner) = len(x), down.shape
    hidden, out = x.new_empty(top_k * num_rows, inner), x.new_empty(top_k, num_rows, size)
    if num_rows:
        routed = route_experts(logits, top_k, normalized)
        experts_product(x, gate_up, *routed, hidden, activation, *scales[:1])
        experts_product(hidden, down, *routed, out, "", *scales[1:])
    return out


def route_experts(logits: Tensor, top_k: int, normalized: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Pair n * T + t is token t with its n-th expert. Returns the pairs' scores [top_k, T]; for each expert, how many
    pairs it has, and in any order which ones: [E], [E, T]."""
    num_rows, count = logits.shape[-2:]
    scores = logits.new_empty(top_k, num_rows, dtype=torch.float32)
    counts, pairs = logits.new_zeros(count, dtype=torch.int32), logits.new_empty(count, num_rows, dtype=torch.int32)
    route_kernel[(num_rows,)](
        logits, scores, counts, pairs, num_rows, EXPERTS=count, PADDED=tiles.next_power_of_2(count), TOP_K=top_k,
        CHOICES=tiles.next_power_of_2(top_k), NORMALIZED=normalized, COUNT=len(logits) if logits.dim() == 3 else 1,
        num_warps=1, **launch_options(logits.device))
    return scores, counts, pairs


def experts_product(x: Tensor, weight: Tensor, scores: Tensor, counts: Tensor, pairs: Tensor, out: Tensor,
                    activation: str, scale: Tensor | None = None) -> None:
    """Fill `out`, which has a row for each pair. With an activation: `activate` of the products, and x has a row for
    each token. Without: the products times their scores, and x has a row for each pair."""
    (top_k, num_rows), count = scores.shape, len(counts)
    form = experts_form(num_rows, top_k, count, activation != "", weight.dtype, tiles.shared_memory(x.device))
    x, x_scale = (x, x) if scale is None else quantize_rows(x)
    # An expert has at most num_rows pairs, and all together have top_k * num_rows.
    num_tiles = min(top_k * num_rows, count) + (num_rows > form["COLUMNS"]) * top_k * num_rows // form["COLUMNS"]
    experts_kernel[(cdiv(out.shape[-1], form["ROWS"]), num_tiles)](
        x, x_scale, weight, x if scale is None else scale, scores, out, counts, pairs, num_rows, OUT=out.shape[-1],
        SIZE=x.shape[1], EXPERTS=count, PADDED=tiles.next_power_of_2(count), ACTIVATION=activation, **form,
        **launch_options(x.device))


@jit
def route_kernel(logits, scores, counts, pairs, num_rows, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
                 TOP_K: tl.constexpr, CHOICES: tl.constexpr, NORMALIZED: tl.constexpr, COUNT: tl.constexpr,
                 PDL: tl.constexpr):
    """Grid (token,). `Experts.choose`, and the token's pairs are added to those of its experts. Padding may hold
    anything. Its tokens get different experts all the same, so that no expert has more pairs than there are tokens."""
    token, expert, n = tl.program_id(0), tl.arange(0, PADDED), tl.arange(0, CHOICES)
    _wait_for_previous_kernel(PDL)
    x = tl.zeros([PADDED], tl.float32)
    for part in tl.static_range(COUNT):
        at = logits + (part * num_rows + token).to(tl.int64) * EXPERTS + expert
        x += tl.load(at, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), -LARGEST)
    x = tl.where(expert < EXPERTS, x, -float("inf"))
    largest, score, chosen = tl.max(x, 0), tl.zeros([CHOICES], tl.float32), tl.zeros([CHOICES], tl.int32)
    total = tl.sum(tl.exp(x - largest), 0)
    for i in tl.static_range(TOP_K):
        best, at = tl.max(x, 0, return_indices=True)
        score, chosen = tl.where(n == i, tl.exp(best - largest), score), tl.where(n == i, at, chosen)
        x = tl.where(expert == at, -float("inf"), x)
    if NORMALIZED:
        total = tl.sum(score, 0)
    exists, pair = n < TOP_K, n * num_rows + token
    tl.store(scores + pair, score / total, mask=exists)
    place = tl.atomic_add(counts + chosen, 1, mask=exists, sem="relaxed")
    tl.store(pairs + chosen * num_rows + place, pair, mask=exists)


@jit
def experts_kernel(x, x_scale, weight, scale, scores, out, counts, pairs, num_rows, OUT: tl.constexpr,
                   SIZE: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
                   PDL: tl.constexpr):
    """Grid (ROWS rows of a weight, COLUMNS pairs of one expert); programs behind the last pair end at once. With an
    activation it is the first product: a pair's x is its token's, the weight's first half is the gate. The second one
    has a row of x for each pair, and multiplies by scores. Rows and columns that do not exist load others', and are
    not stored."""
    expert, tile = tl.arange(0, PADDED), tl.program_id(1)
    FIRST: tl.constexpr = ACTIVATION != ""
    _wait_for_previous_kernel(PDL)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    # 2, 0 and 5 pairs, COLUMNS 4: experts end with tiles 1 1 3. Tile 2 is expert 2's, whose tile 2 - 3 + 2 = 1 it is.
    end_tile = tl.cumsum(tl.cdiv(count, COLUMNS), 0)
    at = tl.sum((end_tile <= tile).to(tl.int32), 0)  # the expert of this tile
    if at >= EXPERTS:
        return
    count = tl.sum(tl.where(expert == at, count, 0), 0)
    tile = tile - tl.sum(tl.where(expert == at, end_tile, 0), 0) + tl.cdiv(count, COLUMNS)
    column, i = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, TILE)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.load(pairs + at * num_rows + column, mask=column < count, other=0)
    source = pair % num_rows if FIRST else pair
    x_at = x + source.to(tl.int64)[None, :] * SIZE + i[:, None]
    weight_row = at.to(tl.int64) * (2 * OUT if FIRST else OUT) + tl.minimum(row, OUT - 1)
    gate_at = weight + weight_row[:, None] * SIZE + i[None, :]
    sums, up_sums = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in tl.range(0, SIZE, TILE, num_stages=STAGES):
        factors = _load_part(x_at + k, k + i[:, None], SIZE, TILE)
        sums = tl.dot(_load_part(gate_at + k, k + i[None, :], SIZE, TILE), factors, sums, input_precision="ieee")
        if FIRST:
            up = _load_part(gate_at + OUT * SIZE + k, k + i[None, :], SIZE, TILE)
            up_sums = tl.dot(up, factors, up_sums, input_precision="ieee")
    if weight.dtype.element_ty == tl.float8e4nv:
        of_column = tl.load(x_scale + source)[None, :]
        sums = sums * of_column * tl.load(scale + weight_row)[:, None]
        if FIRST:
            up_sums = up_sums * of_column * tl.load(scale + weight_row + OUT)[:, None]
    if FIRST:
        y = _activate(sums.to(out.dtype.element_ty), up_sums.to(out.dtype.element_ty), True, ACTIVATION)
    else:
        y = (sums * tl.load(scores + pair)[None, :]).to(out.dtype.element_ty)
    out_at = out + pair.to(tl.int64)[None, :] * OUT + row[:, None]
    tl.store(out_at, y, mask=(row < OUT)[:, None] & (column < count)[None, :])


@jit
def _load_part(at, i, SIZE: tl.constexpr, TILE: tl.constexpr):
    """A tile along the inner dimension; the last one may be longer than that."""
    return tl.load(at) if SIZE % TILE == 0 else tl.load(at, mask=i < SIZE, other=0.0)


# --------------------------------------------------------------------------------------------------
# Sampling
# --------------------------------------------------------------------------------------------------

GOLDEN, MIX_1, MIX_2, LOW_1, LOW_2 = (tl.constexpr(number) for number in HASH)
COLDEST, LARGEST = tl.constexpr(SMALLEST_TEMPERATURE), tl.constexpr(3e38)


def pick(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """sampler.pick of nanopaged/device in two launches: the best token of each tile, then the best of these."""
    num_rows, size = logits.shape
    tile = min(2048, tiles.next_power_of_2(size))
    num_tiles = cdiv(size, tile)
    best = logits.new_empty(num_rows, num_tiles, dtype=torch.float32)
    at, out = torch.empty_like(best, dtype=torch.int32), torch.empty_like(position)
    pick_kernel[(num_rows, num_tiles)](
        logits, temperature, seed, position, best, at, logits.stride(0), temperature.stride(0), seed.stride(0), size,
        TILE=tile, **launch_options(logits.device))
    best_of_tiles_kernel[(num_rows,)](best, at, out, num_tiles, TILES=tiles.next_power_of_2(num_tiles), num_warps=1,
                                      **launch_options(logits.device))
    return out


@jit
def pick_kernel(logits, temperature, seed, position, best, at, logits_row, temperature_row, seed_row, size,
                TILE: tl.constexpr, PDL: tl.constexpr):
    """Grid (logit row, tile of the vocabulary)."""
    _wait_for_previous_kernel(PDL)
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * logits_row + token, mask=token < size, other=-float("inf")).to(tl.float32)
    heat = tl.load(temperature + row * temperature_row)
    key = tl.load(seed + row * seed_row) + tl.load(position + row) * GOLDEN
    key = (key ^ _shift(key, 30)) * MIX_1
    key = (key ^ _shift(key, 27)) * MIX_2
    score = tl.where(heat < COLDEST, x, x / tl.maximum(heat, COLDEST) + _gumbel(key ^ _shift(key, 31), token))
    score = tl.minimum(score, LARGEST)  # finite, so that infinity can say: a logit is NaN or infinite, so no token
    score = tl.where((x == x) & (x < float("inf")), score, float("inf"))
    largest, index = tl.max(score, 0, return_indices=True)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + out, largest)
    tl.store(at + out, tl.program_id(1) * TILE + index)


@jit
def best_of_tiles_kernel(best, at, out, num_tiles, TILES: tl.constexpr, PDL: tl.constexpr):
    """Grid (logit row,). -1: the largest logit is not finite."""
    _wait_for_previous_kernel(PDL)
    row, i = tl.program_id(0), tl.arange(0, TILES)
    largest, tile = tl.max(tl.load(best + row * num_tiles + i, mask=i < num_tiles, other=-float("inf")), 0,
                           return_indices=True)
    token = tl.load(at + row * num_tiles + tile)
    tl.store(out + row, tl.where(tl.abs(largest) < float("inf"), token, -1).to(tl.int64))


@jit
def _shift(x, BITS: tl.constexpr):
    """A shift to the right that does not copy the sign."""
    return (x.to(tl.uint64) >> BITS).to(tl.int64)


@jit
def _gumbel(key, token):
    """sampler.gumbel of nanopaged/device."""
    x = token.to(tl.uint32) ^ key.to(tl.uint32)
    x = (x ^ (x >> 16)) * LOW_1
    x = (x ^ (x >> 15) ^ (key.to(tl.uint64) >> 32).to(tl.uint32)) * LOW_2
    v = ((x ^ (x >> 16)).to(tl.float32) + 0.5) * 2.0 ** -32
    # -log(1 - v). A small v takes its series, because 1 - v would lose v's digits; the largest v is rounded to 1.
    race = tl.where(v < 2.0 ** -8, v + 0.5 * v * v, -tl.log(tl.maximum(1.0 - v, 2.0 ** -25)))
    return -tl.log(race)


# --------------------------------------------------------------------------------------------------
# Only on Hopper: prefill with warps of different tasks
#
# In `_prefill` all warps of a program do the same: they load a tile, multiply, compute exponentials. Meanwhile the
# tensor cores of an H200 wait for a third of the time. FlashAttention-3 (Shah et al. 2024) gives warps different tasks
# (**warp specialization**), which plain Triton cannot express on this card. **Gluon** can. It is Triton's lower level:
# the text says which warps do what, and how a tensor lies in registers or memory (its **layout**). A program has three
# parts. They go through the same work list as the plain kernel:
#
#     a copying warp       It asks the hardware's copying unit (TMA) for tiles. Copies run by themselves.
#     two warpgroups       Each has 4 warps and takes 64 of the 128 rows of a tile of queries. It issues products
#                          (wgmma), which the tensor cores compute by themselves, and waits for them.
#
# The parts wait for each other at barriers in shared memory, which has two buffers each for tiles of q, K and V:
#
#     copying warp   K0 V0 K1 V1          K2      V2         K3      V3
#                    |  |  |  |           ^       ^          ^       ^       ^  both warpgroups have released the buffer
#                    v  v  v  v           |       |          |       |       v  the copy has arrived
#     warpgroup 0    S0 softmax 0  S1 A0 softmax 1  S2 A1 softmax 2  S3 A2   S  scores: q times a tile of K
#     warpgroup 1          S0 softmax 0  S1 A0 softmax 1  S2 A1 softmax 2    A  acc += weights times a tile of V
#
# While one warpgroup computes a softmax, the tensor cores serve the other one. The copying warp runs ahead by two tiles
# of keys, and by one of queries: each multiprocessor has one program, which takes entries of the list in turns.
# --------------------------------------------------------------------------------------------------

from nanopaged.optional_triton import (  # noqa: E402  Gluon: only here
    async_load,
    box_of,
    fence_async_shared,
    gl,
    gluon_jit,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

TILE = tl.constexpr(128)  # rows of a tile of queries, and tokens of a tile of keys: two blocks
ROWS = tl.constexpr(64)  # of a warpgroup, the height of its products; tokens of a block
BUFFERS = tl.constexpr(2)

Ring = namedtuple("Ring", ["tiles", "full", "empty"])  # buffers, and two barriers for each: tile n is in n % BUFFERS
HopperBatch = namedtuple("HopperBatch", ["work", "num_items", "num_kv_heads", "seq_lens", "query_start_loc", "window"])
Item = namedtuple("Item", [
    "seq", "kv_head", "token", "end",  # the tile's first token in q, and where the sequence ends there
    "position", "seq_len",  # of that token; of the sequence
    "oldest", "start", "stop"])  # the first position that the tile sees; its tiles of keys, none if the list has ended
WarpRows = namedtuple("WarpRows", ["q", "position", "window"])  # of a warpgroup


def prefill_on_hopper(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
                      query_start_loc: Tensor, query_tiles: Tensor, scale: float, sliding_window: int) -> None:
    """The sequences with two or more new tokens. TMA copies a **box** of a tensor: TILE rows of q, or one block of a
    kv head. A group that is no power of two is padded with the head behind it, whose results are not stored."""
    (_, num_heads, head_dim), (_, block_size, num_kv_heads, _) = q.shape, k_cache.shape
    group, num_items = num_heads // num_kv_heads, len(query_tiles) * num_kv_heads
    padded = tiles.next_power_of_2(group)
    rows, block = [tiles.HOPPER_TILE_M // padded, padded, head_dim], [1, block_size, 1, head_dim]
    boxes = box_of(q, rows), box_of(k_cache, block), box_of(v_cache, block)
    hopper_prefill_kernel[(min(num_items, tiles.num_multiprocessors(q.device)),)](
        out, *boxes, block_tables, seq_lens, query_start_loc, query_tiles, num_items, num_kv_heads,
        sliding_window or 2**30, scale, *out.stride()[:2], block_tables.stride(0), GROUP=group,
        WINDOW=sliding_window > 0, num_warps=4, **launch_options(q.device))


@gluon_jit
def hopper_prefill_kernel(out, q_box, k_box, v_box, block_tables, seq_lens, query_start_loc, work, num_items,
                          num_kv_heads, window, scale, out_token, out_head, table_row, GROUP: tl.constexpr,
                          WINDOW: tl.constexpr, PDL: tl.constexpr):
    """work, scale: as for paged_attention_kernel; num_items: an item is an entry of work and a kv head. The numbers at
    the end are the warps of the second and third part, and the registers of each of their threads."""
    q, k, v = _ring(q_box, 1), _ring(k_box, 2), _ring(v_box, 2)
    batch = HopperBatch(work, num_items, num_kv_heads, seq_lens, query_start_loc, window)
    _wait_for_previous_kernel(PDL)
    gl.warp_specialize([
        (_compute, (out, q, k, v, batch, scale, out_token, out_head, 0, GROUP, WINDOW)),
        (_compute, (out, q, k, v, batch, scale, out_token, out_head, 1, GROUP, WINDOW)),
        (_copy, (q_box, k_box, v_box, block_tables, table_row, q, k, v, batch, GROUP, WINDOW)),
    ], [4, 1], [240, 24])


@gluon_jit
def _item(turn, batch, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
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
def _ring(box, BOXES: tl.constexpr):
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
    mbarrier.wait(ring.empty.index(n % BUFFERS), (n // BUFFERS + 1) % 2)
    tile, full = ring.tiles.index(n % BUFFERS), ring.full.index(n % BUFFERS)
    mbarrier.expect(full, TILE * tile.shape[-1] * 2)
    return tile, full


@gluon_jit
def _arrived(ring, n):
    """Tile n [TILE, dim], as soon as it is there."""
    mbarrier.wait(ring.full.index(n % BUFFERS), n // BUFFERS % 2)
    DIM: tl.constexpr = ring.tiles.shape[-1]
    return ring.tiles.index(n % BUFFERS).reshape([TILE, DIM])


@gluon_jit
def _release(ring, n):
    mbarrier.arrive(ring.empty.index(n % BUFFERS))


@gluon_jit
def _copy(q_box, k_box, v_box, block_tables, table_row, q, k, v, batch, GROUP: tl.constexpr, WINDOW: tl.constexpr):
    """The copying warp."""
    TOKENS: tl.constexpr = q_box.block_type.shape[0]
    turn, n = 0, 0  # items and tiles of keys so far
    item = _item(turn, batch, TOKENS, WINDOW)
    while item.start < item.stop:
        tile, full = _acquire(q, turn)
        async_load(q_box, [item.token, item.kv_head * GROUP, 0], full, tile)
        turn += 1
        upcoming, table = item, block_tables + item.seq.to(gl.int64) * table_row
        for i in range(item.stop - item.start):
            at = 2 * (item.stop - 1 - i)
            a = gl.load(table + at)  # behind the last block the table may hold anything
            b = gl.load(table + gl.minimum(at + 1, (item.seq_len - 1) // ROWS))
            _copy_tile(k_box, a, b, item.kv_head, k, n)
            _copy_tile(v_box, a, b, item.kv_head, v, n)
            n += 1
            if i == 0:
                upcoming = _item(turn, batch, TOKENS, WINDOW)  # while the copies are under way
        item = upcoming


@gluon_jit
def _copy_tile(box, a, b, kv_head, ring, n):
    """The tile of blocks a and b."""
    tile, full = _acquire(ring, n)
    async_load(box, [a, 0, kv_head, 0], full, tile.slice(0, 1))
    async_load(box, [b, 0, kv_head, 0], full, tile.slice(1, 1))


@gluon_jit
def _compute(out, q, k, v, batch, scale, out_token, out_head, HALF: tl.constexpr, GROUP: tl.constexpr,
             WINDOW: tl.constexpr):
    """A warpgroup: the first or the second 64 rows of each item. It goes from the last tile of keys to the first one.
    The tiles that need a mask come first, each by itself. Those before `first_masked` need none, and the weighted
    sum is one tile behind. (Under a window all tiles have a mask.)"""
    TOKENS: tl.constexpr = q.tiles.shape[1]
    PADDED: tl.constexpr = q.tiles.shape[2]
    DIM: tl.constexpr = q.tiles.shape[3]
    ACC: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])  # wgmma; 4 x 1 warps of 16 x DIM x 16
    ROW: tl.constexpr = gl.SliceLayout(1, ACC)
    WEIGHTS: tl.constexpr = gl.DotOperandLayout(0, ACC, 2)  # the left factor, 2 numbers in a register
    # Rows and columns of a thread (16 bytes), of a warp in threads, of the tensor in warps; columns are the inner axis.
    LINES: tl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=ROW)
    line, dim = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES)), gl.arange(0, DIM, layout=gl.SliceLayout(0, LINES))
    turn, n = 0, 0
    item = _item(turn, batch, TOKENS, WINDOW)
    while item.start < item.stop:
        my_q = _arrived(q, turn).slice(HALF * ROWS, ROWS)
        first = gl.minimum(item.position + HALF * (TOKENS // 2), item.seq_len - 1)
        last = gl.minimum(first + TOKENS // 2, item.seq_len) - 1
        rows = WarpRows(my_q, gl.minimum(first + row // PADDED, last), batch.window)
        sums = Sums(gl.zeros([ROWS, DIM], gl.float32, ACC), gl.full([ROWS], -float("inf"), gl.float32, ROW),
                    gl.zeros([ROWS], gl.float32, ROW))
        p = gl.zeros([ROWS, TILE], out.dtype.element_ty, WEIGHTS)
        first_masked = item.start if WINDOW else gl.minimum((first + 1) // TILE, item.stop - 1)
        for i in range(item.stop - first_masked):
            if i > 0:
                sums = _add(sums, p, _arrived(v, n - 1))
                _release(v, n - 1)
            p, sums = _masked_tile(sums, rows, k, v, n, (item.stop - 1 - i) * TILE, item, scale, LINES, WINDOW)
            n += 1
        # `sums` has the weights of this item's tiles before n, but the V of those before n - 1; p are n - 1's weights.
        for i in range(first_masked - item.start):
            p, sums = _next_tile(p, sums, rows, k, v, n, scale)
            n += 1
        sums = _add(sums, p, _arrived(v, n - 1))
        _release(v, n - 1)
        # The buffer of q is free now. Through it each thread gets 16 bytes of a line in place of 4 of several.
        my_q.store((sums.acc * (1.0 / sums.sum)[:, None]).to(out.dtype.element_ty))
        result = my_q.load(LINES)
        fence_async_shared()
        _release(q, turn)
        token, head = item.token + HALF * (TOKENS // 2) + line // PADDED, line % PADDED
        at = out + token.to(gl.int64) * out_token + (item.kv_head * GROUP + head) * out_head
        gl.store(at[:, None] + dim[None, :], result, mask=((token < item.end) & (head < GROUP))[:, None])
        turn += 1
        item = _item(turn, batch, TOKENS, WINDOW)


@gluon_jit
def _masked_tile(sums, rows, k, v, n, key, item, scale, LINES: tl.constexpr, WINDOW: tl.constexpr):
    """The weights of tile n, which begins at `key`, and the running sums without its V. Slots of V that hold anything
    become 0, because 0 * NaN is NaN: those after the last token, and those that left the window, whose blocks may have
    other holders."""
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
    return weights, Sums(sums.acc * alpha[:, None], sums.max, sums.sum)


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
    return weights, Sums(acc * alpha[:, None], sums.max, sums.sum)


@gluon_jit
def _scores(q, k):
    """Issue the product of q and a tile of K."""
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
    return gl.convert_layout(p.to(dtype), WEIGHTS), alpha, Sums(sums.acc, new_max, sums.sum * alpha + total)


@gluon_jit
def _add(sums, p, tile):
    """The running sums with a tile of V, times its weights."""
    acc, p = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, tile, sums.acc, is_async=True), p])
    return Sums(acc, sums.max, sums.sum)
