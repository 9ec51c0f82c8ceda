"""What Gluon adds for Hopper, in Triton's interpreter (gluon_on_a_cpu.py): a kernel's warps with different tasks are
threads, of which one runs at a time, until it has to wait at a barrier.

Copies arrive when somebody waits for them, and products read shared memory when somebody waits for those: as late as
they may. So a buffer that is read or filled too early has wrong numbers. A barrier that nobody completes raises.
"""
import threading
from types import SimpleNamespace
from typing import Any, Callable

import numpy as np
import triton.language as tl

from nanopaged.tests.gluon_on_a_cpu import Gluon, Launcher, tensor_of, twice

TIMEOUT, PAUSE = 5, 0.0005  # seconds


class Box:
    """What `optional_gluon.box_of` returns."""

    def __init__(self, x: Any, shape: list[int], swizzling: int = 128):
        self.numbers, self.layout = x.numpy(), None
        self.dtype = tl.int32 if x.dtype.itemsize == 4 and not x.is_floating_point() else tl.float32
        self.block_type = SimpleNamespace(shape=shape, nbytes=4 * int(np.prod(shape)))

    def read(self, at: list[Any]) -> np.ndarray:
        """Numbers behind the end are 0."""
        out = np.zeros(self.block_type.shape, self.numbers.dtype)
        ranges = [slice(int(i), int(i) + n) for i, n in zip(at, self.block_type.shape)]
        inside = self.numbers[tuple(ranges)]
        out[tuple(slice(n) for n in inside.shape)] = inside
        return out


class View:
    """A part of a buffer: rows from `start` on, perhaps transposed."""

    def __init__(self, buffers: "Buffers", i: int, start: int = 0, length: int | None = None, transposed: bool = False):
        self.buffers, self.i, self.start, self.transposed = buffers, i, start, transposed
        self.length = buffers.shape[1] if length is None else length

    def slice(self, start: int, length: int) -> "View":
        return View(self.buffers, self.i, start, length)

    def permute(self, order: tuple[int, ...]) -> "View":
        return View(self.buffers, self.i, self.start, self.length, True)

    @property
    def numbers(self) -> np.ndarray:
        return self.buffers.numbers[self.i][self.start:self.start + self.length]

    def load(self, layout: Any) -> Any:
        numbers = self.numbers.copy()
        return tensor_of(numbers.T.copy() if self.transposed else numbers, self.buffers.dtype)


class Buffers:
    def __init__(self, dtype: Any, shape: list[int], layout: Any):
        self.dtype, self.shape = dtype, shape
        self.numbers = np.zeros(shape, np.int32 if dtype is tl.int32 else np.float32)
        self.barriers = [Barrier() for _ in range(shape[0])]

    def index(self, i: int) -> Any:
        assert 0 <= i < self.shape[0]
        return self.barriers[i] if self.dtype is tl.int64 else View(self, i)


class Barrier:
    def __init__(self) -> None:
        self.count, self.arrived, self.expected, self.phase = 0, 0, 0, 0
        self.copies: list[tuple[View, Box, list[Any]]] = []

    def deliver(self) -> None:
        for view, box, at in self.copies:
            view.numbers[:] = box.read(at)
            self.expected -= box.block_type.nbytes
        self.copies = []

    def advance(self) -> None:
        if self.arrived == self.count and not self.expected:
            self.arrived, self.phase = 0, self.phase + 1


class Product:
    """Products that are not waited for yet, and what they are added to."""

    def __init__(self, sums: Any):
        self.sums, self.factors = sums, list[tuple[Any, View]]()


class Hopper(Gluon):
    """`gl`, and the functions and modules beside it."""

    def __init__(self) -> None:
        super().__init__(True)
        self.allocate_shared_memory = Buffers
        self.changed, self.errors = threading.Condition(), list[BaseException]()
        self.mbarrier = SimpleNamespace(MBarrierLayout=lambda: None, init=self.init, expect=self.expect, wait=self.wait,
                                        arrive=self.arrive)

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = count

    def expect(self, barrier: Barrier, size: int) -> None:
        barrier.expected += size
        self.arrive(barrier)

    def arrive(self, barrier: Barrier) -> None:
        assert barrier.arrived < barrier.count, "more arrivals than the barrier expects"
        barrier.arrived += 1
        barrier.advance()
        self.changed.notify_all()
        self.changed.wait(PAUSE)  # now other tasks may run

    def async_copy_box(self, box: Box, at: list[Any], barrier: Barrier, view: View) -> None:
        barrier.copies.append((view, box, at))
        self.changed.notify_all()

    def wait(self, barrier: Barrier, parity: int) -> None:
        """Until the phase of this parity is over."""
        def is_over() -> bool:
            if parity == barrier.phase % 2 and barrier.expected == sum(box.block_type.nbytes for _, box, _ in
                                                                       barrier.copies):
                barrier.deliver()
                barrier.advance()
            return bool(self.errors) or parity != barrier.phase % 2
        assert self.changed.wait_for(is_over, TIMEOUT), "nobody completes the barrier"
        if self.errors:
            raise RuntimeError("another task has failed")

    def warp_specialize(self, tasks: list[tuple[Callable, tuple]], warps: list[int], registers: list[int]) -> None:
        assert len(warps) == len(registers) == len(tasks) - 1

        def run(function: Callable, arguments: tuple) -> None:
            with self.changed:
                try:
                    function(*arguments)
                except BaseException as error:
                    self.errors.append(error)
                self.changed.notify_all()

        threads = [threading.Thread(target=run, args=task) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def warpgroup_mma(self, a: Any, b: View, sums: Any, is_async: bool) -> Product:
        product = sums if isinstance(sums, Product) else Product(sums)
        product.factors.append((a, b))
        return product

    def warpgroup_mma_wait(self, pending: int, deps: list[Any]) -> list[Any]:
        product, *others = deps
        sums = product.sums
        for a, b in product.factors:
            sums = tl.dot(a, b.load(None), sums, input_precision="ieee")
        return [sums, *others]


def put_hopper(monkeypatch, module, layouts: list[str], *others) -> Hopper:
    """The module's `many_rows_kernel` runs in the interpreter, with functions of the other ones. layouts: functions
    that return some"""
    gluon = Hopper()
    monkeypatch.setattr(tl.block_type, "layout", None, raising=False)
    for one in (module, *others):
        monkeypatch.setattr(one, "gl", gluon)
        monkeypatch.setattr(one, "twice", twice)
        for name in layouts:
            if hasattr(one, name):
                monkeypatch.setattr(one, name, lambda *_: None)
    for name, value in dict(mbarrier=gluon.mbarrier, async_load=gluon.async_copy_box, box_of=Box,
                            warpgroup_mma=gluon.warpgroup_mma, warpgroup_mma_wait=gluon.warpgroup_mma_wait).items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "many_rows_kernel", Launcher(gluon, module.many_rows_kernel))
    return gluon
