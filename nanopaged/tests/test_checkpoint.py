"""nanopaged.weights.checkpoint: what it finds and reads, how little memory it takes, and what it says of bad files."""
import json
import pickle
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from nanopaged.tests.helpers import BUNDLED, GOLDEN, complaint, write_files
from nanopaged.weights.checkpoint import (
    DTYPES,
    eos_token_ids,
    find_on_disk,
    read_config,
    read_tensors,
    recommended_settings,
)

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
SAMPLE = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.tensor([1, -2], dtype=torch.int64)}


def entry(tensor, begin):
    return {"dtype": NAME_OF[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, begin + tensor.nbytes]}


def raw_bytes(tensor):
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def write_safetensors(path, tensors, pad=0, header=None):
    """The format, the data aligned but for `pad` spaces in front of it. header: in place of the true one"""
    entries, data = {"__metadata__": {"format": "pt"}}, []
    for name, tensor in tensors.items():
        entries[name] = entry(tensor, sum(map(len, data)))
        data.append(raw_bytes(tensor))
    text = json.dumps(entries if header is None else header).encode()
    text += b" " * (-len(text) % 8 + pad)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


def write_index(path, weight_map):
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


def assert_same(tensors, expected):
    tensors = dict(tensors)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
        assert raw_bytes(tensors[name]) == raw_bytes(tensor)


def read_error(path, kind=ValueError) -> str:
    message = complaint(lambda: list(read_tensors(path)), kind=kind)
    assert str(path) in message
    return message


# Finding a checkpoint and reading its configuration

def test_finds_a_directory(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    assert find_on_disk(str(tmp_path)) == find_on_disk(tmp_path) == tmp_path
    assert find_on_disk("shakespeare") == BUNDLED
    monkeypatch.chdir(tmp_path.parent)
    for name in ("llama3:8b", "model"):  # as ollama and the Hub write names
        tmp_path = tmp_path.rename(name)
        assert find_on_disk(name) == Path(name)
    for model, path in (("shakespeare", BUNDLED), (str(BUNDLED), BUNDLED), ("model", "model")):
        assert re.search(f"'main' was .* {path}, .* leave it out", complaint(find_on_disk, model, "main"))
    for name in ("gpt2", "org/model", "Qwen/Qwen3-0.6B", "a_b/c.d-e"):  # on the Hub
        assert find_on_disk(name) is find_on_disk(name, "v1") is None


@pytest.mark.parametrize("names, words", [
    (["adapter_config.json", "adapter_model.safetensors"], ["LoRA adapter", "merge", "whole models"]),
    (["model.Q8_0.gguf"], ["GGUF", "model.Q8_0.gguf", "Hugging Face layout"])])
@pytest.mark.parametrize("has_config", [False, True])
def test_a_directory_in_another_format(tmp_path, names, words, has_config):
    write_files(tmp_path, dict.fromkeys([*names, *["config.json"] * has_config], {}))
    message = complaint(lambda: list(read_tensors(find_on_disk(str(tmp_path)))))
    assert message.startswith(str(tmp_path)) and all(word in message for word in words)


@pytest.mark.parametrize("name, kind, words", [
    ("https://huggingface.co/Qwen/Qwen3-0.6B", ValueError, "write the model's name, 'Qwen/Qwen3-0.6B'"),
    ("huggingface.co/Qwen/Qwen3-0.6B/tree/main", ValueError, "write the model's name, 'Qwen/Qwen3-0.6B'"),
    ("https://hf.co/Qwen/Qwen3-0.6B/tree/v1.2", ValueError, "'Qwen/Qwen3-0.6B' and the revision 'v1.2'"),
    ("https://example.org/model.safetensors", ValueError, "is an address.*Qwen/Qwen3-0.6B"),
    ("llama3:8b", ValueError, "ollama.*meta-llama/Meta-Llama-3-8B-Instruct for llama3:8b"),
    ("library/qwen3:0.6b-q4_K_M", ValueError, "ollama.*Qwen/Qwen3-0.6B"),
    ("model.gguf", ValueError, r"is in GGUF format \(model.gguf\)"),
    ("MODEL.GGUF", ValueError, r"is in GGUF format \(MODEL.GGUF\)"),
    ("model.safetensors", FileNotFoundError, "is a file; pass the directory"),
    ("empty", FileNotFoundError, "holds no config.json"),
    *((name, FileNotFoundError, "is neither a directory nor bundled.*Qwen/Qwen3-0.6B")
      for name in ("n" * 300, "n/" * 3000, "org/" + "n" * 10_000, "\0", "\ud800", "./x", "../x", "/x", "~/x", "x/",
                   "a/b/c", "a--b/c", "a..b", ".x", "x.", "a b", "C:\\x", "x" * 97, Path("org/model")))],
    ids=lambda name: ascii(name)[:50])
def test_names_of_no_checkpoint(tmp_path, monkeypatch, name, kind, words):
    monkeypatch.chdir(tmp_path)
    for file in ("model.gguf", "MODEL.GGUF", "model.safetensors"):
        Path(file).write_bytes(b"GGUF")
    Path("empty").mkdir()
    message = complaint(find_on_disk, name, kind=kind)
    assert re.search(words, message) and len(message) < 500 and (
        name == "empty" or message.startswith(f"model {name!r:.200}"))


@pytest.mark.parametrize("text, problem", [
    ('{"model_type": ', "not valid JSON"), ("", "not valid JSON"), ("\xff", "not valid JSON"),
    pytest.param("[" * 100_000, "not valid JSON", id="deep"), ("[1]", "expected a JSON object, found a list"),
    (LFS_POINTER.decode(), "git-lfs pointer")])
def test_broken_config_is_an_error(tmp_path, text, problem):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "name": "\u00e9"}', encoding="utf-8")
    assert read_config(tmp_path) == {"model_type": "gpt2", "name": "\u00e9"}
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    message = complaint(read_config, tmp_path)
    assert problem in message and str(tmp_path / "config.json") in message


@pytest.mark.parametrize("config, generation, expected", [
    ({"eos_token_id": 2}, None, {2}), ({"eos_token_id": None}, None, set()), ({}, {}, set()),
    ({"eos_token_id": 2}, {"eos_token_id": [5, 7]}, {2, 5, 7}), ({"eos_token_id": [2, 5]}, {"eos_token_id": 2}, {2, 5}),
    ({"text_config": {"eos_token_id": [1, 106]}}, None, {1, 106}),  # as transformers 5 saves Gemma 3
    ({"eos_token_id": 1, "text_config": {"eos_token_id": 2}}, {"eos_token_id": 3}, {1, 2, 3}),
    ({"text_config": None}, {}, set()), ({"text_config": {"eos_token_id": "2"}}, None, None),
    ({}, {"eos_token_id": 0}, {0}), *(({}, {"eos_token_id": value}, None) for value in ("2", [2, None], True, 2.0))])
def test_every_eos_token_counts(tmp_path, config, generation, expected):
    generation = {} if generation is None else {"generation_config.json": generation}
    write_files(tmp_path, {"config.json": config} | generation)
    if expected is not None:
        assert eos_token_ids(tmp_path) == expected
    else:
        message = complaint(eos_token_ids, tmp_path)
        assert re.search("(generation_config.json|text_config): eos_token_id is .*expected an integer", message)


UNREAD = "config.json has settings .*: max_length, no_repeat_ngram_size$"
SETTINGS = dict(repetition_penalty=1.5, min_new_tokens=3, max_length=64, no_repeat_ngram_size=3, num_beams=1)


@pytest.mark.parametrize("config, generation, expected, unread", [
    ({}, SETTINGS, SETTINGS, f"^generation_{UNREAD}"),
    (SETTINGS | dict(vocab_size=9, top_k=None), None, SETTINGS, f"^{UNREAD}"),
    (SETTINGS, {}, {}, None), ({}, None, {}, None),
    (dict(top_k=5, text_config=dict(top_k=6, top_p=0.5)), None, dict(top_k=5, top_p=0.5), None),
    ({}, dict(max_length=20, min_length=0, typical_p=1.0, guidance_scale=None), ..., None),  # which ask for nothing
    ({}, dict(max_length=64, max_new_tokens=9), ..., None),
    ({}, dict(begin_suppress_tokens=[5], num_beams=4, min_length=2, forced_eos_token_id=0, typical_p=0.9), ...,
     "min_length, num_beams, typical_p, forced_eos_token_id, begin_suppress_tokens$")])
@pytest.mark.filterwarnings("error")
def test_recommended_settings(tmp_path, config, generation, expected, unread):
    """As in transformers, config.json counts without a generation_config.json."""
    write_files(tmp_path, {"config.json": config} | ({"generation_config.json": generation} if generation is not None
                                                     else {}))
    with pytest.warns(UserWarning, match=unread) if unread else nullcontext():
        assert recommended_settings(tmp_path) == (generation if expected is ... else expected)


# Reading weights

@pytest.mark.parametrize("pad", range(8))
def test_reads_every_dtype_at_every_alignment(tmp_path, pad):
    """Aligned tensors are views of one mapping, and each of the others is a copy of its own bytes. Writing to a tensor
    leaves the file alone, and a tensor outlives the file's name."""
    torch.manual_seed(0)
    file, tensors = tmp_path / "model.safetensors", {
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8), "scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3)}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * dtype.itemsize,)).to(torch.uint8)
        tensors[name] = raw.view(dtype).reshape(2, 3)
    write_safetensors(file, tensors, pad)
    read = [tensor.reshape(-1).view(torch.uint8).zero_() for _, tensor in read_tensors(tmp_path)]
    num_copies = sum(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in read)
    assert len({tensor.untyped_storage().data_ptr() for tensor in read}) == num_copies + 1
    found = dict(read_tensors(tmp_path))
    file.rename(tmp_path / "elsewhere")
    assert_same(found, tensors)


@pytest.mark.parametrize("kind, index", [
    ("safetensors", "model.safetensors.index.json"), ("bin", "pytorch_model.bin.index.json")])
def test_reads_shards_in_their_mapped_files_one_at_a_time(tmp_path, kind, index):
    """Reading takes no memory of its own. Two shards are mapped at most: the loop still holds a tensor of the first."""
    write, found = write_safetensors if kind == "safetensors" else lambda path, tensors: torch.save(tensors, path), {}
    tensors = {f"{i}.{j}": torch.full([1 << 10], 4 * i + j) for i in range(3) for j in range(4)}
    files = {name: f"shard-{name[0]}.{kind}" for name in tensors}
    for file in set(files.values()):
        write(tmp_path / file, {name: tensor for name, tensor in tensors.items() if files[name] == file}
              | {"unlisted": torch.zeros(1)})
    write_index(tmp_path / index, files)
    for name, tensor in read_tensors(tmp_path):
        found[name] = tensor.clone()
        if sys.platform == "linux":
            maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
            places = {path: range(*(int(end, 16) for end in place.split("-"))) for place, *_, path in maps}
            assert len(places) <= 2 and tensor.data_ptr() in places[str(tmp_path / files[name])]
    assert_same(found, tensors)


@pytest.mark.parametrize("zipped", [True, False])
def test_reads_bin(tmp_path, zipped):
    tensors = SAMPLE | {"tied": SAMPLE["a"]}
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert_same(read_tensors(tmp_path), tensors)


def test_prefers_safetensors_and_ignores_other_files(tmp_path):
    torch.save({"old": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    write_safetensors(tmp_path / "model.safetensors", SAMPLE)
    write_safetensors(tmp_path / "consolidated.00.safetensors", {"other": torch.zeros(1)})
    write_safetensors(tmp_path / "adapter_model.safetensors", {"lora": torch.zeros(1)})
    assert_same(read_tensors(tmp_path), SAMPLE)


def test_reads_what_the_package_safetensors_reads():
    safetensors = pytest.importorskip("safetensors.torch")
    for file in sorted(GOLDEN.glob("*/model.safetensors")):
        assert_same(read_tensors(file.parent), safetensors.load_file(file))


# What is said of bad files

def test_no_weights(tmp_path):
    message = read_error(tmp_path, FileNotFoundError)
    assert message.endswith("looked for model.safetensors, model.safetensors.index.json, pytorch_model.bin, "
                            "pytorch_model.bin.index.json")
    (tmp_path / "consolidated.00.safetensors").write_text("")
    assert "(not read: consolidated.00.safetensors)" in read_error(tmp_path, FileNotFoundError)


@pytest.mark.parametrize("change, problem", [
    (lambda whole: whole[:-5], "is truncated: expected 216 bytes according to its header, found 211"),
    (lambda whole: whole + b"123", "stray bytes at its end: expected 216 bytes according to its header, found 219"),
    (lambda whole: whole[:20], "truncated: its header takes"),
    (lambda whole: whole[:5], "(5 bytes) is not a safetensors file"),
    (lambda whole: b"", "(0 bytes) is not a safetensors file"),
    (lambda whole: b"<!DOCTYPE html><html>not found</html>", "is not a safetensors file"),
    *((lambda whole, text=text: len(text).to_bytes(8, "little") + text, problem) for text, problem in (
        (b"{'a':", "header is not JSON"), (b"\xff\xfe", "header is not JSON"), (b"[]", "header is a JSON list"),
        (b"[" * 100_000, "header is not JSON"))),
    (lambda whole: LFS_POINTER, "git-lfs pointer")])
def test_not_a_safetensors_file(tmp_path, change, problem):
    file = tmp_path / "model.safetensors"
    write_safetensors(file, SAMPLE)
    file.write_bytes(change(file.read_bytes()))
    assert problem in read_error(tmp_path)


@pytest.mark.parametrize("change, problem", [
    ({"data_offsets": [0, 2400]}, "takes 24 bytes, but its data_offsets 0..2400 hold 2,400"),
    ({"data_offsets": [24, 0]}, "hold -24"),
    ({"data_offsets": [1 << 40, (1 << 40) + 24]}, "is truncated: expected 1,099,"),
    ({"data_offsets": [-24, 0]}, "tensor 'a' has a malformed header entry"),
    ({"data_offsets": [0]}, "malformed"), ({"shape": "23"}, "malformed"), ({"dtype": ["F32"]}, "malformed"),
    ({"shape": [2, 4]}, "tensor 'a' of shape [2, 4] and dtype F32 takes 32 bytes"),
    ({"dtype": "F4"}, "tensor 'a' has the unknown dtype 'F4'; expected one of F64, F32"),
    *(({"shape": shape, "data_offsets": [0, 0]}, "tensor 'a' has a malformed header entry")
      for shape in ([0, 2**70], [0, 2**40, 2**40], [2**62] * 64)),
    ({"data_offsets": [0, 10**400]}, "malformed"), ({"shape": ...}, "malformed"), ([], "malformed")],
    ids=lambda value: repr(value)[:60])
def test_bad_header_entries(tmp_path, change, problem):
    if isinstance(change, dict):  # ... deletes
        change = {key: value for key, value in (entry(SAMPLE["a"], 0) | change).items() if value is not ...}
    write_safetensors(tmp_path / "model.safetensors", {"a": SAMPLE["a"]}, header={"a": change})
    assert problem in read_error(tmp_path)


def test_missing_shard(tmp_path):
    write_safetensors(tmp_path / "1.safetensors", {"a": SAMPLE["a"]})
    write_index(tmp_path / "model.safetensors.index.json", {"a": "1.safetensors", "b": "2.safetensors"})
    with pytest.raises(FileNotFoundError, match="1 of 2 shards .* missing, the first is 2.safetensors"):
        next(read_tensors(tmp_path))    # said before the first tensor, not after half the model
    write_index(tmp_path / "model.safetensors.index.json", {"a": "1.safetensors", "b": "1.safetensors"})
    assert "1.safetensors lacks 'b', which model.safetensors.index.json places there" in read_error(tmp_path)


@pytest.mark.parametrize("text, problem", [
    ("{", "not valid JSON"), ("{}", 'expected a "weight_map"'), ('{"weight_map": {"a": 1}}', 'expected a "weight_map"'),
    *((json.dumps({"weight_map": {"a": shard}}), f"names a shard outside of its directory, {shard!r:.80}")
      for shard in ("../1.safetensors", "/1.safetensors", "a/../../1.safetensors", "n" * 256, "\ud800"))],
    ids=lambda text: ascii(text)[:40])
def test_broken_index(tmp_path, text, problem):
    write_safetensors(tmp_path / "1.safetensors", SAMPLE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors.index.json").write_text(text)
    assert problem in read_error(tmp_path / "model")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read")
def test_a_file_that_cannot_be_read(tmp_path, name):
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match=f"{name} cannot be read .Input/output error.; pass a checkpoint"):
        read_config(tmp_path) if name == "config.json" else list(read_tensors(tmp_path))


class Code:
    def __reduce__(self):
        return print, ("code in a checkpoint was run",)


def test_bin_that_cannot_be_loaded(tmp_path, capsys):
    file, damaged = tmp_path / "pytorch_model.bin", "cannot be loaded: it is damaged or holds more than tensors"
    torch.save({"a": Code()}, file)
    whole = file.read_bytes()
    for contents, problem in (
            (whole, damaged), (pickle.dumps({"a": Code()}, protocol=2), damaged), (whole[:len(whole) // 2], damaged),
            (b"", damaged), (b"not a pickle", damaged), (LFS_POINTER, "is a git-lfs pointer, not the file; run `git")):
        file.write_bytes(contents)
        assert f"pytorch_model.bin {problem}" in read_error(tmp_path)
    assert "code in a checkpoint" not in capsys.readouterr().out


@pytest.mark.parametrize("value", [
    [torch.zeros(1)], {"model": {"a": torch.zeros(1)}}, {"a": 1}, {1: torch.zeros(1)}, {b"a": torch.zeros(1)},
    {"a": torch.zeros(1, device="meta")}, {"a": torch.eye(2).to_sparse()}], ids=lambda value: repr(value)[:60])
def test_bin_of_another_kind(tmp_path, value):
    torch.save(value, tmp_path / "pytorch_model.bin")
    assert "expected a dict of names to tensors" in read_error(tmp_path)
