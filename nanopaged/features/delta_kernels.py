"""Gated delta nets in Triton, between their projections: what delta.py computes, as a GPU runs it.

    decode      places with one new token, in one launch: convolution, gates, state and gated norm
    prefill     the others, in chunks of CHUNK tokens, one launch after another:
        conv_kernel       the convolution, and SiLU
        prepare_kernel    each chunk by itself: norms of q and k, gates, (I + A)^-1, and from it w, u and P
        scan_kernel       each place from chunk to chunk: the state, and o; its slots get both states
        norm_kernel       the gated norm

The letters are those of delta.py, whose form in chunks this is.

**The same bits.** A program computes one head of one place, so nothing depends on the rest of the batch. Chunks begin
at positions that are multiples of CHUNK, and the state between two of them is in float32. Therefore a prompt that is
cut there has the bits of an uncut one, and a mark, which falls on a chunk's end, those of a prompt that ends there.
(One new token is decode, whose sums have another order.)

**Slots.** A step reads one slot of a place, and writes others or the same; nothing is copied before or after. Inputs of
positions below 0 are not read, so a slot needs no zeroing. All programs of a group read the ring's entries of position
- 3 to position - 1, and one of them writes another entry, so none waits for the others.

**Dependent launches.** State and ring are loaded before the wait for the previous kernel. Between the kernel that
writes a state and the next one that reads it, there must therefore be another one, such as a projection's.
"""
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanopaged import kernel, tiles
from nanopaged.features.delta import CHUNK, NORM_EPS, Weights
from nanopaged.features.kinds.recurrent import StateSlots, Work, state_slots
from nanopaged.optional_triton import HAS_PTX, fast_dividef, jit, launch_options, tl

TAPS = 4  # of the convolution
MIN_DIM, MAX_DIM = 16, 128  # of a head; a program of decode has its head's state in registers
FLOAT32_MEMORY = 128 * 1024  # bytes of shared memory that a program of prepare_kernel takes in float32
WIDE, NARROW = 128, 32  # columns of a state that a program of the scan has, for Work.many and for Work.few
LOG2_E = tl.constexpr(math.log2(math.e))
HEAD_EPS = tl.constexpr(NORM_EPS)


def fits(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels can run on this device with states of these shapes: (taps, channels) and (v_heads, k_dim,
    v_dim). dtype: of the model"""
    (taps, _), (_, *dims) = shapes
    is_new = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    is_able = dtype.itemsize == 2 or tiles.shared_memory(device) > FLOAT32_MEMORY
    return is_new and is_able and taps == TAPS and all(
        MIN_DIM <= dim == tiles.next_power_of_2(dim) <= MAX_DIM for dim in dims)


def gated_delta(qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, w: Weights, states: list[Tensor],
                slots: StateSlots) -> Tensor:
    """`delta.gated_delta`; slots.work has the work lists. Rows of no sequence are not written. Rows of qkv, z, b and a
    may have any stride."""
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    for launch in launches(out, qkv, z, b, a, w, states, slots):
        launch()
    return out


def launches(out: Tensor, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, w: Weights, states: list[Tensor],
             slots: StateSlots) -> Iterator[Callable[[], Any]]:
    """Of `gated_delta`, in this order."""
    work, (conv_state, state), num_targets = slots.work, states, len(slots.targets) // len(slots.lens)
    index, source = (slots.first, slots.lens, slots.num_computed), (slots.sources, slots.sources.stride(0))
    target = slots.targets, slots.targets.stride(0)  # both are columns of the batch rows
    sizes = dict(RING=conv_state.shape[1], K_HEADS=w.k_heads, V_HEADS=w.v_heads, K_DIM=w.k_dim, V_DIM=w.v_dim)
    options = launch_options(qkv.device)
    if work.num_decodes:
        yield partial(
            decode_kernel[(w.v_heads, work.num_decodes)], out, qkv, z, b, a, w.conv, w.A_log, w.dt_bias, w.norm, w.eps,
            conv_state, state, *index, slots.lens if slots.query_lens is None else slots.query_lens, *source, *target,
            slots.counts, qkv.stride(0), z.stride(0), b.stride(0), a.stride(0), TARGETS=num_targets,
            SEVERAL=slots.most > 1, num_warps=4, **sizes, **options)
    if work.chunks is None:
        return
    num_chunks, channels, make = len(work.chunks), qkv.shape[1], partial(torch.empty, dtype=qkv.dtype, device=z.device)
    mixed, tile = make(num_chunks, CHUNK, channels), math.gcd(channels, 512)
    yield partial(
        conv_kernel[(channels // tile, num_chunks)], mixed, qkv, w.conv, conv_state, *index, *source, work.chunks,
        qkv.stride(0), TILE=tile, CHUNK=CHUNK, RING=sizes["RING"], CHANNELS=channels, num_warps=4, **options)
    # q, k, w, u, P and G take 1.8 MiB for a chunk with 16 k heads, 32 v heads of 128 and 16 bits, and `mixed` 1 MiB.
    q, k = (make(num_chunks, w.k_heads, CHUNK, w.k_dim) for _ in range(2))
    p, total = make(num_chunks, w.v_heads, CHUNK, CHUNK), make(num_chunks, w.v_heads, CHUNK, dtype=torch.float32)
    made = q, k, make(num_chunks, w.v_heads, CHUNK, w.k_dim), make(num_chunks, w.v_heads, w.v_dim, CHUNK), p, total
    yield partial(
        prepare_kernel[(w.v_heads, num_chunks)], *made, mixed, b, a, w.A_log, w.dt_bias, *index, work.chunks,
        b.stride(0), a.stride(0), CHUNK=CHUNK, **prepare_form(qkv.dtype), **sizes, **options)
    for sequences, columns in ((work.many, WIDE), (work.few, NARROW)):
        form = scan_form(min(columns, w.v_dim), qkv.dtype, tiles.shared_memory(qkv.device))
        yield partial(
            scan_kernel[(w.v_heads * w.v_dim // form["TILE"], len(sequences))], out, *made, qkv, conv_state, state,
            *index, *source, *target, slots.counts, sequences, qkv.stride(0), TARGETS=num_targets, CHUNK=CHUNK,
            **form, **sizes, **options)
    yield partial(
        norm_kernel[(CHUNK, num_chunks)], out, z, w.norm, w.eps, *index, work.chunks, z.stride(0), CHUNK=CHUNK,
        V_HEADS=w.v_heads, V_DIM=w.v_dim, HEADS_PADDED=tiles.next_power_of_2(w.v_heads), num_warps=4, **options)


def prepare_form(dtype: torch.dtype) -> dict[str, Any]:
    """Float32 is multiplied in three products of tf32 numbers. The inverse of 16-bit models is made of float16 numbers,
    which have the precision of tf32; none of them is above 1 (see `_inverse`). With 168 registers a thread, three
    programs share a multiprocessor."""
    if dtype is torch.float32:
        return dict(PRECISION="tf32x3", INVERSE=tl.float32, num_warps=4, num_stages=1)
    return dict(PRECISION="tf32", INVERSE=tl.float16, num_warps=4, num_stages=1, maxnreg=168)


def scan_form(columns: int, dtype: torch.dtype, shared_memory: int) -> dict[str, Any]:
    """columns: of a program. All forms give the same bits on an H200 (test_delta_kernels.py). Tiles of w, q, k, P and u
    are in shared memory, once for each stage."""
    stages = 1 if dtype.itemsize > 2 else 3 if shared_memory > tiles.LARGE_SHARED_MEMORY else 2
    return dict(TILE=columns, PRECISION=prepare_form(dtype)["PRECISION"], num_warps=max(4, columns // 16),
                num_stages=stages)


def kernel_forms(r: Any) -> Iterator[Callable[[], Any]]:
    """For warmup.py: a sequence without tokens, and work lists without entries."""
    (taps, channels), (v_heads, k_dim, v_dim) = shapes = r.config.states["shapes"]
    make = partial(torch.zeros, device=r.device)
    ints = partial(make, dtype=torch.int32)
    x = make(2, channels + v_heads * v_dim + 2 * v_heads, dtype=r.dtype)
    qkv, z, b, a = x.split([channels, v_heads * v_dim, v_heads, v_heads], dim=1)
    z, none = z.unflatten(1, (v_heads, v_dim)), ints(1, 2) - 1
    w = Weights(make(channels, taps, dtype=r.dtype), make(v_heads), make(v_heads), make(v_dim), r.config.norm_eps,
                (channels - v_heads * v_dim) // (2 * k_dim), v_heads, k_dim, v_dim, taps)
    slots = state_slots(ints(2), ints(1), ints(1, len(r.rows.empty)), work=Work(1, none, none, none),
                        most=r.most)
    yield from launches(torch.empty_like(z), qkv, z, b, a, w, [make(2, *shape) for shape in shapes], slots)


# --------------------------------------------------------------------------------------------------
# Decode
# --------------------------------------------------------------------------------------------------

@jit
def decode_kernel(out, qkv, z, b, a, conv_weight, A_log, dt_bias, norm_weight, eps, conv_state, state, query_start_loc,
                  lens, num_computed, query_lens, sources, source_row, targets, target_row, counts, qkv_row, z_row,
                  b_row, a_row, TARGETS: tl.constexpr, SEVERAL: tl.constexpr, RING: tl.constexpr, K_HEADS: tl.constexpr,
                  V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, PDL: tl.constexpr):
    """Grid (v head, place). Places that are computed in chunks, or have no tokens, are left to others. The state is
    read once and written once, or with drafts after each token, and is in registers meanwhile. It and all else that no
    kernel of this step has written are loaded before the wait."""
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    GROUP: tl.constexpr = V_HEADS // K_HEADS
    SLOT: tl.constexpr = V_HEADS * K_DIM * V_DIM
    head, place = tl.program_id(0), tl.program_id(1)
    num_tokens, position = tl.load(lens + place), tl.load(num_computed + place)
    start, query_len = tl.load(query_start_loc + place).to(tl.int64), tl.load(query_lens + place)
    source = tl.load(sources + place * source_row).to(tl.int64)  # 64 bits: a pool may have more than 2^31 numbers
    target = tl.load(targets + place * TARGETS * target_row).to(tl.int64)
    if (num_tokens < 1) | (query_len != 1):
        kernel.wait_for_previous_kernel(PDL)
        return
    dim, v_dim = tl.arange(0, K_DIM), tl.arange(0, V_DIM)
    inside = head * K_DIM * V_DIM + dim[:, None] * V_DIM + v_dim[None, :]
    s = tl.load(state + source * SLOT + inside, mask=dim[:, None] < tl.where(position > 0, K_DIM, 0), other=0.0)
    # q and k as one tensor [K_DIM, 2]: of single ones the compiler would load each number in every thread that uses it.
    qk_at = head // GROUP * K_DIM + dim[:, None] + tl.arange(0, 2)[None, :] * K_HEADS * K_DIM
    v_at = 2 * K_HEADS * K_DIM + head * V_DIM + v_dim
    w0, w1, w2, w3 = _taps(conv_weight, qk_at)
    v0, v1, v2, v3 = _taps(conv_weight, v_at)
    ring = conv_state + source * (RING * CHANNELS)
    xa, xb, xc = (_input(ring, position - 3, qk_at, RING, CHANNELS), _input(ring, position - 2, qk_at, RING, CHANNELS),
                  _input(ring, position - 1, qk_at, RING, CHANNELS))
    va, vb, vc = (_input(ring, position - 3, v_at, RING, CHANNELS), _input(ring, position - 2, v_at, RING, CHANNELS),
                  _input(ring, position - 1, v_at, RING, CHANNELS))
    A_log, dt_bias = tl.load(A_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    norm = tl.load(norm_weight + v_dim).to(tl.float32)
    is_first = head % GROUP == 0  # one program of the group keeps q and k
    kernel.wait_for_previous_kernel(PDL)
    for t in range(num_tokens if SEVERAL else 1):
        # All that is left is loaded together: no load moves ahead of a store.
        token = start + t
        row = qkv + token * qkv_row
        xd, vd = tl.load(row + qk_at).to(tl.float32), tl.load(row + v_at).to(tl.float32)
        beta, g = _gates(tl.load(b + token * b_row + head), tl.load(a + token * a_row + head), A_log, dt_bias)
        gate = tl.load(z + token * z_row + head * V_DIM + v_dim).to(tl.float32)
        x = _silu(w0 * xa + w1 * xb + w2 * xc + w3 * xd)
        v = _silu(v0 * va + v1 * vb + v2 * vc + v3 * vd)
        xa, xb, xc, va, vb, vc = xb, xc, xd, vb, vc, vd
        q, k = tl.split(x * (1.0 / tl.sqrt(tl.sum(x * x, 0) + HEAD_EPS))[None, :])
        q *= K_DIM ** -0.5
        decay = _exp(g)
        # What S answers to k and to q, before the update: two sums that do not wait for each other.
        answer, old = tl.sum(s * k[:, None], 0) * decay, tl.sum(s * q[:, None], 0) * decay
        new = beta * (v - answer)
        o = old + tl.sum(q * k, 0) * new
        s = s * decay + k[:, None] * new[None, :]
        for column in tl.static_range(TARGETS if SEVERAL else 1):
            if SEVERAL:
                target = tl.load(targets + (place * TARGETS + column) * target_row).to(tl.int64)
            if (tl.load(counts + place * TARGETS + column) == t + 1) if SEVERAL else True:
                tl.store(state + target * SLOT + inside, s)
                ring = conv_state + target * (RING * CHANNELS)
                _keep_three(ring, position + t, qk_at, xa, xb, xc, is_first, source != target, RING, CHANNELS)
                _keep_three(ring, position + t, v_at, va, vb, vc, True, source != target, RING, CHANNELS)
        scale = 1.0 / tl.sqrt(tl.sum(o * o, 0) / V_DIM + eps)
        y = o * scale * norm * _silu(gate)
        tl.store(out + (token * V_HEADS + head) * V_DIM + v_dim, y.to(out.dtype.element_ty))


@jit
def _keep_three(ring, position, channel, a, b, c, is_kept, is_other, RING: tl.constexpr, CHANNELS: tl.constexpr):
    """The input c of this position, and in another slot than the source those before it."""
    _keep_input(ring, position, channel, c, is_kept, RING, CHANNELS)
    if is_other:
        _keep_input(ring, position - 2, channel, a, is_kept, RING, CHANNELS)
        _keep_input(ring, position - 1, channel, b, is_kept, RING, CHANNELS)


@jit
def _taps(conv_weight, channel):
    """The convolution's four weights of some channels."""
    at = conv_weight + channel * 4
    return (tl.load(at).to(tl.float32), tl.load(at + 1).to(tl.float32), tl.load(at + 2).to(tl.float32),
            tl.load(at + 3).to(tl.float32))


@jit
def _input(ring, position, channel, RING: tl.constexpr, CHANNELS: tl.constexpr):
    """The input of this position; 0 before all tokens."""
    at = ring + tl.maximum(position, 0) % RING * CHANNELS + channel
    return tl.load(at, mask=channel < tl.where(position >= 0, CHANNELS, 0), other=0.0)


@jit
def _keep_input(ring, position, channel, value, is_kept, RING: tl.constexpr, CHANNELS: tl.constexpr):
    at = ring + tl.maximum(position, 0) % RING * CHANNELS + channel
    tl.store(at, value, mask=channel < tl.where((position >= 0) & is_kept, CHANNELS, 0))


@jit
def _exp(x):
    """As a power of two, which is one instruction; `tl.exp` takes four."""
    return tl.exp2(x * LOG2_E)


@jit
def _silu(x):
    """The fast division is two instructions in place of seven, and two units in the last place may be wrong."""
    y = 1.0 + _exp(-x)
    return fast_dividef(x, y) if HAS_PTX else x / y


@jit
def _gates(b, a, A_log, dt_bias):
    """beta and g of one head."""
    x = a.to(tl.float32) + dt_bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + _exp(tl.minimum(x, 20.0))))
    return 1.0 / (1.0 + _exp(-b.to(tl.float32))), -_exp(A_log) * softplus


# --------------------------------------------------------------------------------------------------
# Prefill
# --------------------------------------------------------------------------------------------------

@jit
def _find_chunk(work, query_start_loc, lens, num_computed, CHUNK: tl.constexpr):
    """The work list's entry of this program: its place (-1: none), the position of the place's first token, that of the
    chunk's first one, the number of the chunk's tokens, and where in the flat batch these begin."""
    entry = work + tl.program_id(1) * 2
    place, at = tl.load(entry), tl.maximum(tl.load(entry), 0)
    position = tl.load(num_computed + at)
    start = tl.maximum(position, tl.load(entry + 1) * CHUNK)
    n = tl.minimum(position + tl.load(lens + at), (tl.load(entry + 1) + 1) * CHUNK) - start
    return place, position, start, n, (tl.load(query_start_loc + at) + start - position).to(tl.int64)


@jit
def conv_kernel(mixed, qkv, conv_weight, conv_state, query_start_loc, lens, num_computed, sources, source_row, work,
                qkv_row, TILE: tl.constexpr, CHUNK: tl.constexpr, RING: tl.constexpr, CHANNELS: tl.constexpr,
                PDL: tl.constexpr):
    """Grid (TILE channels, chunk). The last three inputs stay in registers, so each is loaded once. Rows behind a
    chunk's last token are 0."""
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place, position, start, n, token = _find_chunk(work, query_start_loc, lens, num_computed, CHUNK)
    if place < 0:
        kernel.wait_for_previous_kernel(PDL)
        return
    ring = conv_state + tl.load(sources + place * source_row).to(tl.int64) * (RING * CHANNELS)
    w0, w1, w2, w3 = _taps(conv_weight, channel)
    kernel.wait_for_previous_kernel(PDL)
    row = qkv + token * qkv_row + channel
    a = _input_before(row, ring, qkv_row, channel, start, position, 3, RING, CHANNELS)
    b = _input_before(row, ring, qkv_row, channel, start, position, 2, RING, CHANNELS)
    c = _input_before(row, ring, qkv_row, channel, start, position, 1, RING, CHANNELS)
    at = mixed + tl.program_id(1).to(tl.int64) * CHUNK * CHANNELS + channel
    for r in tl.range(0, CHUNK, 4, num_stages=3):
        d, e, f, g = _four_rows(row, qkv_row, channel, n - r, CHANNELS)
        row += 4 * qkv_row
        _store_row(at, w0 * a + w1 * b + w2 * c + w3 * d, r < n)
        _store_row(at + CHANNELS, w0 * b + w1 * c + w2 * d + w3 * e, r + 1 < n)
        _store_row(at + 2 * CHANNELS, w0 * c + w1 * d + w2 * e + w3 * f, r + 2 < n)
        _store_row(at + 3 * CHANNELS, w0 * d + w1 * e + w2 * f + w3 * g, r + 3 < n)
        a, b, c, at = e, f, g, at + 4 * CHANNELS


@jit
def _input_before(row, ring, qkv_row, channel, start, position, back: tl.constexpr, RING: tl.constexpr,
                  CHANNELS: tl.constexpr):
    """The input `back` tokens before a chunk's first one: of this step, or of those before."""
    if start - back >= position:
        value = tl.load(row - back * qkv_row).to(tl.float32)
    else:
        value = _input(ring, start - back, channel, RING, CHANNELS)
    return value


@jit
def _four_rows(row, qkv_row, channel, n, CHANNELS: tl.constexpr):
    """The next four rows; those from n on are 0. Loaded together: no load moves ahead of a store."""
    return (tl.load(row, mask=channel < tl.where(n > 0, CHANNELS, 0), other=0.0).to(tl.float32),
            tl.load(row + qkv_row, mask=channel < tl.where(n > 1, CHANNELS, 0), other=0.0).to(tl.float32),
            tl.load(row + 2 * qkv_row, mask=channel < tl.where(n > 2, CHANNELS, 0), other=0.0).to(tl.float32),
            tl.load(row + 3 * qkv_row, mask=channel < tl.where(n > 3, CHANNELS, 0), other=0.0).to(tl.float32))


@jit
def _store_row(at, sums, exists):
    tl.store(at, tl.where(exists, _silu(sums), 0.0).to(at.dtype.element_ty))


@jit
def prepare_kernel(q_out, k_out, w_out, u_out, p_out, total_out, mixed, b, a, A_log, dt_bias, query_start_loc, lens,
                   num_computed, work, b_row, a_row, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
                   INVERSE: tl.constexpr, RING: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr,
                   K_DIM: tl.constexpr, V_DIM: tl.constexpr, PDL: tl.constexpr):
    """Grid (v head, chunk). Makes of each chunk q and k [CHUNK, K_DIM] for each k head; w [CHUNK, K_DIM], u [V_DIM,
    CHUNK], P [CHUNK, CHUNK] and G [CHUNK] for each v head. Rows behind the last token add nothing to the state."""
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    GROUP: tl.constexpr = V_HEADS // K_HEADS
    head, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place, _, _, n, token = _find_chunk(work, query_start_loc, lens, num_computed, CHUNK)
    if place < 0:
        kernel.wait_for_previous_kernel(PDL)
        return
    row, dim, v_dim = tl.arange(0, CHUNK), tl.arange(0, K_DIM), tl.arange(0, V_DIM)
    kernel.wait_for_previous_kernel(PDL)
    mixed += entry * CHUNK * CHANNELS
    q_at = head // GROUP * K_DIM + dim
    q = tl.load(mixed + row[:, None] * CHANNELS + q_at[None, :]).to(tl.float32)
    q *= (K_DIM ** -0.5 / tl.sqrt(tl.sum(q * q, 1) + HEAD_EPS))[:, None]
    q = q.to(q_out.dtype.element_ty)
    at = (entry * K_HEADS + head // GROUP) * CHUNK * K_DIM + row[:, None] * K_DIM + dim[None, :]
    is_first = at < tl.where(head % GROUP == 0, 2**62, 0)  # one program of the group stores q and k
    tl.store(q_out + at, q, mask=is_first)
    k = tl.load(mixed + row[:, None] * CHANNELS + (K_HEADS * K_DIM + q_at)[None, :]).to(tl.float32)
    k *= (1.0 / tl.sqrt(tl.sum(k * k, 1) + HEAD_EPS))[:, None]
    k = k.to(q_out.dtype.element_ty)
    tl.store(k_out + at, k, mask=is_first)
    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    v_at = 2 * K_HEADS * K_DIM + head * V_DIM + v_dim
    v = tl.load(mixed + row[:, None] * CHANNELS + v_at[None, :])
    exists, tokens = row < n, token + row
    beta, g = _gates(tl.load(b + tokens * b_row + head, mask=exists, other=0.0),
                     tl.load(a + tokens * a_row + head, mask=exists, other=0.0),
                     tl.load(A_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32))
    beta, total = tl.where(exists, beta, 0.0), tl.cumsum(tl.where(exists, g, 0.0), 0)
    out = entry * V_HEADS + head
    tl.store(total_out + out * CHUNK + row, total)
    seen = row[:, None] >= row[None, :]
    decay = tl.where(seen, _exp(tl.where(seen, total[:, None] - total[None, :], 0.0)), 0.0)
    tl.store(p_out + out * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :],
             (qk * decay).to(q_out.dtype.element_ty))
    system = tl.where(row[:, None] > row[None, :], kk * decay * beta[:, None], 0.0)
    inverse = _inverse(system, row, INVERSE, PRECISION)
    u = tl.dot((inverse * beta[None, :]).to(q_out.dtype.element_ty), v, input_precision=PRECISION)
    tl.store(u_out + out * V_DIM * CHUNK + v_dim[None, :] * CHUNK + row[:, None], u.to(q_out.dtype.element_ty))
    w = tl.dot((inverse * (beta * _exp(total))[None, :]).to(q_out.dtype.element_ty), k, input_precision=PRECISION)
    tl.store(w_out + out * CHUNK * K_DIM + row[:, None] * K_DIM + dim[None, :], w.to(q_out.dtype.element_ty))


@jit
def _inverse(a, row, INVERSE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a [64, 64], by way of the diagonal's blocks of 1, 2, 4 to 32 rows:

        [ A    ]^-1   [     A^-1            ]     one step for all pairs of blocks is D - D B D: D has the inverses
        [ B  C ]    = [ -C^-1 B A^-1   C^-1 ]     of the blocks A and C, and the second B is all below them

    Elimination by blocks is stable. A sum of powers of a is not: for equal keys it cancels binomials. Entry (i, j) of
    the inverse is beta_i k_i . (what tokens i - 1 to j + 1 leave of k_j), so it is at most 1."""
    i, j = row[:, None], row[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where((i % 2 == 1) & (j == i - 1), a, 0.0)
    a = a.to(INVERSE)
    for level in tl.static_range(1, 6):
        inverse = _join_blocks(inverse, a, i, j, 2 ** level, PRECISION)
    return inverse


@jit
def _join_blocks(d, a, i, j, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """From the inverses of blocks of SIZE rows to those of twice as many."""
    below = tl.where((i // SIZE % 2 == 1) & (j // SIZE == i // SIZE - 1), a, tl.zeros_like(a))
    rounded = d.to(a.dtype)
    step = tl.dot(rounded, below, input_precision=PRECISION).to(a.dtype)
    return d - tl.dot(step, rounded, input_precision=PRECISION)


@jit
def scan_kernel(out, q, k, w, u, p, total, qkv, conv_state, state, query_start_loc, lens, num_computed, sources,
                source_row, targets, target_row, counts, work, qkv_row, TARGETS: tl.constexpr, CHUNK: tl.constexpr,
                TILE: tl.constexpr, PRECISION: tl.constexpr, RING: tl.constexpr, K_HEADS: tl.constexpr,
                V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, PDL: tl.constexpr):
    """Grid (v head and TILE of its columns, place). The state is transposed here, s [TILE, K_DIM]: s and the rows of
    `new` are then left factors, which tensor cores take from registers. All right factors are in memory."""
    TILES: tl.constexpr = V_DIM // TILE
    GROUP: tl.constexpr = V_HEADS // K_HEADS
    SLOT: tl.constexpr = V_HEADS * K_DIM * V_DIM
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    place, entry = tl.load(work + tl.program_id(1) * 2), tl.load(work + tl.program_id(1) * 2 + 1).to(tl.int64)
    if place < 0:
        kernel.wait_for_previous_kernel(PDL)
        return
    start, n, position = tl.load(query_start_loc + place), tl.load(lens + place), tl.load(num_computed + place)
    source = tl.load(sources + place * source_row).to(tl.int64)
    row, dim, column = tl.arange(0, CHUNK), tl.arange(0, K_DIM), tile * TILE + tl.arange(0, TILE)
    inside = head * K_DIM * V_DIM + dim[None, :] * V_DIM + column[:, None]
    has_state = column[:, None] < tl.where(position > 0, V_DIM, 0)
    s = tl.load(state + source * SLOT + inside, mask=has_state, other=0.0)
    kernel.wait_for_previous_kernel(PDL)
    chunk, mark = position // CHUNK, _next_mark(counts, place, 0, TARGETS)
    for c in range(tl.cdiv(position + n, CHUNK) - chunk):
        of_k, of_v = (entry + c) * K_HEADS + head // GROUP, (entry + c) * V_HEADS + head
        lines = row[:, None] * K_DIM + dim[None, :]
        w_tile = tl.load(w + of_v * CHUNK * K_DIM + lines)
        q_tile = tl.load(q + of_k * CHUNK * K_DIM + lines)
        k_tile = tl.load(k + of_k * CHUNK * K_DIM + lines)
        p_tile = tl.load(p + of_v * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :])
        u_tile = tl.load(u + of_v * V_DIM * CHUNK + column[:, None] * CHUNK + row[None, :])
        g, last = tl.load(total + of_v * CHUNK + row), tl.load(total + of_v * CHUNK + CHUNK - 1)
        rounded = s.to(w_tile.dtype)
        new = u_tile.to(tl.float32) - tl.dot(rounded, tl.trans(w_tile), input_precision=PRECISION)
        o = tl.dot(rounded, tl.trans(q_tile), input_precision=PRECISION) * _exp(g)[None, :]
        o = tl.dot(new.to(w_tile.dtype), tl.trans(p_tile), o, input_precision=PRECISION)
        s = tl.dot((new * _exp(last - g)[None, :]).to(w_tile.dtype), k_tile, s * _exp(last),
                   input_precision=PRECISION)
        begin, end = tl.maximum(position, (chunk + c) * CHUNK), tl.minimum(position + n, (chunk + c + 1) * CHUNK)
        token = (start + begin - position + row).to(tl.int64)
        to = out + (token * V_HEADS + head)[None, :] * V_DIM + column[:, None]
        tl.store(to, o.to(out.dtype.element_ty), mask=(row < end - begin)[None, :])
        if end - position == mark:
            for i in tl.static_range(1, TARGETS):
                if tl.load(counts + place * TARGETS + i) == mark:
                    _keep_state(state, s, inside, conv_state, targets + (place * TARGETS + i) * target_row, source,
                                qkv + start.to(tl.int64) * qkv_row, qkv_row, position, end, head, tile, RING, K_HEADS,
                                V_HEADS, K_DIM, V_DIM)
            mark = _next_mark(counts, place, mark, TARGETS)
    tl.debug_barrier()  # the live slot may be the one that a mark's inputs were read from
    _keep_state(state, s, inside, conv_state, targets + place * TARGETS * target_row, source,
                qkv + start.to(tl.int64) * qkv_row, qkv_row, position, position + n, head, tile, RING, K_HEADS, V_HEADS,
                K_DIM, V_DIM)


@jit
def _next_mark(counts, place, done, TARGETS: tl.constexpr):
    """The number of the place's tokens up to its next mark; 0: there is none."""
    mark = 0
    for i in tl.static_range(1, TARGETS):
        count = tl.load(counts + place * TARGETS + i)
        mark = tl.where((count > done) & ((mark == 0) | (count < mark)), count, mark)
    return mark


@jit
def _keep_state(state, s, inside, conv_state, target, source, x, x_row, position, end, head, tile, RING: tl.constexpr,
                K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr):
    """Both states after the token before `end`, in the slot that `target` points to."""
    target = tl.load(target).to(tl.int64)
    tl.store(state + target * (V_HEADS * K_DIM * V_DIM) + inside, s)
    if tile == 0:
        _keep_inputs(conv_state, target, source, x, x_row, position, end, head, RING, K_HEADS, V_HEADS, K_DIM, V_DIM)


@jit
def _keep_inputs(conv_state, target, source, x, x_row, position, end, head, RING: tl.constexpr, K_HEADS: tl.constexpr,
                 V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr):
    """The three inputs before `end` into a slot's ring: v of this head, and q and k if it is the first of its group. x:
    this step's, from `position` on; those before are in the source's ring."""
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    GROUP: tl.constexpr = V_HEADS // K_HEADS
    dim, v_dim = tl.arange(0, K_DIM)[None, :], tl.arange(0, V_DIM)[None, :]
    old, ring = conv_state + source * (RING * CHANNELS), conv_state + target * (RING * CHANNELS)
    _keep_channels(ring, old, x, x_row, position, end, 2 * K_HEADS * K_DIM + head * V_DIM + v_dim, RING, CHANNELS)
    if head % GROUP == 0:
        q_at = head // GROUP * K_DIM + dim
        _keep_channels(ring, old, x, x_row, position, end, q_at, RING, CHANNELS)
        _keep_channels(ring, old, x, x_row, position, end, K_HEADS * K_DIM + q_at, RING, CHANNELS)


@jit
def _keep_channels(ring, old, x, x_row, position, end, channel, RING: tl.constexpr, CHANNELS: tl.constexpr):
    i = tl.arange(0, 4)[:, None]  # a power of two; the last is none
    at = end - 3 + i
    entry = tl.maximum(at, 0) % RING * CHANNELS + channel
    is_new = (i < 3) & (at >= position) & (channel >= 0)
    is_old = (i < 3) & (at >= 0) & (at < position) & (channel >= 0)
    value = tl.load(x + (at - position).to(tl.int64) * x_row + channel, mask=is_new, other=0.0).to(tl.float32)
    value = tl.where(is_new, value, tl.load(old + entry, mask=is_old, other=0.0))
    tl.store(ring + entry, value, mask=is_new | is_old)


@jit
def norm_kernel(out, z, norm_weight, eps, query_start_loc, lens, num_computed, work, z_row, CHUNK: tl.constexpr,
                V_HEADS: tl.constexpr, V_DIM: tl.constexpr, HEADS_PADDED: tl.constexpr, PDL: tl.constexpr):
    """Grid (token of a chunk, chunk): the gated norm in place, float32 between."""
    place, _, _, n, token = _find_chunk(work, query_start_loc, lens, num_computed, CHUNK)
    if (place < 0) | (tl.program_id(0) >= n):
        kernel.wait_for_previous_kernel(PDL)
        return
    head, dim = tl.arange(0, HEADS_PADDED)[:, None], tl.arange(0, V_DIM)[None, :]
    valid, token = (head < V_HEADS) & (dim >= 0), token + tl.program_id(0)
    weight = tl.load(norm_weight + dim).to(tl.float32)
    kernel.wait_for_previous_kernel(PDL)
    at = out + (token * V_HEADS + head) * V_DIM + dim
    o = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_row + head * V_DIM + dim, mask=valid, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(o * o, 1) / V_DIM + eps)
    tl.store(at, (o * scale[:, None] * weight * _silu(gate)).to(out.dtype.element_ty), mask=valid)
