"""Attention in torch for many sequences at once: right as chapter 1's is (test_paged.py), and in one call."""
from unittest.mock import Mock

import pytest
import torch

from nanopaged.features import rectangles
from nanopaged.tests.helpers import load, needs_gpu
from test_paged import CASES_AND_TYPES, assert_equals_float64, assert_right_at_any_length, paged_problem, run_attention


@pytest.mark.parametrize("case, dtype", CASES_AND_TYPES)
def test_attention_equals_float64(case, dtype):
    assert_equals_float64(rectangles.paged_attention, case, dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_attention_in_torch_at_any_length(device):
    assert_right_at_any_length(rectangles.paged_attention, device)


def test_a_decode_step_in_torch_is_one_call(monkeypatch):
    """The default path in torch makes one call, however many sequences there are and however long they are."""
    attend = Mock(wraps=torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    run_attention(rectangles.paged_attention, paged_problem([1] * 9, [5, 16, 33, 1, 70, 12, 8, 9, 40]))
    attend.assert_called_once()
    assert load(attention="torch", enforce_eager=False).runner.kernels is rectangles.KERNELS
