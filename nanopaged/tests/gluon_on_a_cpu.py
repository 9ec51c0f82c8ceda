"""Kernels in Gluon in Triton's interpreter.

The interpreter has no layouts, so they are ignored, and a buffer in shared memory is a list of the interpreter's
tensors. Copies arrive at `wait_group`, which shows reads that come too early, or at once, which shows buffers that are
filled too early. Inline assembly is interpreted, too. Not checked: barriers, alignment, and that conversions between
layouts move nothing (Gluon's compiler does that).
"""
import re
from typing import Any

import numpy as np
import triton
import triton.language as tl

TYPES = dict(bfloat16=tl.float64)  # the interpreter computes bfloat16 wrongly; the kernels have no float64


class Tile:
    """A tensor in shared memory."""

    def __init__(self, memory: "Memory", i: int, order: tuple[int, ...] | None = None):
        self.memory, self.i, self.order = memory, i, order
        self.shape, self.dtype = memory.shape[1:], memory.dtype

    def store(self, value: Any) -> None:
        assert list(value.shape) == list(self.shape)
        self.memory.tiles[self.i] = value

    def load(self, layout: Any) -> Any:
        value = self.memory.tiles[self.i]
        return value.permute(self.order) if self.order else value

    def permute(self, order: tuple[int, ...]) -> "Tile":
        return Tile(self.memory, self.i, order)


class Memory:
    def __init__(self, dtype: Any, shape: list[int], layout: Any):
        self.dtype, self.shape, self.tiles = dtype, shape, dict[int, Any]()

    def index(self, i: int) -> Tile:
        assert 0 <= i < self.shape[0]
        return Tile(self, i)

    def store(self, value: Any) -> None:
        """Of all tiles, one below the other."""
        assert list(value.shape) == list(self.shape)
        self.all = value

    def reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> "Memory":
        other = Memory(dtype, shape, layout)
        for i, tile in enumerate(self.all.handle.data.reshape(shape)):
            other.tiles[i] = tensor_of(tile, dtype)
        return other


class Gluon:
    """What a kernel calls `gl`, and the modules beside it. is_eager: copies arrive at once"""

    def __init__(self, is_eager: bool):
        self.is_eager, self.warps, self.launches = is_eager, 0, 0
        self.groups: list[list[Any]] = []
        self.group: list[Any] = []
        self.allocate_shared_memory, self.static_range = Memory, range

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *_: None
        return TYPES.get(name) or getattr(tl, name)

    def arange(self, start, end, layout=None):
        return tl.arange(start, end)

    def full(self, shape, value, dtype, layout=None):
        return tl.full(shape, value, dtype)

    def zeros(self, shape, dtype, layout=None):
        return tl.zeros(shape, dtype)

    def convert_layout(self, value, layout, assert_trivial=False):
        return value

    def associative_scan(self, x, axis, add):
        return tl.cumsum(x, axis)

    def num_warps(self):
        return self.warps

    def inline_asm_elementwise(self, asm, constraints, inputs, dtype, is_pure, pack):
        asm, constraints = (getattr(one, "value", one) for one in (asm, constraints))  # of tl.constexpr, or strings
        return run_assembly(asm, constraints.count("="), [one.handle.data for one in inputs])

    def async_load(self, tile, pointers, mask=None):
        value = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)
        self.group.append((tile, value))
        if self.is_eager:
            tile.store(value)

    def commit_group(self):
        self.groups.append(self.group)
        self.group = []

    def wait_group(self, count):
        while len(self.groups) > count:
            for tile, value in self.groups.pop(0):
                if not self.is_eager:
                    tile.store(value)


class Launcher:
    def __init__(self, gluon: Gluon, kernel: Any):
        self.gluon, self.kernel = gluon, triton.jit(kernel)

    def __getitem__(self, grid):
        def launch(*inputs, num_warps, **named):
            self.gluon.warps = num_warps
            self.gluon.launches += 1
            self.kernel[grid](*inputs, **named)
        return launch


def put_gluon(monkeypatch, module, kernels: list[str], layouts: list[str], is_eager: bool) -> Gluon:
    """The module's kernels run in the interpreter. layouts: functions that return some"""
    gluon = Gluon(is_eager)
    monkeypatch.setattr(tl.block_type, "layout", None, raising=False)
    for name, value in dict(gl=gluon, async_copy=gluon, async_load=gluon.async_load, barrier=lambda: None,
                            mma_v2=lambda a, b, acc: tl.dot(a, b, acc), twice=twice).items():
        monkeypatch.setattr(module, name, value)
    for name in layouts:
        monkeypatch.setattr(module, name, lambda *_: None)
    for name in kernels:
        monkeypatch.setattr(module, name, Launcher(gluon, getattr(module, name)))
    return gluon


def tensor_of(numbers: np.ndarray, dtype: Any) -> Any:
    like = tl.zeros(list(numbers.shape), dtype)
    like.handle.data = numbers
    return like


def twice(x):
    """In place of `four_bit_codes.twice`, which needs a real bfloat16."""
    return tensor_of((bfloat16(x.handle.data.astype(np.float64)) * np.uint32(0x10001)).view(np.int32), tl.int32)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Its bits, of float64, rounded to nearest."""
    bits = x.astype(np.float32).view(np.uint32)
    return bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)


def halves(x: np.ndarray) -> list[np.ndarray]:
    """The two bfloat16 in a register, the low one first, in float64."""
    return [half.view(np.float32).astype(np.float64) for half in (x << np.uint32(16), x & np.uint32(0xFFFF0000))]


def run_assembly(asm: str, num_outputs: int, inputs: list[np.ndarray]) -> tuple[Any, ...]:
    """The outputs in float32, each of which is half a register."""
    registers = {f"${num_outputs + i}": one.view(np.uint32) for i, one in enumerate(inputs)}
    outputs: dict[str, np.ndarray] = {}
    for line in re.sub(r"\{\.reg[^;]*;|\}$", "", asm).split(";"):
        if not line.strip():
            continue
        op, target, *sources = re.split(r"\s*,\s*|\s+", re.sub(r"\{(\S+), (\S+)\}", r"\1/\2", line.strip()))
        a, b, c = ([registers[one] if one in registers else np.uint32(int(one, 0)) for one in sources] + [None] * 3)[:3]
        if "/" in target:
            outputs |= dict(zip(target.split("/"), halves(a)))
        elif op == "fma.rn.bf16x2":
            low, high = (bfloat16(x * y + z) for x, y, z in zip(halves(a), halves(b), halves(c)))
            registers[target] = low | high << np.uint32(16)
        else:
            registers[target] = {"mov.b32": lambda: a, "and.b32": lambda: a & b, "shl.b32": lambda: a << b,
                                 "shr.b32": lambda: a >> b, "lop3.b32": lambda: a & b | c,
                                 "shf.r.wrap.b32": lambda: a >> c | b << np.uint32(32) - c}[op]()
    return tuple(tensor_of(outputs[f"${i}"].astype(np.float32), tl.float32) for i in range(num_outputs))
