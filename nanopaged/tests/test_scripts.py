"""The tokenizer that scripts get from `LLM.get_tokenizer` does what a tokenizer of transformers 5 does with the same
calls. Where transformers is installed, the answers are compared with its own."""
import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
import torch

from nanopaged.tests.helpers import complaint
from nanopaged.text.scripts import ScriptTokenizer
from nanopaged.text.tokenizer import load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizers"
TEMPLATE = ("{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}"
            "{% endfor %}{% if add_generation_prompt %}[assistant]{{ mood or '' }}{% endif %}")
MESSAGES = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"}]
TEXT, BOS, EOS = "What is it that the man said?", "<|begin_of_text|>", "<|eot_id|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Llama 3's small tokenizer with a chat template and a padding token."""
    folder = tmp_path_factory.mktemp("llama3")
    shutil.copy(GOLDEN / "llama3" / "tokenizer.json", folder)
    config = json.loads((GOLDEN / "llama3" / "tokenizer_config.json").read_text())
    config |= {"chat_template": TEMPLATE, "pad_token": "<|end_of_text|>", "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def tokenizer(folder) -> ScriptTokenizer:
    return ScriptTokenizer(load_tokenizer(folder), folder)


def calls(tokenizer) -> dict:
    """The answers to what scripts ask of a tokenizer, as plain lists and dicts."""
    ids, chat = tokenizer.encode(TEXT), tokenizer.apply_chat_template
    answers = {
        "encode": ids, "encode bare": tokenizer.encode(TEXT, add_special_tokens=False),
        "decode": tokenizer.decode(ids), "decode plain": tokenizer.decode(ids, skip_special_tokens=True),
        "decode one": tokenizer.decode(ids[1]), "decode a tensor": tokenizer.decode(torch.tensor(ids)),
        "decode rows": tokenizer.decode([ids]), "decode tensors": tokenizer.decode(list(torch.tensor(ids))),
        "chat": dict(chat(MESSAGES)), "chat ids": chat(MESSAGES, return_dict=False),
        "chat text": chat(MESSAGES, tokenize=False), "chats": dict(chat([MESSAGES, MESSAGES[:1]])),
        "chat prompt": chat(MESSAGES, tokenize=False, add_generation_prompt=True, mood="!"),
        "chat texts": chat([MESSAGES, MESSAGES[:1]], tokenize=False),
        "chat goes on": chat(MESSAGES, tokenize=False, continue_final_message=True),
        "another template": chat(MESSAGES[:1], chat_template="{{ messages[0].content }}", tokenize=False),
        "tokens": [tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token],
        "token ids": [tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id],
        "length": len(tokenizer), "vocabulary": tokenizer.get_vocab(), "template": tokenizer.chat_template,
        "ids of tokens": tokenizer.convert_tokens_to_ids([EOS, "a", "no token"])}
    tokenizer.pad_token = tokenizer.eos_token
    answers["another padding"] = tokenizer.pad_token_id
    tokenizer.pad_token_id = tokenizer.bos_token_id
    answers["padding by id"] = tokenizer.pad_token
    tokenizer.chat_template = "{{ messages | length }}"
    answers["a template that was set"] = chat(MESSAGES, tokenize=False)
    return answers


def test_all_calls_of_scripts(tokenizer):
    """Held to the engine's own tokenizer, and to the text that the template gives."""
    inner, answers = tokenizer.tokenizer, calls(tokenizer)
    ids, text = inner.encode(TEXT), f"{BOS}[user] Hello there{EOS}[assistant] Hi{EOS}"
    chats = [inner.encode(text, False), inner.encode(f"{BOS}[user] Hello there{EOS}", False)]
    assert answers == {
        "encode": ids, "encode bare": ids[1:], "decode": BOS + TEXT, "decode plain": TEXT,
        "decode one": inner.decode(ids[1:2]), "decode a tensor": BOS + TEXT, "decode tensors": BOS + TEXT,
        "decode rows": [BOS + TEXT], "chat ids": chats[0],
        "chat": {"input_ids": chats[0], "attention_mask": [1] * len(chats[0])},
        "chats": {"input_ids": chats, "attention_mask": [[1] * len(row) for row in chats]},
        "chat text": text, "chat prompt": f"{text}[assistant]!", "chat goes on": text.removesuffix(EOS),
        "chat texts": [text, f"{BOS}[user] Hello there{EOS}"], "another template": "Hello there",
        "tokens": [EOS, BOS, "<|end_of_text|>", None],
        "token ids": [inner.eos_token_id, inner.bos_token_id, inner.tokens["<|end_of_text|>"], None],
        "length": inner.vocab_size, "vocabulary": inner.tokens, "template": TEMPLATE,
        "ids of tokens": [inner.eos_token_id, inner.tokens["a"], None],
        "another padding": inner.eos_token_id, "padding by id": BOS, "a template that was set": "2"}


def test_transformers_gives_the_same_answers(folder, tokenizer, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for name in ("pad_token", "chat_template"):  # what a script sets is handed over with the call
        setattr(tokenizer, name, getattr(theirs, name))
    how = dict(padding=True, return_tensors="pt")
    assert tokenizer([TEXT, "Hi"], **how).input_ids.equal(theirs([TEXT, "Hi"], **how).input_ids)
    assert tokenizer.apply_chat_template([MESSAGES], **how).input_ids.equal(
        theirs.apply_chat_template([MESSAGES], **how).input_ids)
    for encoding in (expected := calls(theirs)).values():
        if isinstance(encoding, dict):
            encoding.pop("token_type_ids", None)
    assert calls(tokenizer) == expected


def test_what_goes_beyond_is_transformers_own(folder, tokenizer, monkeypatch):
    theirs, auto = MagicMock(spec=["__call__", "encode", "batch_decode"]), Mock()
    auto.from_pretrained.return_value = theirs
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=auto))
    calls(tokenizer)
    auto.from_pretrained.assert_not_called()  # none of these calls needs it
    tokenizer.pad_token, tokenizer.chat_template, tokenizer.padding_side = EOS, "{{ messages[0].content }}", "left"
    assert tokenizer([TEXT], padding=True) is theirs.return_value
    theirs.assert_called_with([TEXT], padding=True)
    assert (theirs.pad_token, theirs.chat_template, theirs.padding_side) == (EOS, tokenizer.chat_template, "left")
    for given, options in (([TEXT], {}), (TEXT, {"return_tensors": "pt"})):
        assert tokenizer.encode(given, **options) is theirs.encode.return_value
        theirs.encode.assert_called_with(given, add_special_tokens=True, **options)
    assert tokenizer.batch_decode([[1]]) is theirs.batch_decode.return_value
    tokenizer.apply_chat_template(MESSAGES, return_tensors="pt", return_dict=False)
    theirs.assert_called_with("Hello there", add_special_tokens=False, return_tensors="pt")
    auto.from_pretrained.assert_called_once_with(folder)
    assert not hasattr(tokenizer, "train_new")


@pytest.mark.parametrize("call, kind", [
    (lambda tokenizer: tokenizer("a"), ValueError), (lambda tokenizer: tokenizer.batch_decode, AttributeError),
    (lambda tokenizer: tokenizer.encode("a", return_tensors="pt"), ValueError),
    (lambda tokenizer: tokenizer.apply_chat_template(MESSAGES, padding=True), ValueError)])
def test_without_transformers_what_goes_beyond_gets_a_sentence(call, kind, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert re.search("beyond .* needs .* pip install transformers", complaint(call, tokenizer, kind=kind))
    assert copy.copy(tokenizer).detokenizer().add(tokenizer.encode("Hi")) == "Hi"  # the engine's are there
    assert calls(tokenizer)["decode plain"] == TEXT


def test_the_llm_gives_it_and_does_not_need_it():
    """The engine's way from prompt to text is without it, and without the chat templates that it reads."""
    code = ("import sys; from nanopaged import LLM; llm = LLM(device='cpu', enforce_eager=True, num_blocks=40); "
            "llm.generate('ROMEO:', use_tqdm=False); "
            "assert not {'nanopaged.text.scripts', 'nanopaged.text.chat'} & set(sys.modules); "
            "tokenizer = llm.get_tokenizer(); assert tokenizer is llm.get_tokenizer(); "
            "print(tokenizer.decode(tokenizer.encode('ROMEO:')), len(tokenizer))")
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout == "ROMEO: 1024\n", done.stderr


@pytest.mark.parametrize("options, words", [({}, "no chat template"), ({"chat_template": "x"}, "must be a list")])
def test_bad_conversations_get_one_sentence(options, words):
    tokenizer = ScriptTokenizer(load_tokenizer(GOLDEN / "llama3"), GOLDEN / "llama3")
    assert words in complaint(tokenizer.apply_chat_template, [], **options)
