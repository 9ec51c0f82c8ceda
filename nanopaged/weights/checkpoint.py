"""Finding and reading a checkpoint in Hugging Face layout, with torch alone.

A checkpoint is a directory. `config.json` describes the model. The optional `generation_config.json` names the tokens
that end a text. The weights are in `model.safetensors`, or in several such files (shards) with an index,
`model.safetensors.index.json`, which maps each tensor's name to its shard. The older format is `pytorch_model.bin`,
alone or sharded in the same way.

A safetensors file is a table of contents and then bytes:

    | 8 bytes: n, little endian | n bytes of JSON: {name: {dtype, shape, data_offsets: [begin, end]}, ...} | data |

A tensor is therefore a view of the file's bytes. The file is mapped into memory, not read: the system loads a page of
it at the first access, and may drop that page again. Loading a model needs memory for one copy of the weights, the
model's own. This module knows nothing about models: it yields names and tensors.
"""
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any, Collection, Iterator

import torch

from nanopaged.inputs import read_json, refuse_git_lfs_pointer
from nanopaged.sampling_params import GENERATION_KEYS, OTHER_KEYS, UNREAD_KEYS, unread_keys

BUNDLED: dict[Any, Path] = {"shakespeare": Path(__file__).parent.parent / "shakespeare"}
# A name on the Hub is "org/name", or "name" for the oldest models. The Hub's rules exclude paths: ./x, ~/x, x/y/z.
HUB_NAME = re.compile(r"(?!.*(--|\.\.))(\w([\w.-]{0,94}\w)?/)?\w([\w.-]{0,94}\w)?", re.ASCII)
WEIGHT_FILES = (  # in the order of preference: the first that exists is read
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
MAX_NAME = 255  # characters of a shard's name; few file systems have longer ones
MAX_HEADER_BYTES = 100_000_000  # the format's own limit for the table of contents
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "C64": torch.complex64,
}


def find_on_disk(model: str | Path, revision: str | None = None) -> Path | None:
    """The directory of a checkpoint: a bundled name ("shakespeare") or a path. None for a name on the Hub
    ("Qwen/Qwen3-0.6B"); a directory takes precedence over such a name. Anything else raises FileNotFoundError or
    ValueError, with what to pass instead."""
    path = BUNDLED.get(model) or Path(os.path.expanduser(model))
    if os.path.isfile(path):  # which is False, where Path.is_file raises an error, for a name that is too long
        refuse_other_formats(f"model {str(model)!r}", [path.name])
        raise FileNotFoundError(f"model {model!r} is a file; pass the directory that holds config.json and the weights")
    if not os.path.isdir(path):
        if not isinstance(model, str) or not HUB_NAME.fullmatch(model):
            _refuse_other_names(str(model))
            raise FileNotFoundError(
                f"model {model!r:.200} is neither a directory nor bundled ({', '.join(BUNDLED)}), nor a name on the "
                "Hub; pass a directory that holds config.json and the weights, or a name such as Qwen/Qwen3-0.6B")
        return None
    if revision is not None:
        raise ValueError(f"revision {revision!r:.80} was given with the directory {path}, which has no revisions; "
                         "leave it out, or pass the model's name on the Hub")
    if not (path / "config.json").is_file():
        refuse_other_formats(str(path), [file.name for file in path.iterdir()])
        raise FileNotFoundError(f"{path} holds no config.json, so it is not a checkpoint in Hugging Face layout")
    return path


def _refuse_other_names(model: str) -> None:
    """Raise ValueError, with the name to write instead, for a URL and for a name of ollama."""
    page = re.match(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/\w+/([\w.-]+))?", model)
    if page:
        revision = f" and the revision {page[2]!r}" if page[2] not in (None, "main") else ""
        raise ValueError(f"model {model!r} is the address of a page; write the model's name, {page[1]!r}{revision}")
    if "://" in model:
        raise ValueError(f"model {model!r} is an address, and nanopaged downloads from the Hugging Face Hub only; "
                         "write a name there, as Qwen/Qwen3-0.6B, or the directory of a downloaded checkpoint")
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)*:[\w.-]+", model):
        raise ValueError(f"model {model!r} has a tag, as the names of ollama have, whose files nanopaged does not "
                         "read; write the model's name on the Hugging Face Hub: Qwen/Qwen3-0.6B for qwen3:0.6b, "
                         "meta-llama/Meta-Llama-3-8B-Instruct for llama3:8b")


def refuse_other_formats(model: str, names: Collection[str]) -> None:
    """Raise ValueError if the file names are those of a LoRA adapter or of a model in GGUF format."""
    if "adapter_config.json" in names:
        raise ValueError(f"{model} is a LoRA adapter (it has adapter_config.json), and nanopaged runs only whole "
                         "models; merge it into its base model (merge_and_unload of the package peft) and pass the "
                         "result")
    if gguf := [name for name in names if name.lower().endswith(".gguf")]:
        raise ValueError(f"{model} is in GGUF format ({min(gguf)}), which nanopaged does not read; GGUF files are "
                         "converted from another format, so pass the model in Hugging Face layout (config.json and "
                         "safetensors)")


def read_config(path: Path) -> dict:
    """config.json of the checkpoint directory `path`. Raises ValueError if it is not a JSON object."""
    return read_json(Path(path) / "config.json")


def eos_token_ids(path: Path) -> set[int]:
    """The end-of-sequence token ids of config.json and generation_config.json in the checkpoint directory `path`.

    All places count: chat models often name the end of a turn in one file and the end of a document in the other, and
    multimodal models may name ends in the text_config of config.json alone.
    """
    config, ids = read_json(path / "config.json", {}), set[int]()
    text_config = config.get("text_config")
    for place, fields in (("config.json", config),
                          ("config.json: text_config", text_config if isinstance(text_config, dict) else {}),
                          ("generation_config.json", read_generation_config(path))):
        value = fields.get("eos_token_id")
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int for token in found):
            raise ValueError(f"{path}/{place}: eos_token_id is {value!r}, expected an integer, a list of integers or "
                             "null")
        ids.update(found)
    return ids


def read_generation_config(path: Path) -> dict:
    """generation_config.json of the checkpoint directory `path`; {} if the file does not exist."""
    return read_json(path / "generation_config.json", {})


def recommended_settings(path: Path) -> dict:
    """The entries of generation_config.json, or, as in transformers, where there is no such file, those of config.json
    and of its text_config. Warns of entries that would change texts and are not read."""
    name = "generation_config.json"
    settings = read_generation_config(path)
    if not (path / name).exists():
        name, config = "config.json", read_config(path)
        parts, keys = (config.get("text_config"), config), {*GENERATION_KEYS, *OTHER_KEYS, *UNREAD_KEYS}
        settings = {key: value for part in parts if isinstance(part, dict) for key, value in part.items()
                    if key in keys and value is not None}
    if unread := unread_keys(settings):
        warnings.warn(f"{name} has settings that change texts and that nanopaged does not apply: {', '.join(unread)}")
    return settings


def find_weights(path: Path) -> tuple[str, dict[str, set[str]]]:
    """The first of WEIGHT_FILES in the directory, or "", and what is read: a file's name -> the names of its tensors,
    if an index gives them. ValueError if the index has no map of them, or names a file elsewhere."""
    first = next((name for name in WEIGHT_FILES if (path / name).is_file()), "")
    shards: dict[str, set[str]] = {}
    if not first.endswith(".json"):
        shards[first] = set()
    else:
        weight_map = read_json(path / first).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError(f"{path / first}: expected a \"weight_map\" of tensor names to file names")
        for name, shard in weight_map.items():
            if not stays_inside(shard):
                raise ValueError(f"{path / first} names a shard outside of its directory, {shard!r:.80}; do not use "
                                 "this model")
            shards.setdefault(shard, set()).add(name)
    return first, shards


def stays_inside(name: str) -> bool:
    """Whether `directory / name` is the path of a file inside the directory, on any operating system."""
    return (not {"", ".", ".."}.intersection(name.split("/")) and not re.search(r"[\\:\x00-\x1f\ud800-\udfff]", name)
            and len(name) <= MAX_NAME)


def read_ordinary(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """`read_tensors` of a checkpoint whose config.json has no quantization_config. ValueError for 8-bit numbers."""
    for name, tensor in read_tensors(path):
        if tensor.is_floating_point() and tensor.itemsize == 1:
            raise ValueError(f"tensor {name} {list(tensor.shape)} has the type {tensor.dtype}; of 8-bit numbers only "
                             "matrices of float8_e4m3fn can be read, with a quantization_config in config.json")
        yield name, tensor


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, CPU tensor) of the checkpoint directory `path`, in its stored dtype, one file at a time.

    The tensors are views of the mapped file: copy those you keep and drop the others. Writing to a tensor does not
    change the file. Iterating raises FileNotFoundError for missing weights or a missing shard, and ValueError for a
    damaged file.
    """
    path = Path(path)
    first, shards = find_weights(path)
    if not first:
        names = sorted(file.name for file in path.glob("*"))
        refuse_other_formats(str(path), names)
        other = [name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".pth"))]
        ending = f" (not read: {', '.join(other[:5])})" if other else ""
        raise FileNotFoundError(f"no weights in {path}: looked for {', '.join(WEIGHT_FILES)}{ending}")
    if missing := [shard for shard in shards if not (path / shard).is_file()]:  # before the first tensor
        raise FileNotFoundError(f"{path}: {len(missing)} of {len(shards)} shards named by {first} are missing, the "
                                f"first is {missing[0]}; fetch the checkpoint again")
    for shard, wanted in shards.items():
        found = set()
        refuse_git_lfs_pointer(path / shard)
        read = read_safetensors if shard.endswith(".safetensors") else _read_bin
        for name, tensor in read(path / shard):
            if name in wanted or not wanted:  # without an index all are
                found.add(name)
                yield name, tensor
        if absent := wanted - found:
            raise ValueError(f"{path / shard} lacks {min(absent)!r}, which {first} places there ({len(absent)} missing "
                             "in all); fetch the checkpoint again")


def read_safetensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, CPU tensor) of one safetensors file; `read_tensors` describes the tensors and the errors."""
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > MAX_HEADER_BYTES:
            raise ValueError(f"{file} ({size:,} bytes) is not a safetensors file: it lacks the header's length")
        if size < 8 + length:
            raise ValueError(f"{file} is truncated: its header takes {8 + length:,} bytes, found {size:,}")
        try:
            header = json.loads(f.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: the safetensors header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file}: the safetensors header is a JSON {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    entries = {name: _parse_entry(f"{file}: tensor {name!r}", entry) for name, entry in header.items()}
    data_start = 8 + length
    expected = data_start + max((end for *_, end in entries.values()), default=0)
    if size != expected:
        problem = "is truncated" if size < expected else "has stray bytes at its end"
        raise ValueError(f"{file} {problem}: expected {expected:,} bytes according to its header, found {size:,}; "
                         "fetch the file again")
    contents = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)  # [size], a private mapping
    for name, (dtype, shape, begin, end) in entries.items():
        raw = contents[data_start + begin:data_start + end]
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()  # torch views bytes as wider numbers only if aligned; the format promises no alignment
        yield name, raw.view(dtype).reshape(shape)


def _parse_entry(label: str, entry: dict) -> tuple[torch.dtype, list[int], int, int]:
    """(dtype, shape, begin, end) of a header entry; `label` names it in errors. The caller checks the file's size."""
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        dtype = DTYPES.get(dtype_name)
        num_bytes = torch.empty([*shape], dtype=dtype, device="meta").nbytes  # refuses shapes that no tensor has
        if not (type(begin) is type(end) is int and begin >= 0 and end < 2**63):
            raise ValueError
    except (TypeError, KeyError, ValueError, RuntimeError):
        raise ValueError(f"{label} has a malformed header entry, {str(entry)[:200]}; expected dtype, shape and "
                         "data_offsets") from None
    if dtype is None:
        raise ValueError(f"{label} has the unknown dtype {dtype_name!r}; expected one of {', '.join(DTYPES)}")
    if end - begin != num_bytes:
        raise ValueError(f"{label} of shape {shape} and dtype {dtype_name} takes {num_bytes:,} bytes, but its "
                         f"data_offsets {begin}..{end} hold {end - begin:,}")
    return dtype, shape, begin, end


def _read_bin(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a pickled dict. weights_only=True unpickles tensors and no code."""
    with file.open("rb") as f:
        is_zip = f.read(4) == b"PK\x03\x04"  # torch.save's format since 1.6, the only one that torch can map
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # on damaged input zip, pickle and torch each raise exceptions of their own
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{file} cannot be loaded: it is damaged or holds more than tensors ({reason})") from error
    if not isinstance(tensors, dict) or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"
            and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
            for name, tensor in tensors.items()):
        raise ValueError(f"{file}: expected a dict of names to tensors and nothing else (nor tensors that are sparse, "
                         "quantised or without data)")
    for name in list(tensors):
        yield name, tensors.pop(name)  # drops our reference, so the caller can free a tensor that is not mapped
