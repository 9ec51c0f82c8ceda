"""Finding and reading a checkpoint in Hugging Face layout, with torch alone.

A checkpoint is a directory: `config.json` says what the model is, `generation_config.json` (if there) what ends its
texts, and the weights lie in `model.safetensors`, or in several such files (shards) with `model.safetensors.index.json`
telling which tensor lies where, or in the older `pytorch_model.bin`, alone or sharded in the same way.

A safetensors file is a table of contents and then bytes:

    | 8 bytes: n, little endian | n bytes of JSON: {name: {dtype, shape, data_offsets: [begin, end]}, ...} | data |

so a tensor is a view of the file's bytes. The file is mapped into memory, not read: its pages come in as they are
touched, and the system may drop them again. Loading a model therefore needs memory for one copy of the weights, the
model's own. This module knows nothing about models: it hands out names and tensors.
"""
import json
import math
import os
import re
from pathlib import Path
from typing import Callable, Iterable, Iterator

import torch

from nanopaged.inputs import read_json, refuse_git_lfs_pointer

BUNDLED = {"shakespeare": Path(__file__).parent.parent / "shakespeare"}
WEIGHT_FILES = (    # the first of these that is there is read
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# "org/name" or, of the oldest models, "name"; by the rules of the Hub a path such as ./x, ~/x or x/y/z is none
HUB_NAME = re.compile(r"(?!.*(--|\.\.))(\w([\w.-]{0,94}\w)?/)?\w([\w.-]{0,94}\w)?", re.ASCII)
MAX_HEADER_BYTES = 100_000_000    # the format's own limit; a table of contents beyond it is not one
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "C64": torch.complex64,
}


def find_checkpoint(model: str, revision: str | None = None, check: Callable[[Path], object] | None = None,
                    config_only: bool = False) -> Path:
    """The directory of a checkpoint: a bundled name ("shakespeare"), a path, or a name on the Hub ("Qwen/Qwen3-0.6B").

    What is a directory here goes before a name on the Hub. Such a name is looked up in the cache of the Hugging Face
    tools, and else downloaded into it, at `revision` (a branch, tag or commit): see nanopaged/weights/hub.py, also for errors
    and for `check` and `config_only`, which limit what is downloaded.

    Raises FileNotFoundError if there is no such directory or no config.json in it, ValueError if that gets a revision,
    and ValueError for an adapter or a model in GGUF format.
    """
    path = BUNDLED.get(model) or Path(os.path.expanduser(model))
    if path.is_file():
        refuse_other_formats(f"model {str(model)!r}", [path.name])
        raise FileNotFoundError(f"model {model!r} is a file; pass the directory that holds config.json and the weights")
    if not path.is_dir():
        if not isinstance(model, str) or not HUB_NAME.fullmatch(model):
            raise FileNotFoundError(
                f"model {model!r} is neither a directory nor bundled ({', '.join(BUNDLED)}), nor a name on the Hub; "
                "pass a directory that holds config.json and the weights, or a name such as Qwen/Qwen3-0.6B")
        from nanopaged.weights.hub import download    # here, so that what is local does not pay for it
        return download(model, revision, check, config_only)
    if revision is not None:
        raise ValueError(f"revision {revision!r} was given with {path}, which is a directory and has none; leave it "
                         "out, or pass the model's name on the Hub")
    if not (path / "config.json").is_file():
        refuse_other_formats(str(path), [file.name for file in path.iterdir()])
        raise FileNotFoundError(f"{path} holds no config.json, so it is not a checkpoint in Hugging Face layout")
    return path


def refuse_other_formats(model: str, names: Iterable[str]) -> None:
    """ValueError for an adapter or a model in GGUF format, by the names of its files, which are no checkpoint."""
    names = sorted(names)
    if "adapter_config.json" in names:
        raise ValueError(f"{model} is a LoRA adapter (it has adapter_config.json), and only whole models are run here; "
                         "merge it into its base model (merge_and_unload of the package peft) and pass the result")
    if gguf := [name for name in names if name.lower().endswith(".gguf")]:
        raise ValueError(f"{model} is in GGUF format ({gguf[0]}), which is not read here; pass the model in Hugging "
                         "Face layout (config.json and safetensors), from which such files are converted")


def read_config(path: Path) -> dict:
    """config.json of the checkpoint directory `path`. Raises ValueError if it is not a JSON object."""
    return read_json(Path(path) / "config.json")


def eos_token_ids(path: Path) -> set[int]:
    """Every token id that ends a text, by generation_config.json and by config.json of the checkpoint directory `path`.

    Both count: chat models often name the end of a turn in the one and the end of a document in the other.
    Raises ValueError if a file's `eos_token_id` is not an integer, a list of integers or null.
    """
    ids = set()
    for file in (Path(path) / "config.json", Path(path) / "generation_config.json"):
        if file.name == "generation_config.json" and not file.exists():
            continue    # it is optional
        value = read_json(file).get("eos_token_id")
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int for token in found):
            raise ValueError(f"{file}: eos_token_id is {value!r}, expected an integer, a list of integers or null")
        ids.update(found)
    return ids


def read_generation_config(path: Path) -> dict:
    """generation_config.json, empty if there is none."""
    return read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> name of the file beside the index that holds it. ValueError if the index has no such map."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f"{index}: expected a \"weight_map\" of tensor names to file names")
    return weight_map


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, CPU tensor) of the checkpoint directory `path`, in its stored dtype, one file at a time.

    The tensors view the mapped file, so copy what you keep and let go of the rest; writing to one does not change the
    file. If safetensors and .bin are both there, safetensors is read.

    Raises, once iterated, FileNotFoundError for missing weights or a missing shard, ValueError for a damaged file.
    """
    path = Path(path)
    file = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if file is None:
        refuse_other_formats(str(path), [file.name for file in path.glob("*")])
        other = sorted(f.name for f in path.glob("*") if f.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf"))
        found = f" (not read: {', '.join(other[:5])})" if other else ""
        raise FileNotFoundError(f"no weights in {path}: looked for {', '.join(WEIGHT_FILES)}{found}")
    yield from _read_shards(file) if file.suffix == ".json" else _read_weights(file)


def read_safetensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, CPU tensor) of one safetensors file; the tensors and the errors are as in `read_tensors`."""
    refuse_git_lfs_pointer(file)
    entries, data_start = _read_header(file)
    size, expected = file.stat().st_size, data_start + max((end for *_, end in entries.values()), default=0)
    if size != expected:
        problem = "is truncated" if size < expected else "has stray bytes at its end"
        raise ValueError(f"{file} {problem}: expected {expected:,} bytes by its header, found {size:,}; fetch it again")
    contents = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)    # [size], a private mapping
    for name, (dtype, shape, begin, end) in entries.items():
        raw = contents[data_start + begin:data_start + end]
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()    # torch views bytes as wider numbers only if aligned, and nothing promises that
        yield name, raw.view(dtype).reshape(shape)


def _read_shards(index: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that an index file lists, shard after shard. All shards are looked for before the first is read."""
    shards = {}
    for name, shard in read_weight_map(index).items():
        shards.setdefault(index.parent / shard, set()).add(name)
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise FileNotFoundError(f"{index.parent}: {len(missing)} of {len(shards)} shards that {index.name} names are "
                                f"missing, the first is {missing[0]}; fetch the checkpoint again")
    for shard, names in shards.items():
        for name, tensor in _read_weights(shard):
            if name in names:
                names.remove(name)
                yield name, tensor
        if names:
            raise ValueError(f"{shard}: lacks {min(names)!r}, which {index.name} says it holds ({len(names)} in all)")


def _read_weights(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    return read_safetensors(file) if file.suffix == ".safetensors" else _read_bin(file)


def _read_header(file: Path) -> tuple[dict[str, tuple], int]:
    """The table of contents, name -> (dtype, shape, begin, end), and where in the file the data starts."""
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > MAX_HEADER_BYTES:
            raise ValueError(f"{file} ({size:,} bytes) is no safetensors file: it lacks the header's length")
        if size < 8 + length:
            raise ValueError(f"{file} is truncated: its header takes {8 + length:,} bytes, found {size:,}")
        try:
            header = json.loads(f.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: the safetensors header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file}: the safetensors header is a JSON {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    return {name: _parse_entry(f"{file}: tensor {name!r}", entry) for name, entry in header.items()}, 8 + length


def _parse_entry(what: str, entry: dict) -> tuple[torch.dtype, list[int], int, int]:
    """(dtype, shape, begin, end) of a header entry, which errors call `what`. Fit to the file is checked later."""
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        is_valid = type(dtype_name) is str and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"{what} has a malformed header entry, {str(entry)[:200]}: no dtype, shape, data_offsets")
    if dtype_name not in DTYPES:
        raise ValueError(f"{what} has the unknown dtype {dtype_name!r}; expected one of {', '.join(DTYPES)}")
    dtype = DTYPES[dtype_name]
    num_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != num_bytes:
        raise ValueError(f"{what} of shape {shape} and dtype {dtype_name} takes {num_bytes:,} bytes, but its "
                         f"data_offsets {begin}..{end} hold {end - begin:,}")
    return dtype, shape, begin, end


def _read_bin(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """A pickled dict of tensors; only tensors are unpickled, never code."""
    refuse_git_lfs_pointer(file)
    with file.open("rb") as f:
        is_zip = f.read(4) == b"PK\x03\x04"    # what torch has saved since 1.6, and all that it can map
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:    # zip, pickle and torch each raise their own kinds on damaged input
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{file} cannot be loaded: it is damaged or holds more than tensors ({reason})") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError(f"{file}: expected a dict of names to tensors and nothing else")
    for name in list(tensors):
        yield name, tensors.pop(name)    # not ours any more: in a file that was not mapped, this frees it
