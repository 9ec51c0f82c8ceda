"""Programs as `python -c` runs them, in processes that are forked from one which has imported torch: starting Python
and importing torch for each takes two seconds.

The program imports nanopaged and the chapters anew, from the folder that it runs in or from PYTHONPATH. What a test
asks of the import of torch, or of Triton, needs a Python of its own; so do all programs where a GPU is.
"""
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

OURS = "nanopaged", "kernel", "model", "engine"
CONTEXT = None  # where processes cannot be forked
if "forkserver" in multiprocessing.get_all_start_methods():
    CONTEXT = multiprocessing.get_context("forkserver")
    CONTEXT.set_forkserver_preload(["torch", "nanopaged.tests.forked"])  # tensor parallelism, if it is there


def run_program(program: str, *arguments: str, cwd, **variables: str) -> subprocess.CompletedProcess:
    """As subprocess.run([sys.executable, "-c", program, *arguments], cwd=cwd, capture_output=True, text=True), with
    more environment variables."""
    if CONTEXT is None or torch.cuda.is_available():  # CUDA cannot begin in a fork of a process that has counted GPUs
        return subprocess.run([sys.executable, "-c", program, *arguments], cwd=cwd, env=os.environ | variables,
                              capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        process = CONTEXT.Process(target=work, args=[program, arguments, str(cwd), os.environ | variables, folder])
        process.start()
        process.join()
        out, err = (Path(folder, name).read_text(encoding="utf-8") for name in ("out", "err"))
    return subprocess.CompletedProcess(program, process.exitcode, out, err)


def work(program, arguments, cwd, environment, folder):
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), stream)
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    root, given = str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [cwd, *filter(None, given), *(path for path in sys.path if path not in ("", root))]
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
