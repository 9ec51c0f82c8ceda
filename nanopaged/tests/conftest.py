"""For all tests: see helpers.py for what they import."""
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

pytest.register_assert_rewrite("nanopaged.tests.helpers")

# Tests of test_paged.py with a kernel of its own for most of their parameters.
MANY_KERNELS = ("test_attention_equals_float64", "test_attention_over_an_fp8_cache", "test_logits_equal_transformers")


def pytest_collection_finish(session):
    """Before the whole suite on a GPU, run these tests in several processes. Each process compiles its share of the
    kernels into Triton's cache on disk, where the tests then find them."""
    items = [item for item in session.items if getattr(item, "originalname", None) in MANY_KERNELS]
    if torch.cuda.is_available() and len(items) > 50 and not session.config.option.collectonly:
        with ProcessPoolExecutor(8, get_context("spawn")) as processes:
            for item in items:
                processes.submit(item.function, **item.callspec.params)  # the tests themselves report what fails
