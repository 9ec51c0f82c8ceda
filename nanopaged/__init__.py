"""nanopaged: a paged-attention LLM inference engine to read, run and change.

    from nanopaged import LLM, SamplingParams

Importing this costs nothing: what a name stands for is loaded when the name is first used.
"""
import sys
import warnings
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
