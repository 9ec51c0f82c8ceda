"""Triton if there is one, and what every kernel is compiled and launched with.

Without Triton (macOS, Windows) `triton` is None, and kernel.py has its torch path alone.
"""
import os
from functools import lru_cache
from importlib.util import find_spec

import torch

from nanopaged import tiles

if not torch.cuda.is_available() and find_spec("numpy"):
    # Without a GPU the kernel runs in Triton's interpreter, which needs numpy. Triton reads the variable on import.
    os.environ.setdefault("TRITON_INTERPRET", "1")
try:
    import triton
    import triton.language as tl
except ImportError:  # kernel.py uses these names where it defines kernels
    triton = None

    class tl:  # type: ignore[no-redef]
        constexpr = staticmethod(lambda value: value)

INTERPRETED = triton is not None and not isinstance(tl.cdiv, triton.JITFunction)  # as Triton was when it was imported

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no Triton, or one without Nvidia's part
    gdc_launch_dependents = gdc_wait = None
try:
    from triton.language.extra.cuda.libdevice import fast_dividef, fast_logf
except ImportError:
    fast_dividef = fast_logf = None
HAS_PTX = tl.constexpr(not INTERPRETED and torch.version.hip is None)  # a kernel may use what Nvidia's GPUs alone have

# Triton compiles a kernel again for other alignments of a pointer and for some values of an integer (1, multiples of
# 16). These arguments change from step to step, and a step must not wait for the compiler.
VARYING = ["block_tables", "seq_lens", "query_start_loc", "work", "slot_mapping", "positions"]
VARYING_NUMBERS = ["num_splits", "num_rows", "num_out", "num_tokens"]
jit = (triton.jit(do_not_specialize=VARYING_NUMBERS, do_not_specialize_on_alignment=VARYING) if triton
       else lambda function: function)


def require_triton(device: torch.device) -> None:
    """Raise ValueError if the kernel cannot run on this device."""
    if triton is None or (device.type == "cpu" and not INTERPRETED):
        raise ValueError("the Triton kernel needs Triton and a CUDA device, or on a CPU Triton's interpreter, which "
                         "needs numpy and the environment variable TRITON_INTERPRET=1 before any package imports "
                         "triton; attention='torch' works everywhere")


@lru_cache
def launch_options(device: torch.device, in_chain: bool = True) -> dict[str, bool]:
    """Options of every launch. in_chain: the kernel before or after it in a step is one of ours.

    enable_fp_fusion: a multiplication and an addition in one instruction, with one rounding. Triton up to 3.9 does this
    by default, Triton 3.10 does not.
    PDL, launch_pdl: programmatic dependent launch, where device and Triton have it. On an H200 it saves about a
    microsecond before each kernel that follows another one of ours. Between two kernels of the library it costs
    0.3 microseconds.
    """
    if gdc_wait is None or INTERPRETED or not in_chain or not tiles.has_dependent_launch(device):
        return dict(enable_fp_fusion=True, PDL=False)
    return dict(enable_fp_fusion=True, PDL=True, launch_pdl=True)
