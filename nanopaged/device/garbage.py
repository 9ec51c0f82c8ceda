"""Python's garbage collector, switched off while torch's compiler works.

Importing torch's compiler and compiling with it create hundreds of thousands of objects, and hardly any is garbage. The
collector examines the youngest objects after every few hundred allocations, and sometimes all objects. This takes a
sixth of the compilation time.
"""
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A context manager, and a decorator, for sections without garbage collection.

    torch itself calls gc.collect() after a compilation and before it records a graph. Existing objects are therefore
    frozen, so that these calls skip them. (Afterwards, objects that a caller had frozen are no longer frozen.)
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.freeze()  # the objects created meanwhile, too:
        gc.unfreeze()  # unfrozen objects join the oldest generation, which the collector seldom examines
        if enabled:
            gc.enable()
