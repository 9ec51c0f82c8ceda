"""For all tests: see helpers.py for what they import."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("nanopaged.tests.helpers")

IS_AHEAD = "NANOPAGED_TESTS_AHEAD"  # an environment variable of the processes that run them ahead


def pytest_collection_finish(session):
    """For the whole suite on a GPU, run the tests that compile much (`helpers.compiles`) in several processes while the
    others run. What they compile is in the caches of Triton and of torch's compiler, on disk, when their turn comes.
    Their results in these processes are not read."""
    items = [item for item in session.items if getattr(item.obj, "compiles", False)]
    session.ahead = []
    if torch.cuda.is_available() and len(items) > 50 and IS_AHEAD not in os.environ \
            and not session.config.option.collectonly:
        # torch's compiler would choose another folder for kernels that are compiled after its own.
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
        count = min(8, os.cpu_count() or 1)
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
