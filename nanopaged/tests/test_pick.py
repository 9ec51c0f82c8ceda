"""The kernels that sample on a GPU pick the token that the definition in torch picks."""
import pytest
import torch

from nanopaged.device.sampler import mix, pick
from nanopaged.features.pick import pick as pick_in_triton
from nanopaged.tests.helpers import DEVICE, needs_kernel


@needs_kernel
@pytest.mark.parametrize("vocab_size", [1, 70, 5000])
def test_picking_a_token(vocab_size):
    """The kernel's tokens are those of the definition in torch, except where two scores tie but for rounding."""
    logits = torch.randn(8, vocab_size, device=DEVICE) * 3
    temperature = torch.tensor([0, 1, 0.7, 2, 1e-3, 1, 1e-6, 10], device=DEVICE)
    seeds = torch.tensor([mix(i) for i in range(8)], device=DEVICE)
    positions = torch.arange(8, device=DEVICE) + 100
    tokens = pick_in_triton(logits, temperature, seeds, positions)
    assert tokens.dtype is torch.int64 and torch.equal(tokens, pick(logits, temperature, seeds, positions))
    logits[1, 0], logits[2, -1], logits[3], logits[4, 1:] = torch.nan, torch.inf, -torch.inf, -torch.inf
    tokens[1:4], tokens[4] = -1, 0
    assert torch.equal(pick_in_triton(logits, temperature, seeds, positions), tokens)
