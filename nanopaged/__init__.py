"""nanopaged: a paged-attention LLM inference engine to read, run and change.

    from nanopaged import LLM, SamplingParams

Importing this costs nothing: what a name stands for is loaded when the name is first used.
"""
from importlib import import_module

_HOME = {"LLM": "engine", "SamplingParams": "nanopaged.params", "BeamSearchParams": "nanopaged.params",
         "TextPrompt": "nanopaged.inputs", "TokensPrompt": "nanopaged.inputs",
         "RequestOutput": "nanopaged.outputs", "CompletionOutput": "nanopaged.outputs"}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'nanopaged' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
