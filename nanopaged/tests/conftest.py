"""For all tests: see helpers.py for what they import."""
import gc
import os
import re
import sys
from importlib import import_module

import pytest

from nanopaged import options
from nanopaged.tests.without import feature_names, feature_of, is_there

pytest.register_assert_rewrite("nanopaged.tests.helpers")

# A user's shell may set these, and packages read most of them when they are imported.
for name in list(os.environ):
    if (name in ("COLUMNS", "TRITON_INTERPRET") or name.startswith(("HF_", "HUGGING"))
            or name.lower().endswith("_proxy")):
        del os.environ[name]


def pytest_collection_finish():
    """What is imported by now stays: the garbage collector takes a fifth of a second to look through it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


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
def forks(monkeypatch):
    """Ranks are forked from a process that has imported torch: starting Python for each takes two seconds."""
    if is_there("tensor_parallel"):
        from nanopaged.features.tensor_parallel import workers
        from nanopaged.tests.forked import ForkedWorker
        monkeypatch.setattr(workers, "Popen", ForkedWorker)


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

MISSED = set()  # features that the test has asked for, and that are not there


def import_noted(module: str):
    """import_module, for nanopaged.options.feature where a feature is not there. (What is on by default and missing is
    no reason to skip a test: the plain part runs.)"""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if sys._getframe(2).f_code.co_name != "default_feature":
            MISSED.update(re.findall(r"nanopaged\.features\.(\w+)", error.name))
        raise


if not all(map(is_there, feature_names())):
    options.import_module = import_noted


def skip_if_it_was_taken_away(error: BaseException | None):
    """Skips what ended with this error where a feature of README's table, or a file of its tests, is not there, if the
    error says so, or if the test has asked for one. (Of other processes a test says with helpers.needs what they
    need.)"""
    found = re.search(r"nanopaged[./]features[./](\w+)|'(\w+)' from 'nanopaged\.features'|nanopaged\.tests\.(test_\w+)",
                      "" if isinstance(error, AssertionError) else str(error))
    names = {*MISSED, found and (found[1] or found[2] or feature_of(found[3]))} & feature_names()
    for name in sorted(names):
        if not is_there(name):
            pytest.skip(f"needs nanopaged/features/{name}, which is not there")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except (Exception, SystemExit, pytest.fail.Exception) as error:
        skip_if_it_was_taken_away(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    MISSED.clear()
    return (yield from pytest_runtest_call(item))


class File(pytest.Module):
    def collect(self):
        try:
            return super().collect()
        except Exception as error:
            skip_if_it_was_taken_away(error.__cause__ or error)
            raise


def pytest_pycollect_makemodule(module_path, parent):
    return File.from_parent(parent, path=module_path)
