"""Products of experts that keep 4 bits, or 8 in blocks. Goes together with four_bits.py, which reads and describes
them.

**Few tokens for each expert** are bound by memory: experts_kernel of fused_experts.py makes numbers of codes in its
loop (four_bit_codes.py). For the fewest, most GPUs have a faster kernel (four_bit_streams.py). **Many tokens** are
bound by the tensor cores, and each weight would be converted for many tiles of them. So a kernel turns the matrices
into 16 bits in front of the product. Last bits may differ between these ways.
"""
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nanopaged import tiles
from nanopaged.features import four_bit_codes, four_bit_streams
from nanopaged.features.four_bit_codes import TILE, Form, empty_matrix, gate_and_up, kind_of, widen
from nanopaged.optional_triton import jit, tl

WIDEN_FROM = 128  # tokens of an expert, on average


def experts_form(num_rows: int, top_k: int, count: int, gated: bool, shared_memory: int) -> dict[str, Any]:
    """`fused_experts.experts_form` for weights in 4 bits. (H200, gpt-oss-20b's shape)"""
    columns = 16 if num_rows * top_k <= 8 * count else 32
    stages = 4 if shared_memory > tiles.LARGE_SHARED_MEMORY else 2
    return dict(ROWS=32 if gated else 64, COLUMNS=columns, TILE=TILE, STAGES=stages, num_warps=4, PRODUCTS=products)


def product_of_few(x: Tensor, weight: Tensor, kept: list[Tensor | None], scores: Tensor, counts: Tensor, pairs: Tensor,
                   out: Tensor, activation: str, bias: Tensor | None) -> bool:
    """Whether this function has filled `out`, as `fused_experts.experts_product` does. It does so for the fewest
    tokens. kept: what `kept_beside` returns"""
    (top_k, num_rows), size = scores.shape, x.shape[1]
    form = four_bit_streams.takes(x) and four_bit_streams.experts_form(num_rows, top_k, len(counts), activation != "",
                                                                       size)
    if not form or not four_bit_streams.fits(form, kept[0], kept[1], weight.dtype, size, size):
        return False
    four_bit_streams.experts_product(x, weight, *kept, scores, counts, pairs, out, activation, bias, form)
    return True


def are_many(num_rows: int, top_k: int, count: int) -> bool:
    """Whether so many tokens want matrices in 16 bits."""
    return num_rows * top_k >= WIDEN_FROM * count


def kept_beside(whole: dict[str, Tensor], name: str) -> list[Tensor | None]:
    """Scales, zeros and row scales of all experts' matrices: what `four_bit_codes.widen` takes after weights."""
    return [whole.get(f"{name}.{kind}") for kind in ("scale", "zero", "row_scale")]


def empty_of(r: Any, name: str, size: int) -> list[Tensor | None]:
    """`empty_matrix` of all experts' gate_up_proj or down_proj."""
    plan = getattr(r.modules.linear, "plan", None)  # gpt-oss has none
    forms = [form for path, form in plan.forms.items() if path.endswith(f"experts.0.{name}")] if plan else [
        Form(torch.uint8, size // 32)]
    return empty_matrix(size, forms[0], r.device)


@jit
def products(x, exists, weight, scale, zero, row_scale, row, OUT: tl.constexpr, SIZE: tl.constexpr,
             GROUPS: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr):
    """The products of experts_kernel, of gate and up if it is the first one: [ROWS, COLUMNS] each. x, exists: as in
    four_bit_codes.py; row [ROWS]; zero, row_scale: None if there are none"""
    if FIRST:
        row = tl.join(row, row + OUT).permute(1, 0).reshape(2 * row.shape[0])
    row = row[:, None]
    y = four_bit_codes.products(x, exists, weight, scale, scale if zero is None else zero, row, tl.zeros_like(row),
                                SIZE, SIZE, GROUPS, KIND, zero is not None, TILE, STAGES, 2, False)
    if row_scale is not None:
        y *= tl.load(row_scale + row)
    if FIRST:
        return gate_and_up(y)
    else:
        return y, y


# What fused_experts.py calls.
PRODUCTS = SimpleNamespace(experts_form=experts_form, are_many=are_many, widen=widen, kept_beside=kept_beside,
                           empty_of=empty_of, kind_of=kind_of, product_of_few=product_of_few,
                           form_of_few=four_bit_streams.experts_form)
