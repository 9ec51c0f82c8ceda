"""A CPU's threads beside those of other programs."""
import os
import subprocess
import sys

import pytest

from nanopaged.tests.helpers import ROOT, needs


@needs("server")  # imports it; so do the command line and Ray Serve
@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="needs libgomp on x86")
@pytest.mark.parametrize("given, before, rounds", [
    ({}, "", "1000"), ({}, "import types; sys.modules['torch'] = types.ModuleType('torch')", "None"),
    (dict(OMP_WAIT_POLICY="active"), "", "None"), (dict(OMP_NUM_THREADS="1"), "", "None"),
    (dict(GOMP_SPINCOUNT="5"), "", "5")], ids=["default", "after torch", "policy", "threads", "rounds"])
def test_waiting_threads_leave_the_core_to_others(given, before, rounds):
    """If there are others. The user's settings stay as they are, and nothing is set where torch would not read it, nor
    by an import of nanopaged."""
    names = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    for load, expected in (("999/999", rounds), ("1/999", given.get("GOMP_SPINCOUNT", "None"))):  # programs that run
        code = (f"import os, pathlib, sys; pathlib.Path.read_text = lambda *_: '0.1 0.1 0.1 {load} 9'; {before}\n"
                "import nanopaged; print(os.environ.get('GOMP_SPINCOUNT'))\n"
                "from nanopaged.features import server; print(os.environ.get('GOMP_SPINCOUNT'))")
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert (done.stdout.split(), done.stderr) == ([given.get("GOMP_SPINCOUNT", "None"), expected], "")
