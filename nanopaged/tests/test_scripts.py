"""The tokenizer that scripts get from `LLM.get_tokenizer` does what a tokenizer of transformers 5 does with the same
calls. Where transformers is installed, the answers are compared with its own."""
import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanopaged import LLM
from nanopaged.text.scripts import ScriptTokenizer
from nanopaged.text.tokenizer import load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizers"
TEMPLATE = ("{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}"
            "{% endfor %}{% if add_generation_prompt %}[assistant]{{ mood or '' }}{% endif %}")
MESSAGES = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"}]
TEXTS = ["Hello there", "What is it that the man said?", "\u00e9 \u4f60<|eot_id|>"]


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


def calls(tokenizer, make=lambda value: value) -> dict:
    """The answers to what scripts ask of a tokenizer, as plain lists."""
    ids = tokenizer(TEXTS[0])["input_ids"]
    answers = {
        "call": tokenizer(TEXTS[0]), "attributes": tokenizer(TEXTS[0]).input_ids, "several": tokenizer(TEXTS),
        "bare": tokenizer(TEXTS, add_special_tokens=False), "padded": tokenizer(TEXTS, padding=True),
        "cut": tokenizer(TEXTS, truncation=True, max_length=4),
        "fixed": tokenizer(TEXTS[:2], truncation=True, padding="max_length", max_length=6, return_tensors="pt"),
        "tensor": tokenizer(TEXTS[0], return_tensors="pt"),
        "encode": tokenizer.encode(TEXTS[1]), "encode bare": tokenizer.encode(TEXTS[1], add_special_tokens=False),
        "encode tensor": tokenizer.encode(TEXTS[1], return_tensors="pt"),
        "decode": tokenizer.decode(ids), "decode plain": tokenizer.decode(ids, skip_special_tokens=True),
        "decode one": tokenizer.decode(ids[1]), "decode a tensor": tokenizer.decode(torch.tensor(ids)),
        "decode rows": tokenizer.decode([ids, ids[:2]]), "decode tensors": tokenizer.decode(list(torch.tensor(ids))),
        "batch": tokenizer.batch_decode([ids, ids[:2]], skip_special_tokens=True),
        "batch of tensors": tokenizer.batch_decode(torch.tensor([ids, ids])),
        "chat": tokenizer.apply_chat_template(MESSAGES), "chat ids": tokenizer.apply_chat_template(
            MESSAGES, return_dict=False), "chat text": tokenizer.apply_chat_template(MESSAGES, tokenize=False),
        "chat prompt": tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, mood="!"),
        "chats": tokenizer.apply_chat_template([MESSAGES, MESSAGES[:1]], tokenize=False),
        "chats padded": tokenizer.apply_chat_template([MESSAGES, MESSAGES[:1]], padding=True, return_tensors="pt"),
        "chat goes on": tokenizer.apply_chat_template(MESSAGES, tokenize=False, continue_final_message=True),
        "another template": tokenizer.apply_chat_template(MESSAGES, chat_template="{{ messages[0].content }}",
                                                          tokenize=False),
        "tokens": [tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token],
        "token ids": [tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id],
        "length": len(tokenizer), "vocabulary": tokenizer.get_vocab(), "template": tokenizer.chat_template,
        "ids of tokens": tokenizer.convert_tokens_to_ids(["<|eot_id|>", "a", "no token"]),
        "id of a token": tokenizer.convert_tokens_to_ids("<|eot_id|>"),
        "tokens of ids": tokenizer.convert_ids_to_tokens(ids), "token of an id": tokenizer.convert_ids_to_tokens(70),
        "visible tokens": tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=True)}
    tokenizer.pad_token = tokenizer.eos_token
    answers["another padding"] = [tokenizer.pad_token_id, tokenizer(TEXTS, padding="longest")]
    tokenizer.pad_token_id = tokenizer.bos_token_id
    answers["padding by id"] = tokenizer.pad_token
    tokenizer.chat_template = "{{ messages | length }}"
    answers["a template that was set"] = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    return {name: plain(value) for name, value in answers.items()}


def plain(value):
    if hasattr(value, "items"):
        return {key: plain(entry) for key, entry in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def test_all_calls_of_scripts(tokenizer):
    """Held to the engine's own tokenizer, and to the text that the template gives."""
    inner, answers = tokenizer.tokenizer, calls(tokenizer)
    bos, eos = "<|begin_of_text|>", "<|eot_id|>"
    ids = [inner.encode(text) for text in TEXTS]
    assert answers["call"] == {"input_ids": ids[0], "attention_mask": [1] * len(ids[0])}
    assert answers["attributes"] == ids[0] and answers["several"]["input_ids"] == ids
    assert answers["tensor"]["input_ids"] == [ids[0]] and answers["encode tensor"] == [ids[1]]
    assert answers["encode"] == ids[1] == [inner.bos_token_id, *answers["encode bare"]]
    longest = max(map(len, ids))
    for row, mask, text_ids in zip(*answers["padded"].values(), ids):
        assert row == text_ids + [tokenizer.get_vocab()["<|end_of_text|>"]] * (longest - len(text_ids))
        assert mask == [1] * len(text_ids) + [0] * (longest - len(text_ids))
    assert answers["cut"]["input_ids"] == [row[:4] for row in ids]
    assert {len(row) for row in answers["fixed"]["input_ids"]} == {6}
    assert answers["decode"] == bos + TEXTS[0] and answers["decode plain"] == TEXTS[0]
    assert answers["decode rows"][0] == answers["decode a tensor"] == answers["decode tensors"] == bos + TEXTS[0]
    assert answers["batch"][0] == TEXTS[0] and answers["batch of tensors"] == [bos + TEXTS[0]] * 2
    text = f"{bos}[user] Hello there{eos}[assistant] Hi{eos}"
    assert answers["chat text"] == text and answers["chat prompt"] == f"{text}[assistant]!"
    assert answers["chat ids"] == answers["chat"]["input_ids"] == inner.encode(text, add_special_tokens=False)
    assert answers["chats"] == [text, f"{bos}[user] Hello there{eos}"]
    assert answers["chat goes on"] == text.removesuffix(eos) and answers["another template"] == "Hello there"
    assert answers["tokens"] == [eos, bos, "<|end_of_text|>", None] and answers["token ids"][0] == inner.eos_token_id
    assert answers["length"] == len(inner.tokens) == inner.vocab_size and answers["template"] == TEMPLATE
    assert answers["ids of tokens"] == [inner.eos_token_id, inner.tokens["a"], None]
    assert answers["tokens of ids"][0] == bos and answers["visible tokens"] == answers["tokens of ids"][1:]
    assert answers["another padding"][0] == inner.eos_token_id and answers["padding by id"] == bos
    assert answers["a template that was set"] == "2"


def test_transformers_gives_the_same_answers(folder, tokenizer, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    theirs = calls(transformers.AutoTokenizer.from_pretrained(folder))
    for encoding in theirs.values():
        if isinstance(encoding, dict):
            encoding.pop("token_type_ids", None)
    assert calls(tokenizer) == theirs


def test_the_llm_gives_it_and_does_not_need_it():
    """The engine's way from prompt to text is without it, and without the chat templates that it reads."""
    code = ("import sys; from nanopaged import LLM; llm = LLM(device='cpu', enforce_eager=True, num_blocks=40); "
            "llm.generate('ROMEO:', use_tqdm=False); "
            "assert not {'nanopaged.text.scripts', 'nanopaged.text.chat'} & set(sys.modules); "
            "tokenizer = llm.get_tokenizer(); assert tokenizer is llm.get_tokenizer(); "
            "print(tokenizer.decode(tokenizer('ROMEO:').input_ids), len(tokenizer))")
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout == "ROMEO: 1024\n", done.stderr


@pytest.mark.parametrize("call, words", [
    (lambda tokenizer: tokenizer("a", return_tensors="tf"), "return_tensors must be None or 'pt', not 'tf'"),
    (lambda tokenizer: tokenizer("a", padding="left"), "padding must be"),
    (lambda tokenizer: tokenizer("a", truncation=True), "give max_length"),
    (lambda tokenizer: tokenizer(["a", "a b c"], return_tensors="pt"), "give padding=True"),
    (lambda tokenizer: tokenizer(["a", "a b c"], padding=True), "set pad_token"),
    (lambda tokenizer: tokenizer.apply_chat_template(MESSAGES), "no chat template"),
    (lambda tokenizer: tokenizer.apply_chat_template([], chat_template="x"), "messages must be a list"),
])
def test_bad_calls_get_one_sentence(call, words):
    tokenizer = ScriptTokenizer(load_tokenizer(GOLDEN / "llama3"), GOLDEN / "llama3")
    with pytest.raises(ValueError, match=words) as error:
        call(tokenizer)
    assert "\n" not in str(error.value) and ". " not in str(error.value)


def test_the_engines_methods_are_there_too(tokenizer):
    assert copy.copy(tokenizer).detokenizer().add(tokenizer.encode("Hi")) == "Hi"
    with pytest.raises(AttributeError, match="train_new"):
        tokenizer.train_new_from_iterator
    with pytest.raises(AttributeError, match="no 'token_type_ids'"):
        tokenizer("a").token_type_ids


def test_an_llm_without_a_tokenizer_says_so():
    llm = LLM(skip_tokenizer_init=True, device="cpu", num_blocks=40, enforce_eager=True)
    with pytest.raises(ValueError, match="token ids"):
        llm.get_tokenizer()


@pytest.mark.parametrize("text", [None, 5, b"x", [1], [["x"]], {"x": 1}, torch.ones(2)], ids=repr)
def test_what_is_no_text(tokenizer, text):
    with pytest.raises(ValueError, match="text must be a string or a list of strings, not "):
        tokenizer(text)
