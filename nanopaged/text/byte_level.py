r"""Byte-level BPE on tiktoken, with the token ids of Hugging Face `tokenizers`.

Byte-level BPE is the tokenizer of GPT-2, OPT, Llama 3, SmolLM2 and Qwen. Encoding takes four steps:

    "Hi<|end|> there"   the added tokens are cut out        "Hi"  <|end|>  " there"
    text segments       are normalized (not at all, or NFC) and cut into pieces by a regex
    a piece             becomes one symbol per UTF-8 byte; listed pairs of symbols are merged
    a symbol            is a token id

The list of merges names pairs of symbols in the order in which training found them. Encoding joins the adjacent pair
that comes first in this list, and repeats that until no adjacent pair is listed. Each remaining symbol is a token
(Sennrich et al. 2016):

    merges: ("h", "e"), ("l", "l"), ("he", "ll")        h e l l o  ->  he l l o  ->  he ll o  ->  hell o

tiktoken cuts and merges fast, but follows another rule. It joins *any* adjacent pair whose bytes together are a token,
lowest rank first, and it takes a whole piece that is a token without any merge. `tiktoken_ranks` finds ranks for which
both rules give the same tokens. `merge` applies the list itself, more slowly, for the rare vocabulary that has no such
ranks, and for bytes that are not in the vocabulary. A tokenizer of another kind raises NotByteLevel.
"""
import codecs
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import regex
import tiktoken

ADDED_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
               "special": False}  # default flags
GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Unicode White_Space. Python's \s and str.strip() include U+001C..1F, which the regexes of tokenizers do not.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_BYTES_OF_UTF8 = {*range(0xC0), *range(0xC2, 0xF5)}
MOST_IDS = 2**24  # of a vocabulary; the largest have 2^18
_MAX_TIKTOKEN_TEXT = 400_000  # characters: tiktoken's regex panics on somewhat less than a million spaces in a row

# GPT-2 writes each byte as one printable character: the byte's own character if printable, else one from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF = {chr(b): b for b in _PRINTABLE}
BYTE_OF |= {chr(0x100 + i): b for i, b in enumerate(b for b in range(256) if b not in _PRINTABLE)}
CHAR_OF = {b: c for c, b in BYTE_OF.items()}
NO_RANK = 1 << 32

Merges = dict[tuple[str, str], int]  # pair of symbols -> its place in the list of merges


class NotByteLevel(Exception):
    """The reason why tiktoken cannot express a tokenizer.json, as the end of a sentence that starts with "it has"."""


class Tokenizer:
    """A byte-level BPE tokenizer; `load_tokenizer` in nanopaged/text/tokenizer.py makes it from a checkpoint.

    spec, config: the contents of tokenizer.json and of tokenizer_config.json
    tokens: every token's id, with those of added tokens; vocab_size: all ids are below it
    bos_token_id, eos_token_id: None if the tokenizer has no such token
    """

    def __init__(self, spec: dict[str, Any], config: dict[str, Any]):
        self._read_tokens(spec, config)
        _check_byte_level(spec)
        self._normalize: Callable[[str], str] = partial(unicodedata.normalize, "NFC") if spec.get("normalizer") else str
        self._split, self._add_prefix_space = _split_pattern(spec.get("pre_tokenizer"))
        self._before, self._after = _template_ids(spec.get("post_processor"))
        # Two passes: the normalized text between the other added tokens is searched for tokens marked "normalized".
        added = spec["added_tokens"]
        normalized = {self._normalize(token["content"]): token for token in added if token["normalized"]}
        self._added_normalized = _AddedTokens(normalized)
        self._added = _AddedTokens({token["content"]: token for token in added if not token["normalized"]})
        self._token_bytes = {i: bytes_of(token) for token, i in self.tokens.items()}
        self._token_bytes |= {token["id"]: bytes_of(text) for text, token in normalized.items()}
        self._special = {token["id"] for token in added if token["special"]}
        self._vocab: dict[str, int] = spec["model"]["vocab"]
        self._ignore_merges = bool(spec["model"].get("ignore_merges"))
        pairs: Any = (tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in spec["model"]["merges"])
        self._merges: Merges = {pair: rank for rank, pair in enumerate(pairs)}  # a pair listed twice: later rank
        self._missing_bytes = {b for b in _BYTES_OF_UTF8 if CHAR_OF[b] not in self._vocab}
        if spec["model"].get("unk_token") is not None and self._missing_bytes:
            raise NotByteLevel("an unknown token in place of missing bytes")
        self._encoding = None
        if ranks := tiktoken_ranks(self._vocab, self._merges, self._ignore_merges):
            self._id_of_rank = {rank: self._vocab.get(token) for token, rank in ranks.items()}  # ids follow no order
            byte_ranks = {bytes_of(token): rank for token, rank in ranks.items()}
            try:
                with rust_errors("tiktoken cannot read it"):
                    self._encoding = tiktoken.Encoding("nanopaged", pat_str=self._split, mergeable_ranks=byte_ranks,
                                                       special_tokens={})
            except ValueError as error:
                raise NotByteLevel("a split regex that it cannot parse") from error

    def _read_tokens(self, spec: dict[str, Any], config: dict[str, Any]) -> None:
        vocab = spec["model"]["vocab"]
        if not isinstance(vocab, dict):
            vocab = {token: i for i, (token, _) in enumerate(vocab)}
        self.tokens: dict[str, int] = vocab | {token["content"]: token["id"] for token in spec["added_tokens"]}
        _check_ids(self.tokens.values())
        self.vocab_size = max(self.tokens.values(), default=-1) + 1
        # GPT-2's files name neither these tokens nor their class. "<|endoftext|>" is the default of that class alone.
        is_gpt2 = (config.get("tokenizer_class") or "GPT2Tokenizer") in GPT2_CLASSES
        default: Any = "<|endoftext|>" if is_gpt2 else None
        self.bos_token_id = self.tokens.get(config.get("bos_token", default))
        self.eos_token_id = self.tokens.get(config.get("eos_token", default))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`. Added tokens in the text are recognised.

        add_special_tokens: also add the tokens that the model expects around a text (Llama 3's BOS)
        """
        check_text(text)
        ids = self._added.encode(text, self._encode_segment)
        return self._before + ids + self._after if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`. Bytes that form no character become U+FFFD; unknown ids become nothing."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.add(ids) + detokenizer.finish()

    def detokenizer(self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()) -> "Detokenizer":
        """A stream from ids to text for one sequence. It yields the text that the ids add to the prompt's text."""
        return Detokenizer(self._token_bytes, self._special if skip_special_tokens else set(), prompt_token_ids)

    def token_bytes(self) -> list[bytes]:
        """The bytes of each id, for grammars; none where no token has the id."""
        return [self._token_bytes.get(token, b"") for token in range(self.vocab_size)]

    def special_token_ids(self) -> set[int]:
        return self._special

    def _encode_segment(self, text: str) -> list[int]:
        return self._added_normalized.encode(self._normalize(text), self._encode_ordinary)

    def _encode_ordinary(self, text: str) -> list[int]:
        """The ids of a segment without added tokens."""
        if text and self._add_prefix_space and not text.startswith(" "):
            text = " " + text
        if self._encoding and len(text) < _MAX_TIKTOKEN_TEXT and self._missing_bytes.isdisjoint(text.encode()):
            with rust_errors("the tokenizer's split regex cannot cut this text"):
                return [self._id_of_rank[rank] for rank in self._encoding.encode_ordinary(text)]
        # tiktoken does not expose its pieces. `regex` cuts in the same way, except at characters that only its newer
        # Unicode tables know.
        pattern = self._split.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")
        try:
            seconds = 10 + len(text) / 50_000  # ten times what it takes
            pieces = regex.findall(pattern, text, concurrent=True, timeout=seconds)  # other threads go on
        except (TimeoutError, MemoryError):
            raise ValueError("the tokenizer's split regex cannot cut this text: it tries too many ways") from None
        known = {piece: self._encode_piece(piece) for piece in set(pieces)}
        return [i for piece in pieces for i in known[piece]]

    def _encode_piece(self, piece: str) -> list[int]:
        """The ids of one piece. Bytes outside of the vocabulary (SmolLM2 lacks some) are dropped before the merges."""
        if self._encoding and self._missing_bytes.isdisjoint(piece.encode()):
            return [self._id_of_rank[rank] for rank in self._encoding._encode_single_piece(piece)]
        chars = "".join(CHAR_OF[b] for b in piece.encode())
        if self._ignore_merges and chars in self._vocab:
            return [self._vocab[chars]]
        symbols, _ = merge([char for char in chars if char in self._vocab], self._merges)
        return [self._vocab[symbol] for symbol in symbols]


class Detokenizer:
    """A stream from ids to text. The deltas join to the text that `decode` adds after the prompt; none ends inside a
    character."""

    def __init__(self, token_bytes: dict[int, bytes], skipped: set[int], prompt_token_ids: Sequence[int]):
        self._token_bytes, self._skipped = token_bytes, skipped
        self._decoder, self._is_told = codecs.getincrementaldecoder("utf-8")("replace"), False
        # The prompt may end inside a character, at most three bytes into it. The stream then completes the character.
        # If it does not, the prompt's text has the U+FFFD of these bytes.
        self.add(prompt_token_ids[-3:])
        self._is_told = bool(self._decoder.getstate()[0])

    def add(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete. Bytes of an incomplete character wait for the next call."""
        return self._text_of(b"".join(self._token_bytes.get(i, b"") for i in ids if i not in self._skipped))

    def finish(self) -> str:
        """The rest of the text: U+FFFD for bytes of a character that was never completed."""
        return self._text_of(b"", final=True)

    def _text_of(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if text and self._is_told:
            text, self._is_told = text.removeprefix("\ufffd"), False
        return text


class _AddedTokens:
    """Finds added tokens in a text: the leftmost one, and of those that start at the same place the longest."""

    def __init__(self, tokens: dict[str, dict[str, Any]]):
        self._tokens = {text: (token["id"], token["lstrip"], token["rstrip"]) for text, token in tokens.items()}
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")  # (?!) matches nothing

    def encode(self, text: str, encode_between: Callable[[str], list[int]]) -> list[int]:
        """The ids of the added tokens in `text`, and those that `encode_between` gives for the text between them."""
        ids: list[int] = []
        end = 0
        for match in self._pattern.finditer(text):
            token_id, lstrip, rstrip = self._tokens[match[0]]
            between = text[end:match.start()]
            ids += encode_between(between.rstrip(_WHITE_SPACE) if lstrip else between)
            ids.append(token_id)
            end = match.end()
            if rstrip:
                end = len(text) - len(text[end:].lstrip(_WHITE_SPACE))
        return ids + encode_between(text[end:])


@contextmanager
def rust_errors(problem: str) -> Iterator[None]:
    """tiktoken and tokenizers are written in Rust. Their errors are plain Exceptions, and a panic there is a
    BaseException, which callers that handle errors let through: all become a ValueError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{problem} ({error!s:.200})") from None


def check_text(text: str) -> None:
    """Raise ValueError if the text has a lone surrogate, which no encoding of UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text has a lone surrogate (U+{ord(text[error.start]):04X}) at position {error.start}, half "
                         "of a character; decode its source with errors='replace'") from None


def _check_ids(ids: Iterable[Any]) -> None:
    if wrong := [i for i in ids if type(i) is not int or not 0 <= i < MOST_IDS]:
        raise ValueError(f"a token has the id {wrong[0]!r:.80}, and ids are integers from 0 to {MOST_IDS - 1}")


def _check_byte_level(spec: dict[str, Any]) -> None:
    model, normalizer, decoder = (spec.get(key) or {} for key in ("model", "normalizer", "decoder"))
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise NotByteLevel(f"a {model.get('type')} model")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise NotByteLevel(f"a BPE model with {key}")
    if decoder.get("type") != "ByteLevel":
        raise NotByteLevel(f"a {decoder.get('type')} decoder")
    if normalizer and normalizer["type"] != "NFC":
        raise NotByteLevel(f"a {normalizer['type']} normalizer")
    if any(token["single_word"] for token in spec["added_tokens"]):
        raise NotByteLevel("an added token with single_word")


def _split_pattern(pre_tokenizer: dict[str, Any] | None) -> tuple[str, bool]:
    """The regex whose matches are the pieces, and whether a segment gets a leading space if it has none."""
    stages = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    kinds = [stage.get("type") for stage in stages]
    first, last = stages[0], stages[-1]
    prefix = last.get("add_prefix_space", False)
    use_regex = last.get("use_regex", True)
    if kinds == ["ByteLevel"]:
        return (_GPT2_SPLIT if use_regex else r"[\s\S]+"), prefix
    if kinds == ["Digits", "ByteLevel"] and use_regex and not prefix:
        digits = r"\p{N}" if first["individual_digits"] else r"\p{N}+"
        # GPT-2's split sees each stretch between digits alone, so a digit ends the text for `\s+(?!\S)`.
        return _GPT2_SPLIT.replace(r" ?\p{N}+", digits).replace(r"(?!\S)", r"(?![^\s\p{N}])"), False
    if kinds == ["Split", "ByteLevel"] and not use_regex and not prefix:
        if first["behavior"] == "Isolated" and not first.get("invert"):
            pattern = first["pattern"].get("Regex") or re.escape(first["pattern"]["String"])
            if "(?R" in pattern:  # tiktoken panics on it
                raise NotByteLevel("a split regex that calls itself, with (?R)")
            return rf"{pattern}|(?:(?!{pattern})[\s\S])+", False  # the text between two matches is a piece too
    raise NotByteLevel(f"a pre-tokenizer of another form ({', '.join(map(str, kinds))})")


def _template_ids(post_processor: dict[str, Any] | None) -> tuple[list[int], list[int]]:
    """The ids that the model expects in front of a text, and those behind it."""
    before: list[int] = []
    after: list[int] = []
    for stage in (post_processor or {}).get("processors", [post_processor] if post_processor else []):
        if stage["type"] == "TemplateProcessing":
            parts: Any = [stage["special_tokens"][part["SpecialToken"]["id"]]["ids"] if "SpecialToken" in part else None
                          for part in stage["single"]]
            middle = parts.index(None)  # the text itself
            before, after = sum(parts[:middle], []) + before, sum(parts[middle + 1:], after)
        elif stage["type"] != "ByteLevel":  # ByteLevel moves offsets only
            raise NotByteLevel(f"a {stage['type']} post-processor")
    _check_ids(before + after)
    return before, after


# --------------------------------------------------------------------------------------------------
# Byte pair encoding
# --------------------------------------------------------------------------------------------------

def bytes_of(token: str) -> bytes:
    """The bytes of a token of tokenizer.json. A token outside of GPT-2's byte characters stands for its own UTF-8."""
    if all(char in BYTE_OF for char in token):
        return bytes(BYTE_OF[char] for char in token)
    return token.encode()


def merge(symbols: list[str], merges: Merges) -> tuple[list[str], int]:
    """Join listed pairs until none is left. Returns the remaining symbols and the rank of the last merge."""
    ranks = [merges.get(pair, NO_RANK) for pair in zip(symbols, symbols[1:])]
    last = NO_RANK
    while ranks and (lowest := min(ranks)) < NO_RANK:
        i = ranks.index(lowest)
        last = lowest
        symbols[i:i + 2] = [symbols[i] + symbols[i + 1]]
        del ranks[i]
        for j in (i - 1, i):
            if 0 <= j < len(ranks):
                ranks[j] = merges.get((symbols[j], symbols[j + 1]), NO_RANK)
    return symbols, last


def tiktoken_ranks(vocab: dict[str, int], merges: Merges, ignore_merges: bool) -> dict[str, int] | None:
    """Ranks with which tiktoken gives the tokens of `merge` for every text; None if no such ranks exist.

    Only a token t with merge(t) = [t] gets a rank: the rank of the last merge of that run.

    Proof. Run both rules on a piece up to the first step at which they differ. All merges so far are listed ones, so
    the merges inside the bytes of any single token t are the first merges of merge(t) run alone. Let the adjacent
    symbols c and d join to t. Then merge(t) alone also reaches [c, d]. If (c, d) is not listed, merge(t) stops there
    and t has no rank. If (c, d) is listed, merge(t) ends in [t]. So each adjacent pair that tiktoken would join is a
    listed pair with the same rank, and both rules choose the same pair, the leftmost one first.

    Training lists only pairs that its own run reaches, so a trained vocabulary has no other tokens. Vocabularies made
    in another way have some. Neither rule finds them, except that with `ignore_merges` (Llama 3) a whole piece may be
    one. tiktoken also looks for the whole piece first, so with `ignore_merges` such a token gets a rank after all
    merges. The exception is a token for which merge(t) leaves two symbols: tiktoken would join these two inside longer
    pieces as well, so a vocabulary with such a token has no ranks.
    """
    ranks = {char: b for b, char in CHAR_OF.items()}
    for token in vocab:
        if len(token) < 2 or not all(char in BYTE_OF and char in vocab for char in token):
            continue
        symbols, last = merge(list(token), merges)
        if len(symbols) == 1:
            ranks[token] = 256 + last
        elif ignore_merges and len(symbols) == 2:
            return None
        elif ignore_merges:
            ranks[token] = 256 + len(merges) + vocab[token]
    return ranks
