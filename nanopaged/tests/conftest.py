"""For all tests: see helpers.py for what they import."""
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("nanopaged.tests.helpers")

# Tests of test_paged.py with a kernel of its own for most of their parameters.
MANY_KERNELS = ("test_attention_equals_float64", "test_attention_over_an_fp8_cache", "test_logits_equal_transformers")


def pytest_collection_finish(session):
    """For the whole suite on a GPU, run these tests in several processes while the others run. Each process compiles
    its share of the kernels into Triton's cache on disk, where the tests find them at the end."""
    items = [item for item in session.items if getattr(item, "originalname", None) in MANY_KERNELS]
    if torch.cuda.is_available() and len(items) > 50 and not session.config.option.collectonly:
        # torch's compiler would choose another folder for kernels that are compiled after its own.
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
        session.compiling = ProcessPoolExecutor(min(8, os.cpu_count() or 1), get_context("spawn"))
        for item in items:
            session.compiling.submit(item.function, **item.callspec.params)  # the tests themselves report what fails
        # The processes end with their work. If no other tests come first, wait for it.
        session.compiling.shutdown(wait=session.items[0].path == items[0].path)


def pytest_sessionfinish(session):
    if hasattr(session, "compiling"):
        session.compiling.shutdown(cancel_futures=True)
