"""Python's garbage collector, kept out of the way of torch's compiler.

The collector looks at the youngest objects whenever there are some hundred more of them than before, and now and then at all
objects. To be imported, and to compile, torch's compiler makes objects by the hundred thousand, of which hardly any is
garbage: to look at them again and again is a sixth of the time.
"""
import gc
from contextlib import contextmanager


@contextmanager
def no_garbage_collection():
    """Also a decorator. What there is already is frozen: spared where torch itself has garbage collected, after a compilation
    and before a recording. (Objects that a caller had frozen are not frozen any more afterwards.)"""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.freeze()  # what was made meanwhile
        gc.unfreeze()  # all of it among the old objects, at which the collector seldom looks
        if enabled:
            gc.enable()
