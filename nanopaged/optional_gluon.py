"""Gluon if this Triton has it: Triton's lower level, where a program says how a tensor lies in registers and memory.

It is experimental, and later Tritons may change it. So a feature first compiles its kernel (`compiles`), and falls back
to one in plain Triton. Importing Gluon takes 0.1 s, which machines without a GPU are spared.
"""
import warnings
from typing import Any, Callable

from nanopaged.optional_triton import INTERPRETED, VARYING, VARYING_NUMBERS, triton

gl, problem = None, ""  # problem: why there is no Gluon
try:
    if INTERPRETED:
        raise ImportError("the interpreter runs no Gluon")
    if triton and triton.__version__.startswith("3.5."):
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


def compiles(call: Callable[[], Any], loss: str) -> bool:
    """Whether `call`, which launches a kernel, raises nothing. Otherwise there is a warning. loss: what is slower"""
    try:
        call()
    except Exception as error:  # what a Triton to come raises is not known
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        warnings.warn(f"{loss}: Triton {triton.__version__} does not compile that one; 3.6 to 3.9 do ({reason})")
        return False
    return True
