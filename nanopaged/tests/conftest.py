"""For all tests: see helpers.py for what they import."""
import os
import re

import pytest

from nanopaged.tests.without import feature_names, feature_of, is_there

pytest.register_assert_rewrite("nanopaged.tests.helpers")

# A user's shell may set these, and packages read most of them when they are imported.
for name in list(os.environ):
    if (name in ("COLUMNS", "TRITON_INTERPRET") or name.startswith(("HF_", "HUGGING"))
            or name.lower().endswith("_proxy")):
        del os.environ[name]


# ---- Fixtures of several files

@pytest.fixture
def pretends(monkeypatch):
    """A CPU as a card with 8-bit products, also beside a GPU, for engines with device "cpu"."""
    from nanopaged.tests.pretended import fp8, plain_kernels
    for patch in [(fp8, "has_fp8_products", lambda device: True), *plain_kernels()]:
        monkeypatch.setattr(*patch)
    if is_there("tensor_parallel"):
        monkeypatch.setattr("nanopaged.tests.forked.FAULT", "pretend_kernels")


@pytest.fixture
def keeps(request):
    """The tests' device is a card with 8-bit products, or pretends to be one."""
    from nanopaged.device.choices import pick_device
    from nanopaged.features.fp8 import has_fp8_products
    from nanopaged.tests.helpers import CUDA, DEVICE
    if not CUDA:
        request.getfixturevalue("pretends")
    elif not has_fp8_products(pick_device(DEVICE)):
        pytest.skip("this card has no 8-bit products")


# ---- Tests of features that were taken away

def skip_if_it_was_taken_away(error: BaseException | None):
    """Skips what ended with this error because a feature of README's table, or a file of its tests, is not there. (A
    test that expects another sentence or exit code fails instead: helpers.needs says what it needs.)"""
    found = re.search(r"nanopaged[./]features[./](\w+)|'(\w+)' from 'nanopaged\.features'|nanopaged\.tests\.(test_\w+)",
                      str(error))
    name = found and (found[1] or found[2] or feature_of(found[3]))
    if name in feature_names() and not is_there(name) and not isinstance(error, AssertionError):
        pytest.skip(f"needs nanopaged/features/{name}, which is not there")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except Exception as error:
        skip_if_it_was_taken_away(error)
        raise


pytest_runtest_setup = pytest_runtest_call  # fixtures


class File(pytest.Module):
    def collect(self):
        try:
            return super().collect()
        except Exception as error:
            skip_if_it_was_taken_away(error.__cause__ or error)
            raise


def pytest_pycollect_makemodule(module_path, parent):
    return File.from_parent(parent, path=module_path)
