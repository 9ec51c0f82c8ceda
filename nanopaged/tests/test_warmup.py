"""no_garbage_collection: what it keeps from happening, and that afterwards everything is as it was."""
import gc
import weakref

import pytest

from nanopaged.device.warmup import no_garbage_collection


class Node:
    pass


def make_garbage() -> weakref.ref:
    """An object that only the collector can find to be unused."""
    node = Node()
    node.itself = node
    return weakref.ref(node)


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_meanwhile_and_everything_later(enabled):
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        before = make_garbage()
        with no_garbage_collection():
            meanwhile = make_garbage()
            many = [[] for _ in range(10**5)]
            assert not gc.isenabled() and before() and meanwhile() and many
        assert gc.isenabled() == enabled and gc.get_freeze_count() == 0
        gc.collect()
        assert before() is None and meanwhile() is None
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_an_error_ends_it_too():
    @no_garbage_collection()
    def fail():
        raise ValueError("no memory")

    for _ in range(2):  # a decorated function can be called again
        with pytest.raises(ValueError, match="no memory"):
            fail()
        assert gc.isenabled() and gc.get_freeze_count() == 0
