"""Tokenizers give, id for id and character for character, what Hugging Face `tokenizers` gives.

golden/tokenizers holds a small tokenizer of each family with what `tokenizers` made of hard texts (made by
golden/make_tokenizers.py).
"""
import importlib.util
import json
import random
import re
import sys
from functools import reduce
from operator import getitem
from os.path import commonprefix
from pathlib import Path

import pytest
import regex

from nanopaged import LLM, SamplingParams
from nanopaged.tests.helpers import GOLDEN, complaint, write_files
from nanopaged.text.tokenizer import Tokenizer, load_tokenizer

TOKENIZERS = GOLDEN / "tokenizers"
BYTE_LEVEL = ["gpt2", "opt", "llama3", "smollm2", "qwen", "flags"]
HAS_TOKENIZERS = importlib.util.find_spec("tokenizers") is not None
needs_tokenizers = pytest.mark.skipif(
    not HAS_TOKENIZERS, reason="what tiktoken cannot express is read with the package `tokenizers`, which is missing")
FAMILIES = [*BYTE_LEVEL, pytest.param("llama2", marks=needs_tokenizers)]


def expected(name: str) -> dict:
    return json.loads((TOKENIZERS / name / "expected.json").read_text(encoding="utf-8"))


def pieces(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool, rng: random.Random | None = None,
           prompt: list[int] = ()) -> list[str]:
    """What a detokenizer shows after the prompt, one id at a time or in random chunks (empty ones too)."""
    detokenizer, shown = tokenizer.detokenizer(skip_special_tokens, prompt), []
    while ids:
        n = rng.randrange(5) if rng else 1
        shown.append(detokenizer.add(ids[:n]))
        ids = ids[n:]
    return [*shown, detokenizer.finish()]


@pytest.mark.parametrize("name", FAMILIES)
def test_encode_and_decode_like_hugging_face(name):
    """Also random ids: they have broken UTF-8, special tokens inside characters, and ids that are no token."""
    tokenizer, golden = load_tokenizer(TOKENIZERS / name), expected(name)
    for text, ids, plain, *_ in golden["texts"]:
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode(text, add_special_tokens=False) == plain, text
        assert max(ids, default=0) < tokenizer.vocab_size
    for ids, decoded, with_special in [[row[1], *row[3:]] for row in golden["texts"]] + golden["random"]:
        assert tokenizer.decode(ids, skip_special_tokens=True) == decoded
        assert tokenizer.decode(ids) == with_special
    assert tokenizer.decode([]) == tokenizer.decode([10**9]) == ""


def decoded(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> str:
    """What `decode` gives. But a run of Llama 2's byte tokens is text as far as it is valid UTF-8, where `decode` turns
    all bytes of a broken run into U+FFFD: here a new text begins where such a run breaks."""
    special = tokenizer.special_token_ids() if skip_special_tokens else set()
    ids, token_bytes, starts, run = [i for i in ids if i not in special], tokenizer.token_bytes(), [0], b""
    for end, token in enumerate([*ids, None]):
        if token in getattr(tokenizer, "_byte_tokens", ()):
            run += token_bytes[token]
        elif token is None or token < tokenizer.vocab_size:  # others are nothing
            try:
                run.decode()
            except UnicodeDecodeError as error:
                places = [i for i in range(end) if ids[i] < tokenizer.vocab_size]
                starts.append(places[len(places) - len(run) + error.start])
            run = b""
    return "".join(tokenizer.decode(ids[start:end]) for start, end in zip(starts, [*starts[1:], None]))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stream_after_a_prompt_adds_what_decode_adds(name):
    """Wherever a text is cut into a prompt (it may be empty) and a generated part, so no half of a character is shown
    before its end. Llama 2's first generated space is text. U+FFFD at the prompt's end is not added again."""
    tokenizer, rng, num_cuts = load_tokenizer(TOKENIZERS / name), random.Random(0), 0
    golden = expected(name)
    for ids in [row[1] for row in golden["texts"]] + [row[0] for row in golden["random"]]:
        for cut in [0, *rng.sample(range(len(ids) + 1), k=min(len(ids), 9))]:
            for skip in (True, False):
                whole, prompt = decoded(tokenizer, ids, skip), decoded(tokenizer, ids[:cut], skip)
                added = whole[len(commonprefix([whole, prompt])):]
                assert "".join(pieces(tokenizer, ids[cut:], skip, prompt=ids[:cut])) == added
                assert "".join(pieces(tokenizer, ids[cut:], skip, rng, ids[:cut])) == added
                num_cuts += 1
    assert num_cuts > 700


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen", pytest.param("llama2", marks=needs_tokenizers)])
def test_a_stream_completes_the_character_that_the_prompt_began(name):
    tokenizer = load_tokenizer(TOKENIZERS / name)
    ids = tokenizer.encode("<s>x\U00010348 y")         # a character of four bytes, which no merge joins
    first = max(cut for cut in range(len(ids)) if tokenizer.decode(ids[:cut]).endswith("x"))
    for cut in range(first, first + 4):
        assert "".join(pieces(tokenizer, ids[cut:], True, prompt=ids[:cut])) == "\U00010348 y"
    assert "".join(pieces(tokenizer, ids[first + 4:], True, prompt=ids[:first + 4])) == " y"


@needs_tokenizers
def test_only_the_end_of_a_prompt_is_decoded(monkeypatch):
    """A detokenizer costs the same after a long prompt."""
    tokenizer, lengths = load_tokenizer(TOKENIZERS / "llama2"), []
    decode, ids = tokenizer.decode, tokenizer.encode("Once upon a time " * 500)
    monkeypatch.setattr(tokenizer, "decode", lambda ids: lengths.append(len(ids)) or decode(ids))
    assert tokenizer.detokenizer(True, ids).add(tokenizer.encode("there", add_special_tokens=False)) == " there"
    assert max(lengths) < 20


PAIR = [TOKENIZERS / "gpt2" / "vocab.json", TOKENIZERS / "gpt2" / "merges.txt"]


def test_vocab_and_merges(tmp_path):
    """They equal tokenizer.json, and further files may name further tokens."""
    tokenizer = load_tokenizer(write_files(tmp_path, {}, PAIR))
    assert tokenizer.eos_token_id == 640
    assert all(tokenizer.encode(row[0]) == row[1] for row in expected("gpt2")["texts"])
    names = {"eos_token": {"content": "<x>"}, "bos_token": "<x>"}
    more = {"added_tokens.json": {"<x>": 641}, "special_tokens_map.json": names}
    tokenizer = load_tokenizer(write_files(tmp_path, more))
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.vocab_size) == (641, 641, 642)
    assert tokenizer.decode(tokenizer.encode("a<x>b"), skip_special_tokens=True) == "ab"


@pytest.mark.parametrize("name, content, words", [
    ("vocab.json", "[]", "vocab.json"), ("vocab.json", '{"a": "b"}', "vocab.json"),
    ("merges.txt", b"\xff", "merges.txt"), ("added_tokens.json", '{"<x>": null}', "vocab.json"),
    ("tokenizer_config.json", '{"tokenizer_class": "RobertaTokenizer"}', "of a RobertaTokenizer")])
def test_damaged_vocab_and_merges(tmp_path, name, content, words):
    message = complaint(load_tokenizer, write_files(tmp_path, {name: content}, PAIR))
    assert words in message and str(tmp_path) in message and "token ids" in message


@pytest.mark.parametrize("config, has_default", [
    ({"model_max_length": 1024}, True), ({"tokenizer_class": "GPT2Tokenizer"}, True),
    ({"tokenizer_class": "GPT2TokenizerFast"}, True), ({"tokenizer_class": "Qwen2Tokenizer"}, False),
    ({"tokenizer_class": "PreTrainedTokenizerFast"}, False)])
def test_only_the_class_of_gpt2_has_default_tokens(tmp_path, config, has_default):
    """In other classes <|endoftext|> may be a token that ends no text."""
    tokenizer = load_tokenizer(changed(tmp_path, "qwen", config))
    default = tokenizer.encode("<|endoftext|>")[0] if has_default else None
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == default
    tokenizer = load_tokenizer(changed(tmp_path, "qwen", config | {"eos_token": "<|im_end|>", "bos_token": None}))
    assert [tokenizer.eos_token_id] == tokenizer.encode("<|im_end|>") and tokenizer.bos_token_id is None


@pytest.mark.parametrize("name", ["qwen", pytest.param("llama2", marks=needs_tokenizers)])
def test_tokens_that_only_tokenizer_config_lists(tmp_path, name):
    first = load_tokenizer(TOKENIZERS / name).vocab_size
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    tokens = {first: flags | {"content": "<|new|>", "special": True},
              first + 1: flags | {"content": "<call>", "special": False}}
    config = {"added_tokens_decoder": tokens, "eos_token": "<|new|>"}
    tokenizer = load_tokenizer(changed(tmp_path, name, config))
    ids = tokenizer.encode("a<|new|>b<call>", add_special_tokens=False)
    assert [i for i in ids if i >= first] == [first, first + 1]
    assert tokenizer.decode(ids).replace(" ", "") == "a<|new|>b<call>"
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == "ab<call>"
    assert "".join(pieces(tokenizer, ids, True)) == tokenizer.decode(ids, skip_special_tokens=True)
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (first, first + 2)


def test_the_end_token_of_the_tokenizer_ends_texts_too(tmp_path):
    """Some fine-tunes change it in tokenizer_config.json and leave the model's config.json as it was."""
    folder = changed(tmp_path, "gpt2", {"eos_token": "A"})
    llm = LLM(str(GOLDEN / "llama2"), tokenizer=str(folder), num_blocks=16, device="cpu")
    end = llm.get_tokenizer().eos_token_id
    assert llm.eos_token_ids == {2, end}
    params = SamplingParams(allowed_token_ids=[end], max_tokens=5)
    sample = llm.generate([[5, 6]], params)[0].outputs[0]
    assert (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason) == ([end], "", "stop", None)
    assert llm.generate([[5, 6]], SamplingParams(**vars(params) | {"ignore_eos": True}))[0].outputs[0].text == "AAAAA"


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_only_listed_pairs_merge(tmp_path, ignore_merges):
    """The merge of b and c comes first, and `a` and `bc` are no listed pair, though tiktoken would join them."""
    merges = ["b c", "a b", "ab c"]
    characters = [token for token in load_tokenizer(TOKENIZERS / "llama3").tokens if len(token) == 1]
    vocab = {token: i for i, token in enumerate([*characters, *(merge.replace(" ", "") for merge in merges)])}
    tokenizer = load_tokenizer(changed(tmp_path, "llama3", post_processor=None, added_tokens=[], model__vocab=vocab,
                                       model__merges=merges, model__ignore_merges=ignore_merges))
    texts = {"xabc": ["x", "a", "bc"], "abcabc": ["a", "bc", "a", "bc"], "abb": ["ab", "b"],
             "abc": ["abc"] if ignore_merges else ["a", "bc"]}
    for text, tokens in texts.items():
        assert [tokenizer.decode([i]) for i in tokenizer.encode(text)] == tokens


def test_bytes_that_are_no_token_vanish_and_their_neighbours_merge():
    tokenizer = load_tokenizer(TOKENIZERS / "smollm2")
    assert tokenizer.encode("thɐe") == tokenizer.encode("the")


def test_long_and_monotonous_prompts():
    """tiktoken alone panics on a million spaces."""
    for name in ("gpt2", "smollm2", "qwen"):
        tokenizer = load_tokenizer(TOKENIZERS / name)
        for text in ("x" + " " * 1_000_000 + "x", "a" * 100_000, "hear me speak.\n" * 30_000):
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_lone_surrogate_is_refused():
    message = complaint(load_tokenizer(TOKENIZERS / "gpt2").encode, "ab\ud83dc")
    assert "U+D83D" in message and "position 2" in message


def test_no_tokenizer_files(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")  # without merges.txt
    for found in ("found none of them", "only a SentencePiece tokenizer.model"):
        message = complaint(load_tokenizer, tmp_path)
        assert found in message and str(tmp_path) in message and "token ids" in message
        (tmp_path / "tokenizer.model").write_bytes(b"")


SPLIT = "pre_tokenizer__pretokenizers__0__pattern"
TEMPLATE = "post_processor__processors__1__special_tokens"
NFKC = pytest.param({"normalizer": {"type": "NFKC"}}, marks=needs_tokenizers)  # only the package tokenizers can


def changed(folder: Path, name: str, config: dict | None = None, **parts) -> Path:
    """A folder with a tokenizer_config.json, if it is given, and a copy of a tokenizer.json, parts of it replaced:
    model__vocab__a=5 sets ["model"]["vocab"]["a"], a number is an index, and ... deletes."""
    spec = json.loads((TOKENIZERS / name / "tokenizer.json").read_text(encoding="utf-8"))
    for path, value in parts.items():
        *holders, last = (int(key) if key.isdigit() else key for key in path.split("__"))
        holder = reduce(getitem, holders, spec)
        holder[last] = value
        if value is ...:
            del holder[last]
    return write_files(folder, {"tokenizer.json": spec} | ({} if config is None else {"tokenizer_config.json": config}))


@pytest.mark.parametrize("name, text", [
    ("tokenizer.json", "[]"), ("tokenizer.json", '{"model": null}'), ("tokenizer.json", '{"model": {"vocab": 5}}'),
    ("tokenizer.json", {"added_tokens__0__special": ...}),
    pytest.param("tokenizer.json", {"model__merges": ...}, marks=needs_tokenizers),
    ("tokenizer_config.json", '{"model": '), ("tokenizer_config.json", '{"added_tokens_decoder": ["x"]}'),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "x"}}}'),
    *(("tokenizer_config.json", f'{{"eos_token": {token}}}') for token in ("{}", "5", '{"content": []}')),
    ("special_tokens_map.json", "[" * 100_000), ("special_tokens_map.json", '{"bos_token": {}}')],
    ids=lambda value: f"{value!s:.60}")
def test_damaged_files(tmp_path, name, text):
    """Whatever is wrong with the files, the error is a ValueError, with which the engine starts without a tokenizer."""
    changed(tmp_path, "llama3", **text if isinstance(text, dict) else {})
    if isinstance(text, str):
        (tmp_path / name).write_text(text)
    message = complaint(load_tokenizer, tmp_path)
    assert str(tmp_path) in message and name in message and "token ids" in message
    assert len(message) < 400 + len(str(tmp_path))


def test_without_the_package_tokenizers(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = complaint(load_tokenizer, TOKENIZERS / "llama2")
    assert all(part in message for part in ("llama2", "byte_fallback", "pip install tokenizers", "token ids"))


DEEPSEEK = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": "[\r\n]"}, "behavior": "Isolated", "invert": False},
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}}


@needs_tokenizers
@pytest.mark.parametrize("change", [
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}]}},
    {"decoder": {"type": "Sequence", "decoders": [
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}]}},
    {"normalizer": {"type": "NFKC"}}, DEEPSEEK])
def test_byte_level_that_tiktoken_cannot_express(tmp_path, change):
    """The package `tokenizers` encodes (Falcon cuts text so, and DeepSeek LLM), and the stream still holds half
    characters back. Tokens have the same bytes as with tiktoken."""
    from tokenizers import Tokenizer as Reference
    tokenizer = load_tokenizer(changed(tmp_path, "qwen", **change))
    reference = Reference.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.token_bytes() == load_tokenizer(TOKENIZERS / "qwen").token_bytes()
    for text, *_ in expected("qwen")["texts"]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text).ids
        shown = pieces(tokenizer, ids, True)
        assert "".join(shown) == tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(ids)
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in shown)
    for ids, *_ in expected("qwen")["random"]:
        assert "".join(pieces(tokenizer, ids, True)) == reference.decode(ids)


METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
REPLACE = {"type": "Replace", "pattern": {"String": "_"}, "content": " "}


@needs_tokenizers
@pytest.mark.parametrize("decoder, token, text", [
    ({"type": "Sequence", "decoders": [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]}, "_tell", " tell"),
    ({"type": "ByteFallback"}, "<0x0A>", "\n"), (METASPACE, "<0x0A>", "<0x0A>"), (METASPACE, "\u2581tell", " tell"),
    ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "##ing", "ing"),
    ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "tell", " tell"),
    ({"type": "BPEDecoder", "suffix": "</w>"}, "tell</w>", "tell ")])
def test_the_decoder_says_how_tokens_spell_their_bytes(tmp_path, decoder, token, text):
    tokenizer = load_tokenizer(changed(tmp_path, "llama2", decoder=decoder, **{f"model__vocab__{token}": 900}))
    assert tokenizer.token_bytes()[900] == text.encode()
    assert tokenizer._tokenizer.decoder.decode(["x", token, "x"]).startswith("x" + text)


@needs_tokenizers
def test_bytes_are_shown_as_soon_as_they_are_text():
    """Llama 2 writes a newline as a byte token. What a run has shown stays when the run breaks."""
    tokenizer, params = load_tokenizer(TOKENIZERS / "llama2"), SamplingParams(max_tokens=30, stop=["\n\n"])
    for prompt in ([], tokenizer.encode("a b")):
        found = pieces(tokenizer, [3 + byte for byte in b"\n\n\xe2\x82\xac\n\xe2A\n"], True, prompt=prompt)
        assert found == ["\n", "\n", "", "", "\u20ac", "\n", "", "\ufffd\ufffd", "\ufffd", ""]
    llm = LLM(str(GOLDEN / "llama2"), tokenizer=str(TOKENIZERS / "llama2"), num_blocks=16, device="cpu")
    params.allowed_token_ids = [3 + 0x0A]
    sample = llm.generate([[5]], params)[0].outputs[0]
    assert (sample.token_ids, sample.text, sample.finish_reason) == ([3 + 0x0A] * 2, "", "stop")


@pytest.mark.parametrize("wrong", [10**9, -1, 2**70, 1.5, None, "5", [1]])
def test_ids_that_no_token_has(tmp_path, wrong):
    for parts in ({"model__vocab__a": wrong}, {"added_tokens__0__id": wrong},
                  {TEMPLATE: {"<|begin_of_text|>": {"ids": [wrong]}}}):
        message = complaint(load_tokenizer, changed(tmp_path, "llama3", **parts))
        assert f"a token has the id {wrong!r}, and ids are integers from 0 to 16777215" in message


@pytest.mark.parametrize("pattern", ["(?R)", "(a|(?R))", "(?1)(a)", r"(?<x>a\g<x>)", "("])
def test_split_regexes_that_cannot_be_run(tmp_path, monkeypatch, pattern):
    changed(tmp_path, "llama3", **{SPLIT: {"Regex": pattern}})
    if HAS_TOKENIZERS:
        assert re.search("tokenizer.json that cannot be read .*Oniguruma error", complaint(load_tokenizer, tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = complaint(load_tokenizer, tmp_path)
    assert re.search("a split regex that (calls itself, with|it cannot parse).*pip install tokenizers", message)


@pytest.mark.parametrize("change", [{}, {"model__vocab__!": ...}, NFKC])
def test_a_split_regex_that_tries_too_many_ways(tmp_path, monkeypatch, change, capfd):
    """On this text, that is; others go on. The Rust packages have limits of their own, and panic there. The package
    regex, which cuts text with bytes outside of the vocabulary, has a time."""
    tokenizer = load_tokenizer(changed(tmp_path, "llama3", **{SPLIT: {"Regex": "(a|a)+(?!a)c|x"}}, **change))
    findall = regex.findall
    monkeypatch.setattr(regex, "findall", lambda *given, timeout, **more: findall(*given, timeout=0.1, **more))
    with pytest.raises(ValueError, match="cannot (cut|encode) this text"):
        tokenizer.encode("a" * 40 + "!")
    assert tokenizer.decode(tokenizer.encode("xx", add_special_tokens=False)) == "xx"


@needs_tokenizers
@pytest.mark.parametrize("name, parts, words", [
    # With Llama 2's merges the package `tokenizers` would end the process.
    ("llama2", {"model__continuing_subword_prefix": "##"}, "the merge .* lacks the continuing_subword_prefix '##'"),
    ("gpt2", {"model__continuing_subword_prefix": "##"}, "the merge .* lacks the continuing_subword_prefix '##'"),
    ("llama3", {TEMPLATE: {}, "normalizer": {"type": "NFKC"}}, "the package tokenizers cannot (read it|encode)"),
    ("llama2", {"decoder__decoders__3__stop": 10**9},  # characters to strip from the end, and an empty text has none
     "the package tokenizers cannot decode these ids")])
def test_panics_and_errors_of_tokenizers_are_sentences(tmp_path, name, parts, words, capfd):
    def run(is_stream: bool) -> None:
        tokenizer = load_tokenizer(changed(tmp_path, name, **parts))
        tokenizer.encode("a")
        tokenizer.detokenizer().add([300]) if is_stream else tokenizer.decode([])

    for is_stream in (False, True):
        assert re.search(words, complaint(run, is_stream))

