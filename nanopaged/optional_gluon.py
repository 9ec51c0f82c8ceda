"""Gluon if this Triton has it: Triton's lower level, where a program says how a tensor lies in registers and memory.
Beside it what Hopper adds: a unit that copies (TMA), barriers that it reports to, and products of four warps (wgmma).

It is experimental, and later Tritons may change it. So a feature first compiles its kernel (`compiles`), and falls back
to one in plain Triton. Importing Gluon takes 0.1 s, which machines without a GPU are spared.
"""
import warnings
from typing import Any, Callable

from torch import Tensor

from nanopaged.optional_triton import INTERPRETED, VARYING, VARYING_NUMBERS, triton

gl, problem = None, ""  # problem: why there is no Gluon
try:
    if INTERPRETED:
        raise ImportError("the interpreter runs no Gluon")
    if triton is None:
        raise ImportError("there is no Triton")
    if triton.__version__.startswith("3.5."):
        raise ImportError("warp_specialize of 3.5 gives all its functions the same arguments")
    from triton.experimental.gluon import constexpr_function, jit, language
    gluon_jit = jit(do_not_specialize=[*VARYING_NUMBERS, "num_items", "num_kv_heads", "window", "table_row"],
                    do_not_specialize_on_alignment=VARYING)
    gl = language
except (ImportError, AttributeError) as error:
    problem = str(error)

    def gluon_jit(function: Any) -> Any:
        return function

    constexpr_function = gluon_jit


try:
    if gl is None:
        raise ImportError(problem)
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    fence_async_shared, mbarrier, tma = hopper.fence_async_shared, hopper.mbarrier, hopper.tma
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
    async_load = tma.async_load if "async_load" in tma.__all__ else tma.async_copy_global_to_shared  # before Triton 3.8
except (ImportError, AttributeError) as error:
    problem = str(error)
    TensorDescriptor = async_load = fence_async_shared = mbarrier = warpgroup_mma = warpgroup_mma_wait = None


def box_of(x: Tensor, shape: list[int], swizzling: int = 128) -> Any:
    """The tensor as copies of boxes of this shape see it, with the layout that wgmma reads: 128-byte swizzling of
    16-bit numbers, or another one. The strides of x must be multiples of 16 bytes. ImportError: there is no Gluon."""
    if TensorDescriptor is None:
        raise ImportError(problem)
    layout = gl.NVMMASharedLayout(swizzling, 8 * x.itemsize, len(shape))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), shape, layout)


def compiles(call: Callable[[], Any], loss: str) -> bool:
    """Whether `call`, which launches a kernel, raises nothing. Otherwise there is a warning. loss: what is slower"""
    try:
        call()
    except Exception as error:  # what a Triton to come raises is not known
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        warnings.warn(f"{loss}: Triton {triton.__version__} does not compile that one; 3.6 to 3.9 do ({reason})")
        return False
    return True
