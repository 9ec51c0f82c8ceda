"""Finding a checkpoint: a bundled name, a directory or a name on the Hugging Face Hub becomes a directory."""
import os
import re
from pathlib import Path
from typing import Callable

from nanopaged.weights.checkpoint import refuse_other_formats

BUNDLED = {"shakespeare": Path(__file__).parent.parent / "shakespeare"}
# A name on the Hub is "org/name", or "name" for the oldest models. The Hub's rules exclude paths: ./x, ~/x, x/y/z.
HUB_NAME = re.compile(r"(?!.*(--|\.\.))(\w([\w.-]{0,94}\w)?/)?\w([\w.-]{0,94}\w)?", re.ASCII)


def find_checkpoint(model: str | Path, revision: str | None = None, check: Callable[[Path], object] | None = None,
                    config_only: bool = False) -> Path:
    """The directory of a checkpoint: a bundled name ("shakespeare"), a path, or a name on the Hub ("Qwen/Qwen3-0.6B").

    A local directory takes precedence over a name on the Hub. A name on the Hub is looked up in the cache of the
    Hugging Face tools, and otherwise downloaded into that cache, at `revision` (a branch, tag or commit).
    nanopaged/weights/hub.py describes the download, its errors, and `check` and `config_only`, which limit it.

    Raises FileNotFoundError if no such directory exists or if the directory lacks config.json. Raises ValueError for a
    directory with a revision, for an adapter, and for a model in GGUF format.
    """
    bundled = BUNDLED.get(model) if isinstance(model, str) else None
    path = bundled or Path(os.path.expanduser(model))
    if path.is_file():
        refuse_other_formats(f"model {str(model)!r}", [path.name])
        raise FileNotFoundError(f"model {model!r} is a file; pass the directory that holds config.json and the weights")
    if not path.is_dir():
        if not isinstance(model, str) or not HUB_NAME.fullmatch(model):
            raise FileNotFoundError(
                f"model {model!r} is neither a directory nor bundled ({', '.join(BUNDLED)}), nor a name on the Hub; "
                "pass a directory that holds config.json and the weights, or a name such as Qwen/Qwen3-0.6B")
        from nanopaged.weights.hub import download  # imports requests, which a local model does not need

        return download(model, revision, check, config_only)
    if revision is not None:
        raise ValueError(f"revision {revision!r} was given with the directory {path}, which has no revisions; leave it "
                         "out, or pass the model's name on the Hub")
    if not (path / "config.json").is_file():
        refuse_other_formats(str(path), [file.name for file in path.iterdir()])
        raise FileNotFoundError(f"{path} holds no config.json, so it is not a checkpoint in Hugging Face layout")
    return path
