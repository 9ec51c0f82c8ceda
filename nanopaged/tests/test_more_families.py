"""Families of features/more_families.py against outputs of transformers, in torch and in Triton."""
import pytest

from nanopaged.tests.helpers import (
    OF_FEATURES,
    assert_golden,
    expectations,
    load,
    needs_kernel,
    prompt_logits,
    relative_error,
)


@pytest.mark.parametrize("variant", OF_FEATURES)
def test_logits_and_texts_equal_transformers(variant):
    prompts, _, logits = expectations(variant)
    llm = load(variant, enable_prefix_caching=False)
    for prompt, expected in zip(prompts, logits):
        assert relative_error(prompt_logits(llm, prompt.tolist()).cpu(), expected) < 1e-4
    assert_golden(llm, variant, num_tokens=24)


@needs_kernel
@pytest.mark.parametrize("variant", OF_FEATURES)
def test_the_triton_path_equals_transformers(variant):
    assert_golden(load(variant, attention="triton"), variant, slice(1), num_tokens=2)
