"""The tokenizer of a checkpoint: reads its files, and makes the Tokenizer that can run them.

Text becomes token ids and token ids become text with `Tokenizer`, a byte-level BPE on tiktoken
(nanopaged/text/byte_level.py). A tokenizer of another kind runs on the optional package `tokenizers`
(nanopaged/features/huggingface.py). None of these files knows about models or uses the network.
"""
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any

from nanopaged.inputs import read_json
from nanopaged.options import feature
from nanopaged.text.byte_level import ADDED_TOKEN, GPT2_CLASSES, NotByteLevel, Tokenizer


class _Unreadable(Exception):
    """Most of a sentence for the user. Any other error during loading means a damaged file."""


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the checkpoint directory `path`: its tokenizer.json, or GPT-2's pair vocab.json and merges.txt.
    ValueError, in one sentence, if there is none, or none that can be read."""
    path = Path(path)
    try:
        return _load(path)
    except _Unreadable as error:
        raise ValueError(f"{error}, or pass prompts as token ids") from None
    except Exception as error:  # KeyError, TypeError; the package `tokenizers` raises a plain Exception
        has_json = (path / "tokenizer.json").exists()
        files = "tokenizer_config.json or tokenizer.json" if has_json else "vocab.json or merges.txt"
        raise ValueError(f"{path} has a {files} that cannot be read ({type(error).__name__}: {error!s:.200}); fetch "
                         "the file again, or pass prompts as token ids") from None


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json and special_tokens_map.json of a directory, with each special token as its text.

    The files give a token as its text or as {"content": text, ...}, and a token that does not exist as null. As in
    transformers, a tokenizer_config.json with added_tokens_decoder is complete without special_tokens_map.json.
    """
    config = read_json(path / "tokenizer_config.json", {})
    if "added_tokens_decoder" not in config:
        config = config | read_json(path / "special_tokens_map.json", {})
    return config | {name: token["content"] for name, token in config.items()
                     if name.endswith("_token") and isinstance(token, dict) and "content" in token}


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Name of a special token -> its text."""
    return {name: token for name, token in config.items() if name.endswith("_token") and isinstance(token, str)}


def _load(path: Path) -> Tokenizer:
    config = _read(read_tokenizer_config, path)
    for key in ("bos_token", "eos_token"):
        if not isinstance(config.get(key), (str, NoneType)):
            raise _Unreadable(f"{path}: {key} in tokenizer_config.json or special_tokens_map.json is "
                              f"{config[key]!r:.80}, expected a text, null or {{\"content\": a text}}; fetch the file "
                              "again")
    if (path / "tokenizer.json").exists():
        spec = _read(read_json, path / "tokenizer.json")
        added = spec.get("added_tokens", [])
        known = {token["content"] for token in added}
        spec["added_tokens"] = added + [token for token in _tokens_of_config(config) if token["content"] not in known]
    elif (path / "vocab.json").exists() and (path / "merges.txt").exists():
        spec = _spec_of_vocab_and_merges(path, config)
    else:
        sentencepiece = (path / "tokenizer.model").exists()
        found = "only a SentencePiece tokenizer.model, which is not read here" if sentencepiece else "none of them"
        raise _Unreadable(f"looked in {path} for tokenizer.json, or vocab.json and merges.txt, and found {found}; add "
                          "a tokenizer.json (save_pretrained of a fast tokenizer writes one)")
    try:
        return Tokenizer(spec, config)
    except NotByteLevel as reason:
        huggingface = _read(feature, "huggingface", f"{path / 'tokenizer.json'}, which is not a byte-level BPE,")
        try:
            return huggingface.HuggingFaceTokenizer(path / "tokenizer.json", spec, config)
        except ImportError:
            raise _Unreadable(f"{path / 'tokenizer.json'} is not a byte-level BPE that tiktoken can run (it has "
                              f"{reason}); `pip install tokenizers` to read it") from None


def _read(read: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, one whose error is a sentence already."""
    try:
        return read(*args)
    except ValueError as error:
        raise _Unreadable(error) from None


def _tokens_of_config(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The added tokens of tokenizer_config.json, in the form of tokenizer.json."""
    return [ADDED_TOKEN | token | {"id": int(i)} for i, token in config.get("added_tokens_decoder", {}).items()]


def _spec_of_vocab_and_merges(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The two files of GPT-2 and OPT, vocab.json and merges.txt, in the form of a tokenizer.json."""
    if (kind := config.get("tokenizer_class") or "GPT2Tokenizer") not in GPT2_CLASSES:
        raise _Unreadable(f"{path} has the vocab.json and merges.txt of a {kind}, and without tokenizer.json only "
                          "those of a GPT2Tokenizer are understood; add tokenizer.json")
    vocab = _read(read_json, path / "vocab.json")
    lines = (path / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line.rstrip("\r") for line in lines if line.strip() and not line.startswith("#version")]
    special = {*special_tokens(config).values(), "<|endoftext|>"}
    ids = {token: vocab[token] for token in special & vocab.keys()} | _read(read_json, path / "added_tokens.json", {})
    added: dict[str, dict[str, Any]] = {
        token: ADDED_TOKEN | {"id": i, "content": token, "special": token in special} for token, i in ids.items()}
    added |= {token["content"]: token for token in _tokens_of_config(config)}
    template = None
    if config.get("add_bos_token"):  # OPT
        bos = config.get("bos_token", "<|endoftext|>")
        template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": bos}}, {"Sequence": {"id": "A"}}],
                    "special_tokens": {bos: {"ids": [added[bos]["id"]]}}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": config.get("add_prefix_space", False)}
    return {"model": {"vocab": vocab, "merges": merges}, "added_tokens": list(added.values()),
            "pre_tokenizer": byte_level, "decoder": byte_level, "post_processor": template}
