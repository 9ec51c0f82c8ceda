"""Queries that grow with their position. The golden's context is 8 tokens and its beta 1.5, so factors are up to 4."""
import math
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import test_paged
from nanopaged import kernel, model
from nanopaged.features import fused, last_layer
from nanopaged.features.query_scale import ScaledLayer
from nanopaged.tests.helpers import assert_golden, load, needs_kernel, use_modules
from nanopaged.tests.pretended import plain_kernels
from nanopaged.tests.test_graphs import record_graphs

VARIANT = "ministral3"


def test_logits_and_texts_equal_transformers():
    test_paged.test_logits_equal_transformers(VARIANT)
    test_paged.test_greedy_continuations_equal_transformers(VARIANT)


@needs_kernel
def test_the_triton_path_equals_transformers():
    assert_golden(load(VARIANT, attention="triton"), VARIANT, slice(1, 2), num_tokens=2)


@pytest.mark.parametrize("modules", [model.PLAIN, last_layer.MODULES, fused.MODULES], ids="plain short fused".split())
def test_layers_of_all_kinds(modules, monkeypatch):
    """Chunks, prefix hits and preemptions."""
    for change in plain_kernels() if modules is fused.MODULES else ():
        monkeypatch.setattr(*change)
    llm = load(VARIANT, num_blocks=20, block_size=4, max_num_batched_tokens=7, device="cpu", enforce_eager=True)
    use_modules(llm, modules)
    assert all(isinstance(layer, ScaledLayer) for layer in llm.runner.model.layers)
    assert_golden(llm, VARIANT, times=2)
    assert llm.counts.num_preemptions > 0 and llm.counts.num_cached_tokens > 0


def test_recorded_steps(monkeypatch):
    llm = load(VARIANT, graphs=True)
    replayed = record_graphs(llm, monkeypatch)
    assert_golden(llm, VARIANT, times=2)
    assert replayed


def test_the_factors_are_those_of_the_formula():
    config = load(VARIANT, device="cpu").config
    config.ropes = [config.ropes[0] | dict(llama_4_scaling_beta=0.5, original_max_position_embeddings=10)]
    layer, seen = ScaledLayer(config, 0, model.PLAIN), []
    queries, batch = torch.ones(5, 4, 16), SimpleNamespace(positions=torch.tensor([0, 9, 10, 20, 29]))
    with patch.object(model.Layer, "attention", lambda *args: seen.append(args[-1].attention(queries))):
        layer.attention(queries, None, batch, None, kernel.TORCH._replace(attention=lambda q: q))
    ln2, ln3 = math.log(2), math.log(3)
    torch.testing.assert_close(seen[0][:, 0, 0], torch.tensor([1, 1, 1 + ln2 / 2, 1 + ln3 / 2, 1 + ln3 / 2]))
