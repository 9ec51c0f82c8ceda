"""For all tests: see helpers.py for what they import."""
import os
import subprocess
import sys

import pytest
import torch

pytest.register_assert_rewrite("nanopaged.tests.helpers")

IS_AHEAD = "NANOPAGED_TESTS_AHEAD"  # an environment variable of the processes that run them ahead


def pytest_collection_finish(session):
    """For the whole suite on a GPU, run the tests of kernels, and others that compile much (`helpers.compiles`), in
    several processes while the others run. What they compile is in Triton's cache, on disk, when their turn comes. The
    results of these processes are not read."""
    from nanopaged.tests.helpers import needs_kernel
    items = [item for item in session.items
             if getattr(item.obj, "compiles", False) or needs_kernel.mark in item.own_markers]
    session.ahead = []
    if torch.cuda.is_available() and len(items) > 50 and IS_AHEAD not in os.environ \
            and not session.config.option.collectonly:
        count = min(12, os.cpu_count() or 1)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        for first in range(count):
            session.ahead.append(subprocess.Popen(
                [*command, *(item.nodeid for item in items[first::count])], cwd=session.config.rootpath,
                env=os.environ | {IS_AHEAD: "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL))


def pytest_sessionfinish(session):
    for process in getattr(session, "ahead", ()):
        process.kill()
        process.wait()
