"""Gluon if this Triton has it, for the last part of kernel.py.

Gluon is experimental, and a Triton to come may have other names or rules: `on_hopper` in kernel.py tries. Importing it
takes 0.1 s, which machines without a GPU are spared.
"""
from typing import Any

from torch import Tensor

from nanopaged.optional_triton import INTERPRETED, VARYING, triton

__all__ = ["async_load", "box_of", "fence_async_shared", "gl", "gluon_jit", "mbarrier", "warpgroup_mma",
           "warpgroup_mma_wait"]
async_load = fence_async_shared = gl = mbarrier = warpgroup_mma = warpgroup_mma_wait = None
try:
    if INTERPRETED:
        raise ImportError("the interpreter runs no Gluon")
    if triton and triton.__version__.startswith("3.5."):
        raise ImportError("its Gluon gives all parts of a program the same arguments")
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    async_load = tma.async_load if "async_load" in tma.__all__ else tma.async_copy_global_to_shared  # before Triton 3.8
    gluon_jit = gluon.jit(do_not_specialize=["num_items", "num_kv_heads", "window", "table_row"],
                          do_not_specialize_on_alignment=VARYING)
except (ImportError, AttributeError) as error:
    problem = str(error)

    def gluon_jit(function: Any) -> Any:
        return function


def box_of(x: Tensor, shape: list[int]) -> Any:
    """The tensor as copies of boxes of this shape see it, with the layout that wgmma reads: 128-byte swizzling of
    16-bit numbers. The strides of x must be multiples of 16 bytes. ImportError: there is no Gluon."""
    if gl is None:
        raise ImportError(problem)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), shape, gl.NVMMASharedLayout(128, 16, len(shape)))
