"""nanopaged: a paged-attention LLM inference engine to read, run and change.

    from nanopaged import LLM, SamplingParams

Importing this costs nothing: what a name stands for is loaded when the name is first used.
"""
import os
import sys
import time
import warnings
from contextlib import suppress
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what __getattr__ loads, for editors and type checkers
    import engine as engine
    import kernel as kernel
    import model as model
    from nanopaged.api.llm import LLM as LLM
    from nanopaged.inputs import PromptType as PromptType
    from nanopaged.inputs import TextPrompt as TextPrompt
    from nanopaged.inputs import TokensPrompt as TokensPrompt
    from nanopaged.outputs import CompletionOutput as CompletionOutput
    from nanopaged.outputs import RequestOutput as RequestOutput
    from nanopaged.sampling_params import BeamSearchParams as BeamSearchParams
    from nanopaged.sampling_params import SamplingParams as SamplingParams
    from nanopaged.sampling_params import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.2.0"
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch's warning, where nothing needs numpy

_HOME = {"LLM": "nanopaged.api.llm", "SamplingParams": "nanopaged.sampling_params",
         "BeamSearchParams": "nanopaged.sampling_params",
         "StructuredOutputsParams": "nanopaged.sampling_params", "TextPrompt": "nanopaged.inputs",
         "TokensPrompt": "nanopaged.inputs", "PromptType": "nanopaged.inputs", "RequestOutput": "nanopaged.outputs",
         "CompletionOutput": "nanopaged.outputs"}
_CHAPTERS = ("kernel", "model", "engine")  # the files beside this package
__all__ = list(_HOME)

# On a CPU torch computes with OpenMP threads, and between two operations a thread waits in a loop before it sleeps.
# libgomp's default is 300,000 rounds. On x86 a round takes about 30 ns, so a thread keeps its core for 8 ms. Where no
# other program computes, that is fastest. Beside another program the threads keep each other from computing. These
# rounds take 30 us, as long as the gap between two operations of a step. libgomp reads the variable when torch is
# imported. On ARM a round takes about 1 ns.
SPIN_ROUNDS = 1000


def _is_shared() -> bool:
    """Whether other programs compute on cores that torch's threads would take, in each of three looks."""
    for _ in range(3):
        num_running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1  # without this program
        if num_running <= (os.cpu_count() or 1) - len(os.sched_getaffinity(0)):
            return False
        time.sleep(0.005)
    return True


if ("torch" not in sys.modules and sys.platform == "linux" and os.uname().machine == "x86_64"
        and os.environ.keys().isdisjoint(("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"))):
    with suppress(OSError, ValueError, IndexError):  # a system without /proc
        if _is_shared():
            os.environ["GOMP_SPINCOUNT"] = str(SPIN_ROUNDS)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_CHAPTERS})


if not TYPE_CHECKING:  # a checker knows the names above, and any other name is a mistake
    def __getattr__(name: str) -> Any:
        if name in _CHAPTERS:
            return _chapter(name)
        if name not in _HOME:
            raise AttributeError(f"module 'nanopaged' has no attribute {name!r}; it offers {', '.join(__all__)}")
        return getattr(import_module(_HOME[name]), name)


def _chapter(name: str) -> ModuleType:
    """The module of kernel.py, model.py or engine.py, always the same one. It is the plain module `kernel` where that
    name finds this file, also as the program that runs. Where a user's own kernel.py has that name, the file is loaded
    under the name `nanopaged.kernel`."""
    file = (Path(__file__).parent.parent / f"{name}.py").resolve()
    for loaded in (f"nanopaged.{name}", name, "__main__"):
        if Path(getattr(sys.modules.get(loaded), "__file__", None) or "").resolve() == file:
            return sys.modules[loaded]
    if name not in sys.modules and (found := util.find_spec(name)) and Path(found.origin or "").resolve() == file:
        return import_module(name)
    spec = util.spec_from_file_location(f"nanopaged.{name}", file)
    assert spec is not None and spec.loader is not None  # both are there for any .py file
    module = sys.modules[f"nanopaged.{name}"] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
