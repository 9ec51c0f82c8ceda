"""Small tokenizers in the style of each family, with what Hugging Face `tokenizers` makes of hard texts.

    python make_tokenizers.py TRAINING_TEXT OUTPUT_DIRECTORY

Needs the package `tokenizers` (written with 0.23). Each OUTPUT_DIRECTORY/<name>/ gets a tokenizer in that family's files
and an expected.json: `texts` are [text, ids, ids without special tokens, decoded, decoded with special tokens], `random`
are [ids, decoded, decoded with special tokens] for ids drawn at random, which are rarely valid UTF-8 and not always
tokens. nanopaged/tests/test_tokenizer.py holds the tokenizers of nanopaged/text to them.
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                r"|\s+(?!\S)|\s+")
QWEN_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")

SENTENCES = [
    "Grüße aus Köln, naïve café, ça va? Señor Ñandú, smørrebrød, Łódź, İstanbul'da ığdır.",
    "Привет, мир! Съешь ещё этих мягких французских булок.", "Γειά σου Κόσμε, ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία.",
    "שלום עולם, מה שלומך היום?", "مرحبا بالعالم، كيف حالك اليوم؟ ١٢٣", "नमस्ते दुनिया, आप कैसे हैं? १२३", "สวัสดีชาวโลก สบายดีไหม",
    "你好，世界！今天天气怎么样？一二三。", "こんにちは世界。カタカナとひらがな、漢字。", "안녕하세요 세계, 오늘 날씨가 어때요?", "ආයුබෝවන් ලෝකය", "ሰላም ለዓለም",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ❤️ 😀😃😄", "def f(x):\n    return {'a': x[0], \"b\": 1e-5}  # 12345\n\n\n\tif x != 0: pass\r\n",
]

HARD_TEXTS = [
    "", " ", "  ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "a", " a", "  a", "a ", "a  ", "a   b", "a\n\n\nb", "a \n \n b", "\r\n\r\n x",
    "I'm you're we've he'll she'd it's don't 'tis 'S 'LL I'M WE'VE rock'n'roll ''' ' 's", "it’s “quoted” — dashes – … ‹›",
    "'ſ 'ſt I'ſ K Å ß ﬁ ﬀ ŉ", "0 1 12 123 1234 12345 1,234.56 0x1F 1e-9 3.14159 ½ ² Ⅷ ٣٤ ५६ 𝟘𝟙 一二三 5's 5 's", "7  8   9\t10\n11 \n12  x 13  ",
    "x5 5x x 5 x  5   x     ", "a1b2c3  4", "!!! ??? ... ,,, !? ?! --> <-- == != ++ -- /* */ // \\ \\n", "snake_case camelCase kebab-case a.b.c@d.e #tag $5",
    "https://example.com/a?b=c&d=%20#e", "e\u0301 é o\u0308 ö A\u030a Å \u1100\u1161\u11a8 각 q\u0323\u0307 q\u0307\u0323 \u0958 \u2126 \ufb2c",
    "\u0301 leading mark", "नि कि क्षि", "ไทยไม่มีช่องว่าง", "한국어 조사는 붙여쓴다", "日本語と中文とEnglishの混在123テスト", "עברית and العربية mixed 123 ١٢٣",
    "👩‍👩‍👧‍👦👨🏿‍🚀🏴󠁧󠁢󠁥󠁮󠁧󠁿 🇺🇸🇬 ☺️☺ 1️⃣ #️⃣ \U0001fae8", "😀 😀😀  😀", "\u200b zero\u200bwidth\u200djoin\ufeffbom\u2060 \ufeff",
    "\u00a0nbsp\u00a0\u00a0x \u3000全角　空白 \u2003em\u2028line\u2029para\u0085nel\u1680ogham\u180e", "a\u001cb\u001db\u001eb\u001fb \u001c\u001d x", "\x00\x01\x02\x7f\x80\x9f nul\x00nul",
    "\x0b\x0c\x1b[31mred\x1b[0m\x07", "\ufffd \ufffe \uffff \U0010ffff \U000e0001 \ue000 \ufdd0", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝕏 𝒳 ℕ ℝ ∑∫√∞≠≤", "𐍈 𓀀 𒀀 𐤀 𞤀 ꧁ ᚠ ⴰ ᐊ Ꭰ", "𝠀񆄱񈠣񍉡𝠃",
    "Ḽơᶉëᶆ ȋṕšᶙṁ ḍỡḽǭᵳ ʂǐť", "Z̸͉͑a̷͎͝l̶̰̈́g̵̨͘o̴͚̓", "ǅ ǈ ª º ʰ ⁿ ₂ ① ㊿ ㋀ 〇", " " * 37 + "x" + " " * 20 + "\n" * 9 + "\t" * 5, "a" * 70, "ab" * 40, "ha" * 9 + "h", "ĠĊĉ Ā ġ ģ Ń",
    "<|endoftext|>", "a<|endoftext|>b", " <|endoftext|> ", "<|endoftext|><|endoftext|>\n<|endoftext|", "<|endoftext|", "|endoftext|>", "<s>x</s> <pad><unk>y<mask>z",
    "a  <mask>  b <mask><mask>\n<mask> x", "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n<think>\nhm </think>\n\n yes <think><|im_end|>", "e<think>\u0301 <e\u0301> <é>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>", "<a><a>b<a>bc a>b<a >", "<0x41> <0x0A> ▁ ▁▁x x▁", "  <s> a </s>  b  ",
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.", "unreachable xqzj  xqzj wherefore xqzjxqzj", *SENTENCES,
]


def trained(text: list[str], pre_tokenizer, vocab_size: int, special: list[str] = [], alphabet=pre_tokenizers.ByteLevel.alphabet(),
            normalizer=None, post_processor=processors.ByteLevel(trim_offsets=False)) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = post_processor
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def spec_of(tokenizer: Tokenizer) -> dict:
    """The content of its tokenizer.json, with the vocabulary in the order of the ids."""
    return json.loads(tokenizer.to_str())


def tokenizer_of(spec: dict) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(spec))


def split_then_bytes(first, use_regex: bool = False):
    return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)])


def begin(token: str, token_id: int):
    return processors.TemplateProcessing(single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)])


def move_ids(spec: dict, order: list[str]):
    """Give the tokens of `spec` the ids 0, 1, ... in this order."""
    spec["model"]["vocab"] = {token: i for i, token in enumerate(order)}
    for token in spec["added_tokens"]:
        token["id"] = order.index(token["content"])


def gpt2(text: list[str]):
    tokenizer = trained(text, pre_tokenizers.ByteLevel(add_prefix_space=False), 640)
    spec = spec_of(tokenizer)
    spec["model"]["vocab"]["<|endoftext|>"] = 640
    tokenizer = tokenizer_of(spec)
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", normalized=True, special=True)])
    spec = spec_of(tokenizer)
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]        # as tokenizer.json had them until 2024
    return spec, {"model_max_length": 1024}


def opt(text: list[str]):
    """`</s>` in front, special tokens first, the other ids in no order."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    spec = spec_of(trained(text, pre_tokenizers.ByteLevel(add_prefix_space=False), 600, special, post_processor=begin("</s>", 2)))
    others = sorted(set(spec["model"]["vocab"]) - set(special))
    random.Random(1).shuffle(others)
    move_ids(spec, special + others)
    token = lambda content: {"__type": "AddedToken", "content": content, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    config = {"add_bos_token": True, "add_prefix_space": False, "bos_token": token("</s>"), "eos_token": token("</s>"), "errors": "replace",
              "pad_token": "<pad>", "unk_token": token("<unk>"), "tokenizer_class": "GPT2Tokenizer"}
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] != "<s>"]     # named in neither file, as in OPT
    return spec, config


def llama3(text: list[str]):
    """Merges as its converter lists them, every split of every token; and tokens that no merge reaches, for `ignore_merges`."""
    post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin("<|begin_of_text|>", 703)])
    spec = spec_of(trained(text, split_then_bytes(pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")), 700, post_processor=post_processor))
    order = [*spec["model"]["vocab"], "Ġunreachable", "xqzj", "Ġwherefore"]
    move_ids(spec, order)
    spec["model"]["merges"] = [[t[:i], t[i:]] for t in order for i in range(1, len(t)) if t[:i] in order and t[i:] in order]
    spec["model"]["ignore_merges"] = True
    tokenizer = tokenizer_of(spec)
    names = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id"]
    names += [f"reserved_special_token_{i}" for i in range(3)]
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", normalized=False, special=True) for name in names])
    return spec_of(tokenizer), {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def smollm2(text: list[str]):
    """No byte tokens but those that the training text had, so that rare characters vanish."""
    digits = split_then_bytes(pre_tokenizers.Digits(individual_digits=True), use_regex=True)
    tokenizer = trained(text, digits, 640, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], alphabet=[])
    return spec_of(tokenizer), {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "tokenizer_class": "GPT2Tokenizer"}


def qwen(text: list[str]):
    pre_tokenizer = split_then_bytes(pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"))
    tokenizer = trained(text, pre_tokenizer, 640, normalizer=normalizers.NFC())
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in ("<think>", "</think>")])
    return spec_of(tokenizer), {"bos_token": None, "eos_token": "<|im_end|>"}


def flags(text: list[str]):
    """What single families have: a space in front, lstrip and rstrip, tokens that begin alike, tokens of spaces, normalized ones."""
    around = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer = trained(text, pre_tokenizers.ByteLevel(add_prefix_space=True), 560, ["<s>", "</s>"], normalizer=normalizers.NFC(),
                        post_processor=around)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True, normalized=False), AddedToken("<pad>", rstrip=True, special=True)])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<a>", "<a>b", "<a>bc", "né")])
    tokenizer.add_tokens([AddedToken(t, normalized=True) for t in ("  ", "    ", "<e\u0301>", "世界", "b<a")])
    return spec_of(tokenizer), {"bos_token": "<s>", "eos_token": {"content": "</s>"}}


def llama2(text: list[str]):
    """Not byte-level: spaces are written as U+2581, characters that are no token as bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = begin("<s>", 1)
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False, max_token_length=8)
    text = SENTENCES[:3] * 40 + text[-400:]              # few scripts: what else the hard texts have becomes bytes
    tokenizer.train_from_iterator([word for line in text for word in line.split(" ")], trainer)
    spec = spec_of(tokenizer)
    learned = [token for token in spec["model"]["vocab"] if token not in special]
    move_ids(spec, special + [f"<0x{b:02X}>" for b in range(256)] + learned)
    return spec, {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}


def expected(tokenizer: Tokenizer) -> dict:
    texts, drawn, rng = [], [], random.Random(0)
    for text in HARD_TEXTS:
        ids, plain = (tokenizer.encode(text, add_special_tokens=add).ids for add in (True, False))
        texts.append([text, ids, plain, tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)])
    size = tokenizer.get_vocab_size()
    for _ in range(40):
        ids = [rng.randrange(rng.choice([size + 9, 300])) for _ in range(rng.randrange(1, 30))]
        drawn.append([ids, tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)])
    return {"texts": texts, "random": drawn}


def write(path: Path, content: dict):
    path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def main(training_text: str, output: str):
    lines = Path(training_text).read_text(encoding="utf-8").splitlines(keepends=True)
    text = SENTENCES * 40 + lines[:12000]
    for family in (gpt2, opt, llama3, smollm2, qwen, flags, llama2):
        folder = Path(output) / family.__name__
        folder.mkdir(parents=True, exist_ok=True)
        spec, config = family(text)
        write(folder / "tokenizer_config.json", config)
        write(folder / "expected.json", expected(tokenizer_of(spec)))
        if family is not opt:
            write(folder / "tokenizer.json", spec)
        if family in (gpt2, opt):
            merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in spec["model"]["merges"]]
            write(folder / "vocab.json", spec["model"]["vocab"])
            (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python make_tokenizers.py TRAINING_TEXT OUTPUT_DIRECTORY")
    main(*sys.argv[1:])
