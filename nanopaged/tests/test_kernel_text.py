"""The worked examples of kernel.py and nanopaged/tiles.py: what their text draws is what the code does."""
import math
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch

import kernel
from nanopaged import tiles
from nanopaged.tests.helpers import ROOT, needs
from nanopaged.tiles import cdiv


def python(function, **names) -> FunctionType:
    """A function of the kernel that computes with integers alone, as a function of Python."""
    code = getattr(function, "fn", function).__code__
    constants = {name: getattr(tiles, name) for name in ("MIN_SPLIT", "MID_SPLIT", "MAX_SPLITS")}
    return FunctionType(code, dict(tl=SimpleNamespace(cdiv=cdiv, maximum=max, minimum=min)) | constants | names)


def text_of(function) -> str:
    return getattr(function, "fn", function).__doc__


def drawn(text: str, label: str) -> list[str]:
    """The words behind a label that begins a line of a drawing."""
    [line] = [line.strip() for line in text.splitlines() if line.strip().startswith(label)]
    return line[len(label):].split()


def test_online_softmax():
    source = Path(kernel.__file__).read_text()
    lines = (" ".join(drawn(source, label)) for label in ("#     tile 1:", "#     tile 2:"))
    first, second = ([float(number) for number in re.findall(r"(?:=|result) ([\d.]+)", line)] for line in lines)
    scores, values = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([10.0, 20.0, 40.0])
    sums = [1 + math.exp(-1), 10 + 20 * math.exp(-1)]
    assert first == [1, round(sums[0], 3), round(sums[1], 2)]
    alpha = math.exp(1 - 2)
    sums = [sums[0] * alpha + 1, sums[1] * alpha + 40]
    assert second == [2, round(alpha, 3), round(sums[0], 3), round(sums[1], 2), round(sums[1] / sums[0], 2)]
    assert sums[1] / sums[0] == pytest.approx((scores.softmax(0) @ values).item())


def test_the_block_table():
    table = [int(word) for word in drawn(kernel.__doc__, "block table       [")[:5] if word.isdigit()]
    assert table == [5, 2, 7]
    for block in table:
        slots = kernel.__doc__.split(f"block {block} : token")[1].split()[:4]
        for offset, word in enumerate(slots):
            if word != ".":
                assert table[int(word) // 4] * 4 + int(word) % 4 == block * 4 + offset


def test_a_chunk_sees_the_keys_up_to_its_own():
    values = torch.eye(8).view(2, 4, 1, 8)  # V of token t is 1 at t alone, so the result has the weights of all keys
    starts, lens = torch.tensor([0, 3]), torch.tensor([7])
    weights = kernel.paged_attention_reference(torch.zeros(3, 1, 8), values, values, torch.tensor([[0, 1]]), lens,
                                               starts, 1.0)
    for i in range(3):
        row = drawn(kernel.__doc__, f"query {i}, position {4 + i}")[:7]
        assert row == ["x" if weight > 0 else "." for weight in weights[i, 0, :7].tolist()]


def test_slots_of_two_contexts_of_different_lengths():
    from nanopaged.features import rectangles
    drawing = re.findall(r"block table (\d) (\d), (\d) tokens    slots +([ \d]+) mask +(0(?: 0| -inf){6})",
                         rectangles.__doc__)
    tables, lens = [[int(word) for word in row[:2]] for row in drawing], [int(row[2]) for row in drawing]
    starts = torch.arange(3)  # one new token each
    [(_, slots, mask)] = rectangles._rectangles(torch.tensor(tables), torch.tensor(lens), starts, 4, 1, 0,
                                                torch.float32)
    assert slots.tolist() == [[int(word) for word in row[3].split()] for row in drawing]
    assert mask[:, 0, 0].tolist() == [[float(word) for word in row[4].split()] for row in drawing]


def test_a_tile_of_prefill():
    """The tiles before the diagonal have no masked key, and the first one behind it has one."""
    text, tile_n, first_position = text_of(kernel._prefill), 4, 6
    diagonal = (first_position + 1) // tile_n * tile_n
    for position in (6, 7, 8):
        row = drawn(text, f"at position {position}")
        assert row == ["x" if key <= position else "." for key in range(9)]
    assert drawn(text, "3 query tokens, TILE_N 4        key")[:diagonal + 1] == [*map(str, range(diagonal)), "|"]


def test_the_length_of_a_split():
    text, length = Path(tiles.__file__).read_text().replace("#", ""), python(kernel.split_length)
    contexts, lengths, counts = ([int(word.replace(",", "")) for word in drawn(text, label)]
                                 for label in ("context  ", "split  ", "splits  "))
    assert [length(n, 64) for n in contexts] == lengths
    assert [cdiv(n, length(n, 64)) for n in contexts] == counts
    for n in range(1, 100_000, 61):
        assert cdiv(n, length(n, 64)) <= tiles.split_bound(n) and length(n, 64) % 64 == 0
        assert length(n, 64) <= tiles.MID_SPLIT or n > 16_384


# ---- The kernels, compiled for GPUs that this machine may not have

@needs("cascade", "delta", "delta_kernels", "experts", "four_bit_codes", "four_bit_experts", "four_bit_kernels",
       "four_bit_streams", "four_bits", "fp8", "fused", "fused_experts", "gemma4", "hopper", "kinds", "pick", "qwen3_5")
@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
def test_the_kernels_compile_and_fit_the_devices_shared_memory():
    """The interpreter accepts code that the compiler refuses. This test compiles a few configurations, and
    `python -m nanopaged.tests.compile_kernels` compiles all of them."""
    command = [sys.executable, "-m", "nanopaged.tests.compile_kernels", "--quick", "90", "75"]
    run = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0, run.stdout
    assert "sm_90 decode" in run.stdout and "sm_75 prefill" in run.stdout
