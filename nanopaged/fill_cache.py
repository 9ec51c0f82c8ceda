"""Filling the cache in plain torch, for the CPU. Chapter 1 (kernel.py) has the same as a Triton kernel.

Chapter 2 (model.py) uses `rms_norm`, too.
"""
import torch
from torch import Tensor


def rotate_and_store_reference(qkv: Tensor, num_heads: int, rotation: Tensor | None, q_norm: Tensor | None,
                               k_norm: Tensor | None, eps: float, k_cache: Tensor, v_cache: Tensor,
                               slot_mapping: Tensor, k_scale: float = 1.0, v_scale: float = 1.0) -> Tensor:
    """`rotate_and_store` in plain torch, with the same arguments: norm and rope of q and k, then `store_kv`."""
    num_kv_heads = k_cache.shape[2]
    qk, v = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        qk = rms_norm(qk, torch.cat([q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)]), eps)
    if rotation is not None:
        qk = rotate(qk, rotation[:, None])
    q, k = qk.split([num_heads, num_kv_heads], dim=1)
    store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return q


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: float = 1.0,
             v_scale: float = 1.0) -> None:
    """Write each new token's k and v [num_tokens, num_kv_heads, head_dim] into its slot of slot_mapping [num_tokens].

    Slot -1: do not write (padding, or a token whose shared block already holds its K and V). The caches' slots must be
    evenly spaced. An fp8 cache gets K / k_scale and V / v_scale, clamped to what e4m3 has; others need scales of 1.
    """
    if not len(slot_mapping):
        return
    slots = slot_mapping.long()
    # Dropping the rows with slot -1 would make the host wait for the GPU. Such a row repeats another row's write.
    skips = slots.device.type != "cpu" or bool(slots.min() < 0)
    if skips:
        largest, last = slots.max(0)
        token = torch.where(slots < 0, last, torch.arange(len(slots), device=slots.device))
        k, v, slots = k[token], v[token], slots[token].clamp(min=0)
    for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        if cache.element_size() == 1:
            largest_fp8 = torch.finfo(cache.dtype).max
            new = (new.float() / scale).clamp(-largest_fp8, largest_fp8)
        flat, new = as_bytes(cache).view(-1, *cache.shape[2:]), as_bytes(new.to(cache.dtype))
        if skips:
            new = torch.where(largest >= 0, new, flat[:1])  # if all rows are skipped, slot 0 gets what it has
        flat.index_copy_(0, slots, new)


def as_bytes(x: Tensor) -> Tensor:
    """An fp8 tensor as bytes, which torch can index on a CPU."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32 (Zhang and Sennrich 2019)."""
    exact = x.float()
    mean_square = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square() / x.shape[-1]
    return (exact * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021): x [num_tokens, heads, head_dim], rotation [num_tokens, 1, head_dim].

    Element i of the first half and element i of the second half are a point in a plane. Rope rotates the point by the
    angle of (position, i). The product of a query and a key then depends on the distance of their positions only.
    """
    cos, sin = rotation.chunk(2, dim=-1)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)], dim=-1).to(x.dtype)
