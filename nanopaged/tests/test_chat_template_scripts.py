"""What scripts get from `LLM.get_tokenizer`, held to transformers 5 where that is installed."""
import copy
import json
from pathlib import Path

import pytest
import torch

from nanopaged.features.chat_template import ScriptTokenizer
from nanopaged.tests.helpers import GOLDEN, ROOT, complaint, write_files
from nanopaged.tests.programs import run_program
from nanopaged.text.tokenizer import load_tokenizer

LLAMA3 = GOLDEN / "tokenizers" / "llama3"
TEMPLATE = ("{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}"
            "{% endfor %}{% if add_generation_prompt %}[assistant]{{ mood or '' }}{% endif %}")
MESSAGES = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"}]
TEXT, BOS, EOS = "What is it that the man said?", "<|begin_of_text|>", "<|eot_id|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Llama 3's small tokenizer with a chat template and a padding token."""
    config = json.loads((LLAMA3 / "tokenizer_config.json").read_text())
    config |= {"chat_template": TEMPLATE, "pad_token": "<|end_of_text|>", "unk_token": None}
    return write_files(tmp_path_factory.mktemp("llama3"), {"tokenizer_config.json": config}, LLAMA3.iterdir())


@pytest.fixture
def tokenizer(folder) -> ScriptTokenizer:
    return ScriptTokenizer(load_tokenizer(folder), folder)


def calls(tokenizer) -> dict:
    """The answers to what scripts ask of a tokenizer, as plain lists and dicts."""
    ids, chat = tokenizer.encode(TEXT), tokenizer.apply_chat_template
    return {
        "encode": ids, "encode bare": tokenizer.encode(TEXT, add_special_tokens=False),
        "decode": tokenizer.decode(ids), "decode plain": tokenizer.decode(ids, skip_special_tokens=True),
        "decode one": tokenizer.decode(ids[1]), "decode a tensor": tokenizer.decode(torch.tensor(ids)),
        "chat": dict(chat(MESSAGES)), "chat ids": chat(MESSAGES, return_dict=False),
        "chat text": chat(MESSAGES, tokenize=False),
        "chat prompt": chat(MESSAGES, tokenize=False, add_generation_prompt=True, mood="!"),
        "chat goes on": chat(MESSAGES, tokenize=False, continue_final_message=True),
        "another template": chat(MESSAGES[:1], chat_template="{{ messages[0].content }}", tokenize=False),
        "tokens": [tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token],
        "token ids": [tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id]}


def test_all_calls_of_scripts(tokenizer):
    """Held to the engine's own tokenizer, and to the text that the template gives."""
    inner = tokenizer.tokenizer
    ids, text = inner.encode(TEXT), f"{BOS}[user] Hello there{EOS}[assistant] Hi{EOS}"
    chat = inner.encode(text, False)
    assert calls(tokenizer) == {
        "encode": ids, "encode bare": ids[1:], "decode": BOS + TEXT, "decode plain": TEXT,
        "decode one": inner.decode(ids[1:2]), "decode a tensor": BOS + TEXT, "chat ids": chat,
        "chat": {"input_ids": chat, "attention_mask": [1] * len(chat)},
        "chat text": text, "chat prompt": f"{text}[assistant]!", "chat goes on": text.removesuffix(EOS),
        "another template": "Hello there", "tokens": [EOS, BOS, "<|end_of_text|>", None],
        "token ids": [inner.eos_token_id, inner.bos_token_id, inner.tokens["<|end_of_text|>"], None]}


def test_transformers_gives_the_same_answers(folder, tokenizer, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    expected = calls(transformers.AutoTokenizer.from_pretrained(folder))
    expected["chat"].pop("token_type_ids", None)
    assert calls(tokenizer) == expected


def test_what_goes_beyond_is_refused(tokenizer):
    copied = copy.copy(tokenizer)
    assert "no batch_decode; AutoTokenizer.from_pretrained(llm.tokenizer_path)" in complaint(
        lambda: copied.batch_decode, kind=AttributeError)
    for name in ("padding", "return_tensors"):
        assert f"no {name}; AutoTokenizer" in complaint(copied.apply_chat_template, MESSAGES, **{name: True})
    with pytest.raises(AttributeError, match="chat_template"):  # which would have no effect
        copied.chat_template = TEMPLATE


def test_the_llm_gives_it_and_does_not_need_it():
    """The engine's way from prompt to text is without it, and without the chat templates that it reads."""
    code = ("import sys; from nanopaged import LLM; llm = LLM(device='cpu', enforce_eager=True, num_blocks=40); "
            "llm.generate('ROMEO:', use_tqdm=False); "
            "assert 'nanopaged.features.chat_template' not in sys.modules; "
            "tokenizer = llm.get_tokenizer(); assert tokenizer is llm.get_tokenizer(); "
            "print(tokenizer.decode(tokenizer.encode('ROMEO:')))")
    done = run_program(code, cwd=ROOT)
    assert done.stdout == "ROMEO:\n", done.stderr


@pytest.mark.parametrize("options, words", [({}, "no chat template"), ({"chat_template": "x"}, "must be a list")])
def test_bad_conversations_get_one_sentence(options, words):
    assert words in complaint(ScriptTokenizer(load_tokenizer(LLAMA3), LLAMA3).apply_chat_template, [], **options)
