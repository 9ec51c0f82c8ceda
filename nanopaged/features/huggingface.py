r"""Tokenizers that tiktoken cannot express, on the optional package `tokenizers`.

Some are byte-level but cut a text in several steps (DeepSeek LLM's) or normalize it. The others are the
SentencePiece-like tokenizers of Llama 2 and Mistral, Unigram and WordPiece, whose decoders work on whole texts, so
streaming needs a detokenizer of its own. Grammars and log probabilities need the bytes of single tokens. The decoder in
tokenizer.json says how tokens spell them:

    ByteLevel             GPT-2's characters for bytes               \u0120tell     " tell"
    Replace, Metaspace    a character for a space                    \u2581tell     " tell"
    ByteFallback          a number for a byte                        <0x0A>         "\n"
    WordPiece             a prefix for what continues a word         tell, ##ing    " tell", "ing"
    BPEDecoder            a suffix for the end of a word             tell</w>       "tell "
"""
import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import groupby
from os.path import commonprefix
from pathlib import Path
from typing import Any

from nanopaged.text.byte_level import ADDED_TOKEN, Detokenizer, Tokenizer, bytes_of, check_text, rust_errors


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer of a tokenizer.json at `path`. Raises ImportError if the package `tokenizers` is missing."""

    def __init__(self, path: Path, spec: dict[str, Any], config: dict[str, Any]):
        import tokenizers

        self._read_tokens(spec, config)
        # A merge without the prefix ends the process: the package cuts the prefix off without looking.
        prefix = spec["model"].get("continuing_subword_prefix") or ""
        for pair in spec["model"].get("merges", []) if prefix else []:
            second = pair.rpartition(" ")[2] if isinstance(pair, str) else pair[-1]
            if not second.startswith(prefix):
                raise ValueError(f"the merge {pair!r:.80} lacks the continuing_subword_prefix {prefix!r:.80}")
        with rust_errors("the package tokenizers cannot read it"):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        self._tokenizer.add_tokens([
            tokenizers.AddedToken(token["content"], **{flag: token[flag] for flag in ADDED_TOKEN})
            for token in spec["added_tokens"] if token["content"] not in known])
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._decoders = _steps_of(spec.get("decoder") or {})
        self._is_byte_level = any(step["type"] == "ByteLevel" for step in self._decoders)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_text(text)
        with rust_errors("the package tokenizers cannot encode this text"):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        with rust_errors("the package tokenizers cannot decode these ids"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        return {i: self._bytes_of(token) for token, i in self.tokens.items()}

    def _bytes_of(self, token: str) -> bytes:
        """What the token adds in the middle of a text."""
        for step in self._decoders:
            match step:
                case {"type": "ByteLevel"}:
                    return bytes_of(token)
                case {"type": "ByteFallback"} if byte := _byte_of(token):
                    return byte
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    token = token.replace(old, new)
                case {"type": "Metaspace", "replacement": mark}:
                    token = token.replace(mark, " ")
                case {"type": "WordPiece", "prefix": prefix}:
                    token = token[len(prefix):] if token.startswith(prefix) else " " + token
                case {"type": "BPEDecoder", "suffix": suffix}:
                    token = token.replace(suffix, " ")
        return token.encode()

    @cached_property
    def _byte_tokens(self) -> dict[int, bytes]:
        """The tokens that stand for one byte in a run of such tokens."""
        has_them = any(step["type"] == "ByteFallback" for step in self._decoders)
        return {i: byte for token, i in self.tokens.items() if (byte := _byte_of(token))} if has_them else {}

    def detokenizer(self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        if self._is_byte_level:
            return super().detokenizer(skip_special_tokens, prompt_token_ids)
        skipped = self._special if skip_special_tokens else set()
        return _PrefixDetokenizer(self.decode, self._tokenizer.id_to_token, self._byte_tokens, skipped,
                                  prompt_token_ids)


class _PrefixDetokenizer(Detokenizer):
    """A Detokenizer for decoders whose text depends on earlier ids: it decodes new ids behind a prefix of old ones.

    Llama 2's decoder, for example, strips the space at the beginning of a text. So the first generated ids are decoded
    behind the last ids of the prompt, and later ids behind the ids shown last.

    A run of byte tokens is text as far as it is valid UTF-8; each byte from there to its end becomes U+FFFD. (`decode`
    knows the whole run, and turns all of its bytes into U+FFFD if one of them is wrong. A stream cannot take back what
    it has shown.)
    """

    def __init__(self, decode: Callable[[list[int]], str], id_to_token: Callable[[int], str | None],
                 byte_tokens: dict[int, bytes], skipped: set[int], prompt_token_ids: Sequence[int]):
        self._decode, self._id_to_token = decode, id_to_token
        self._byte_tokens, self._skipped = byte_tokens, skipped
        self._prefix: list[int] = []
        run: list[int] = []  # of byte tokens, at the end of the prompt
        for token_id in filter(self._is_visible, reversed(prompt_token_ids)):
            is_byte = token_id in byte_tokens
            (run if is_byte and not self._prefix else self._prefix).append(token_id)
            if len(self._prefix) > 3 and not is_byte:
                break
        run, self._prefix = run[::-1], (run + self._prefix)[::-1]
        self._utf8, self._is_broken = codecs.getincrementaldecoder("utf-8")(), False
        try:
            self._utf8.decode(b"".join(byte_tokens[token_id] for token_id in run))
        except UnicodeDecodeError:
            self._is_broken = True  # until the run of byte tokens ends
        # The byte tokens of an unfinished character. The prompt's text has U+FFFD for the first _num_told of them.
        self._num_told = 0 if self._is_broken else len(self._utf8.getstate()[0])
        self._begun = self._prefix[len(self._prefix) - self._num_told:]
        del self._prefix[len(self._prefix) - self._num_told:]

    def add(self, ids: Iterable[int]) -> str:
        text = ""
        for are_bytes, group in groupby(filter(self._is_visible, ids), self._byte_tokens.__contains__):
            text += "".join(map(self._add_byte, group)) if are_bytes else self.finish() + self._show([*group])
        return text

    def finish(self) -> str:
        """End a run of byte tokens."""
        self._utf8.reset()
        self._is_broken = False
        return self._give_up()

    def _add_byte(self, token_id: int) -> str:
        self._begun.append(token_id)
        try:
            if not self._is_broken:
                is_whole = self._utf8.decode(self._byte_tokens[token_id])
                return self._show(self._begun) if is_whole else ""
        except UnicodeDecodeError:
            self._is_broken = True
        return self._give_up()

    def _give_up(self) -> str:
        """U+FFFD for each byte of a character that will never be whole."""
        text = "\ufffd" * (len(self._begun) - self._num_told)
        self._prefix, self._begun, self._num_told = self._begun or self._prefix, [], 0
        return text

    def _show(self, ids: list[int]) -> str:
        shown, text = self._decode(self._prefix) + "\ufffd" * self._num_told, self._decode(self._prefix + ids)
        # The prefix must have some text: otherwise a decoder that strips a leading space strips it from the next ids.
        self._prefix = ids if self._decode(ids) else self._prefix + ids
        self._begun, self._num_told = [], 0
        return text[len(commonprefix([shown, text])):]

    def _is_visible(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._id_to_token(token_id) is not None


def _steps_of(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a decoder of tokenizer.json, one after another."""
    if decoder.get("type") != "Sequence":
        return [decoder] if decoder else []
    return [step for part in decoder["decoders"] for step in _steps_of(part)]


def _byte_of(token: str) -> bytes | None:
    """The byte of a token such as <0x0A>."""
    match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    return match and bytes.fromhex(match[1])
