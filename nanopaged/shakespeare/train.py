"""Train the model that nanopaged bundles: a Qwen3-shaped decoder of at most 4M parameters on tinyshakespeare.

    python nanopaged/shakespeare/train.py --data tinyshakespeare.txt --output DIR            # one model
    python nanopaged/shakespeare/train.py --data tinyshakespeare.txt --output DIR --sweep    # the best of CANDIDATES
    python engine.py --model DIR --prompt "ROMEO:"                                           # what it writes

It needs `torch`, `tokenizers` and `safetensors`, and leaves a directory in Hugging Face layout, which anything that
reads Qwen3 can load. It knows nothing about paging, and the engine knows nothing about it: it is here so that the
bundled weights have no secret.

The text is one megabyte, so the trouble is memorising, not learning: a model of this size can recite the training text
after a few hundred passes. Against that stand dropout, weight decay, an average of the weights over the last few
hundred steps (EMA), training text that is tokenised a little differently each time (BPE-dropout, Provilkov et al. 2020,
so that there is more than one token sequence to recite), and keeping the weights with the best held-out loss. The last
tenth of the text is held out, from the tokenizer too. Losses are printed in nats per token, and in bits per byte, which
can be compared between vocabularies.

How the size was chosen: `--sweep` on one H200 (2026-11-21, six at a time). 8 MB allow 4M parameters, and at that size
the learning rate, the shape and the vocabulary matter little; half the parameters cost 0.05 bits per byte. Bundled is
the first row. It has begun to recite (training text 2.49 nats per token), which is where it was stopped.

    bits/byte  nats/token  training nats  parameters  best step   what differs from SETTINGS
       2.006      3.200          2.493       3.90M         700    lr 0.002
       2.013      3.480          2.696       3.74M         800    vocabulary 1536, intermediate 512
       2.020      3.222          2.562       3.90M        1390    dropout 0.3, weight decay 1.0
       2.025      3.231          2.516       3.84M        1100    8 layers, hidden 192
       2.030      3.239          2.545       3.90M         800    nothing
       2.032      3.689          2.918       3.87M         700    vocabulary 2048, intermediate 512
       2.048      3.266          2.618       3.90M         600    no BPE-dropout
       2.055      3.278          2.599       3.85M         700    4 layers, hidden 320, intermediate 704
       2.058      3.283          2.578       1.87M         900    4 layers, hidden 192, dropout 0.1
"""

import argparse
import copy
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

STARTED = time.perf_counter()   # before the slow imports: --max-seconds counts from here

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

MAX_PARAMETERS = 4_000_000      # 8 MB in bfloat16: what a repository can carry without Git LFS
FINISH_SECONDS = 15             # of a sweep's process: its last evaluation, writing the result
END_OF_TEXT = "<|endoftext|>"

# Llama 3's split (words with the space before them, numbers by three digits, punctuation, line ends) with one change:
# line ends stay apart from punctuation. Otherwise ":\n" would be one token, and no line end would follow the prompt
# "ROMEO:".
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")

SETTINGS = dict(
    vocab_size=1024,        # with <|endoftext|>
    layers=6, hidden=256, heads=8, kv_heads=2, head_dim=32, intermediate=576,
    context=1024,           # tokens in a training window, at most 1024
    batch_size=16,          # windows in a step
    steps=2500, warmup=100, lr=1e-3, weight_decay=0.3,
    dropout=0.2,            # on embeddings, attention and residual branches
    bpe_dropout=0.05,       # rate of skipped merges in the training text's variants
    ema=0.995,              # decay of the average of the weights, per step
    eval_every=100,         # steps
    seed=0)

# What --sweep tries: each is SETTINGS but for these. All stay under 4M parameters.
CANDIDATES = [
    dict(),
    dict(bpe_dropout=0.0),
    dict(dropout=0.3),
    dict(weight_decay=1.0),
    dict(dropout=0.3, weight_decay=1.0),
    dict(dropout=0.3, bpe_dropout=0.1),
    dict(lr=2e-3),
    dict(vocab_size=1536, intermediate=512),
    dict(vocab_size=2048, intermediate=512),
    dict(layers=8, hidden=192, intermediate=576),
    dict(layers=4, hidden=320, intermediate=704),
    dict(layers=4, hidden=192, intermediate=512, dropout=0.1),
]


# ---------------------------------------------------------------------------------------------------------------------
# The model. Modules carry Hugging Face's names, so that its state_dict is the checkpoint.

def rotate(x, cos, sin):
    """Rotary embedding (Su et al. 2021) in Hugging Face's halves. x is [B, heads, T, head_dim]; cos and sin are
    [T, head_dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, c, dropout):
        super().__init__()
        hidden, self.head_dim, self.dropout = c["hidden_size"], c["head_dim"], dropout
        query_size, kv_size = (c[n] * self.head_dim for n in ("num_attention_heads", "num_key_value_heads"))
        self.q_proj = nn.Linear(hidden, query_size, bias=False)
        self.k_proj = nn.Linear(hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, hidden, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=c["rms_norm_eps"])
        self.k_norm = nn.RMSNorm(self.head_dim, eps=c["rms_norm_eps"])

    def forward(self, x, cos, sin):                                             # x [B, T, hidden]
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim))                # [B, T, heads, head_dim]
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        v = v.transpose(1, 2)                                                   # [B, kv_heads, T, head_dim]
        # Under autocast the projections are bfloat16; norm and rotation are done in float32.
        q = rotate(self.q_norm(q.float()).transpose(1, 2), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(k.float()).transpose(1, 2), cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True,
                                           dropout_p=self.dropout if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c, dropout):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        self.self_attn = Attention(c, dropout)
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        self.mlp = MLP(c)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, cos, sin):
        x = x + self.drop(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.drop(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """Tokens [B, T] to logits [B, T, vocab_size]; `c` is the dict written as config.json."""

    def __init__(self, c, dropout=0.0):
        super().__init__()
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(c["vocab_size"], c["hidden_size"]),
            layers=nn.ModuleList(Layer(c, dropout) for _ in range(c["num_hidden_layers"])),
            norm=nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])))
        self.drop = nn.Dropout(dropout)
        half = torch.arange(0, c["head_dim"], 2) / c["head_dim"]
        angle = torch.outer(torch.arange(c["max_position_embeddings"]), c["rope_theta"] ** -half)
        self.register_buffer("cos", angle.cos(), persistent=False)              # [max positions, head_dim / 2]
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:   # what is added to the residual stream starts smaller, so depth does not inflate it
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * c["num_hidden_layers"]) if last else 0.02)

    def forward(self, tokens):
        x = self.drop(self.model.embed_tokens(tokens))                          # [B, T, hidden]
        cos, sin = self.cos[:tokens.size(1)], self.sin[:tokens.size(1)]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)     # tied: the embedding is the lm_head


def make_config(args):
    """The config.json of a Qwen3 checkpoint of this size."""
    return dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=args.vocab_size,
                hidden_size=args.hidden, intermediate_size=args.intermediate, num_hidden_layers=args.layers,
                num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, head_dim=args.head_dim,
                max_position_embeddings=1024, rope_theta=10000.0, rms_norm_eps=1e-6, hidden_act="silu",
                attention_bias=False, attention_dropout=0.0, tie_word_embeddings=True, use_sliding_window=False,
                sliding_window=None, bos_token_id=None, eos_token_id=args.vocab_size - 1, dtype="bfloat16",
                use_cache=True, initializer_range=0.02)


# ---------------------------------------------------------------------------------------------------------------------
# The data.

def split_text(path):
    """The training text and the held-out text, the last tenth."""
    text = Path(path).read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def train_tokenizer(text, vocab_size):
    """Byte-level BPE. The ids are the 256 bytes, then the merges in their order, then <|endoftext|>: an id is its
    merge's rank."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    # The text has no ends, so the model learns never to write this token; engines want an end-of-text id all the same.
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def encode_streams(tokenizer, text, bpe_dropout, device, variants=16):
    """The text as one tensor of ids, followed by `variants` more tensors, in which each merge was skipped at rate
    bpe_dropout."""
    encoded = tokenizer.encode_batch([text])
    if bpe_dropout:
        tokenizer.model.dropout = bpe_dropout
        encoded += tokenizer.encode_batch([text] * variants)
        tokenizer.model.dropout = None
    return [torch.tensor(e.ids, device=device) for e in encoded]


def draw_batch(streams, batch_size, context, varied):
    """Random windows [batch_size, context + 1]; each is from a variant of the text with probability `varied`."""
    rows = []
    for _ in range(batch_size):
        stream = random.choice(streams[1:]) if len(streams) > 1 and random.random() < varied else streams[0]
        start = random.randrange(len(stream) - context)
        rows.append(stream[start:start + context + 1])
    return torch.stack(rows)


# ---------------------------------------------------------------------------------------------------------------------
# Training.

def autocast(device):
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=device == "cuda")


@torch.no_grad()
def evaluate(model, stream, num_bytes, context, device):
    """(nats per token, bits per byte) of a whole token stream, cut into windows of `context` predictions."""
    rows = list(stream[:-1].split(context)), list(stream[1:].split(context))
    inputs, targets = (nn.utils.rnn.pad_sequence(r, batch_first=True, padding_value=p) for r, p in zip(rows, (0, -100)))
    nats = 0.0
    for x, y in zip(inputs.split(16), targets.split(16)):
        with autocast(device):
            logits = model(x)
        nats += F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum").item()
    return nats / (len(stream) - 1), nats / math.log(2) / num_bytes


def make_optimizer(model, args, device):
    """AdamW that decays matrices, and leaves the norms' gains alone."""
    groups = [dict(params=[p for p in model.parameters() if p.dim() == 2], weight_decay=args.weight_decay),
              dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=device == "cuda")


def train_step(model, average, optimizer, batch, device, lr, ema):
    """One update of the model and of the running average of its weights; returns the loss, still on the device."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    with autocast(device):
        logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - ema)
    return loss.detach()


def fit(model, streams, held_out, num_bytes, args, device):
    """Train; return the averaged model with the weights of the best held-out loss, and the record of that moment.

    Windows are as long as the longest sequence to be generated. Rope sees only distances, so moving shorter windows to
    random positions would teach nothing about far ones.
    """
    average, best, record = copy.deepcopy(model).eval(), None, dict(held_out_nats=math.inf, step=0)
    optimizer = make_optimizer(model, args, device)
    step, progress = 0, 0.0
    # Eight evaluations without a better one: by now it only memorises.
    while progress < 1 and step - record["step"] < 8 * args.eval_every:
        # Time counts as steps do, so a run that is cut short by the clock still ends with its learning rate decayed.
        progress = max((step + 1) / args.steps, (time.perf_counter() - STARTED) / args.max_seconds)
        decay = 0.02 + 0.98 * (1 + math.cos(math.pi * min(progress, 1))) / 2
        # Variants of the text at first, fewer and fewer of them, and at the end only text as prompts are tokenised.
        batch = draw_batch(streams, args.batch_size, args.context, varied=1 - progress)
        lr = args.lr * decay * min(1, (step + 1) / args.warmup)
        loss = train_step(model, average, optimizer, batch, device, lr,
                          ema=min(args.ema, (1 + step) / (10 + step)))
        step += 1
        if step % args.eval_every and progress < 1:
            continue
        nats, bits = evaluate(average, held_out, num_bytes, args.context, device)
        seen, _ = evaluate(average, streams[0][:len(held_out)], num_bytes, args.context, device)
        print(f"step {step:5d}  {time.perf_counter() - STARTED:5.0f} s  nats per token: batch {loss.item():.3f}, "
              f"training text {seen:.3f}, held out {nats:.4f} ({bits:.4f} bits per byte)", flush=True)
        if nats < record["held_out_nats"]:
            best = copy.deepcopy(average.state_dict())
            record = dict(held_out_nats=nats, held_out_bits_per_byte=bits, training_nats=seen, step=step)
    if best is None:
        raise SystemExit(f"the loss is not a number: --lr {args.lr} is too high for this size")
    average.load_state_dict(best)
    return average, record | dict(steps_run=step, seconds=round(time.perf_counter() - STARTED, 1))


def train(args):
    """Train one model and write it to args.output; returns what training.json says."""
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_text, held_out_text = split_text(args.data)
    tokenizer = train_tokenizer(train_text, args.vocab_size)
    streams = encode_streams(tokenizer, train_text, args.bpe_dropout, device)
    held_out, = encode_streams(tokenizer, held_out_text, 0, device)
    first_token = tokenizer.decode(held_out[:1].tolist())  # it is given, not predicted
    num_bytes = len(held_out_text.encode()) - len(first_token.encode())
    config = make_config(args)
    model = Decoder(config, args.dropout).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(streams[0]):,} training tokens, {len(held_out):,} held out, on {device}",
          flush=True)
    if parameters > MAX_PARAMETERS:
        raise SystemExit(f"{parameters:,} parameters are more than {MAX_PARAMETERS:,}: "
                         "take fewer layers or a smaller --intermediate")
    model, record = fit(model, streams, held_out, num_bytes, args, device)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())     # what is kept is bfloat16, so that is what is judged
    record["held_out_nats"], record["held_out_bits_per_byte"] = evaluate(
        model, held_out, num_bytes, args.context, device)
    summary = dict(parameters=parameters, training_tokens=len(streams[0]), held_out_tokens=len(held_out), **record,
                   settings={name: vars(args)[name] for name in SETTINGS})
    save(args.output, model, tokenizer, config, summary)
    return summary


# ---------------------------------------------------------------------------------------------------------------------
# The checkpoint.

def save(output, model, tokenizer, config, summary):
    """Write the Hugging Face layout, and training.json beside it."""
    output.mkdir(parents=True, exist_ok=True)
    end = config["eos_token_id"]
    files = {
        "config.json": config,
        "generation_config.json": dict(do_sample=True, temperature=0.8, eos_token_id=end, pad_token_id=end),
        "tokenizer_config.json": dict(
            tokenizer_class="PreTrainedTokenizerFast", add_bos_token=False, bos_token=None, eos_token=END_OF_TEXT,
            pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False,
            model_max_length=config["max_position_embeddings"]),
        "training.json": summary}
    for name, content in files.items():
        (output / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(output / "tokenizer.json"))
    weights = {name: w.to("cpu", torch.bfloat16).contiguous() for name, w in model.state_dict().items()}
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def check_against_transformers(output, data):
    """What was written must mean the same to Hugging Face: tokens equal, logits equal to 1e-3 in float32."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        return print("transformers is not installed: logits not compared")
    model = Decoder(json.loads((output / "config.json").read_text(encoding="utf-8"))).eval()
    model.load_state_dict({name: w.float() for name, w in load_file(output / "model.safetensors").items()})
    text = split_text(data)[1][:2000]
    ids = Tokenizer.from_file(str(output / "tokenizer.json")).encode(text).ids
    if ids != AutoTokenizer.from_pretrained(output)(text).input_ids:
        raise SystemExit("transformers reads another tokenizer out of the files than the one written")
    batch = torch.tensor([ids])
    theirs = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()(batch).logits
    error = ((model(batch) - theirs).abs().max() / theirs.abs().max()).item()
    print(f"logits against transformers: relative error {error:.1e}")
    if error > 1e-3:
        raise SystemExit("the checkpoint means something else to transformers than to this script")


# ---------------------------------------------------------------------------------------------------------------------
# The sweep: a process a candidate, some at once, because one model this small leaves a large GPU idle.

def run_candidate(args, changes, output, seconds):
    """Train one candidate in a process of its own and return its training.json. Raise RuntimeError with the last words
    of a process that fails."""
    common = dict(data=args.data, output=output, steps=args.steps, seed=args.seed, max_seconds=seconds)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in {**common, **changes}.items()]
    try:
        subprocess.run([sys.executable, __file__, "--brief", *options], stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, check=True, timeout=seconds + FINISH_SECONDS,
                       env=os.environ | {"OMP_NUM_THREADS": "2"})
    except subprocess.SubprocessError as error:
        words = (error.stdout or b"").decode(errors="replace").splitlines()[-3:]
        raise RuntimeError(f"{type(error).__name__}: {' | '.join(words)}") from error
    return json.loads((output / "training.json").read_text(encoding="utf-8"))


def sweep(args):
    """Train all CANDIDATES within args.max_seconds, keep the best in args.output, print a table."""
    seconds = args.max_seconds / math.ceil(len(CANDIDATES) / args.jobs) - FINISH_SECONDS
    if seconds <= 0:
        raise SystemExit(f"--max-seconds {args.max_seconds:g} leaves no time to train: take more, or more --jobs")
    results = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.jobs) as pool:
        jobs = {}
        for i, changes in enumerate(CANDIDATES):
            output = Path(scratch) / str(i)
            jobs[pool.submit(run_candidate, args, changes, output, seconds)] = changes, output
        for job in as_completed(jobs):
            changes, output = jobs[job]
            try:
                result = job.result()
            except RuntimeError as error:
                print(f"failed: {changes}: {error}", flush=True)
                continue
            print(f"{result['held_out_bits_per_byte']:.4f} bits per byte: {changes}", flush=True)
            results.append((result, changes))
            results.sort(key=lambda r: r[0]["held_out_bits_per_byte"])
            if results[0][0] is result:
                shutil.copytree(output, args.output, dirs_exist_ok=True)    # at once: an interrupted sweep has its best
    if not results:
        raise SystemExit("no candidate of the sweep finished")
    print_table(results)


def print_table(results):
    print("bits/byte  nats/token  training nats  parameters  best step / run  seconds  settings")
    for r, changes in results:
        settings = ", ".join(f"{name} {value}" for name, value in changes.items()) or "the defaults"
        print(f"{r['held_out_bits_per_byte']:9.4f}  {r['held_out_nats']:10.4f}  {r['training_nats']:13.4f}"
              f"  {r['parameters']:10,}  {r['step']:9} / {r['steps_run']:<4}{r['seconds']:8.0f}  {settings}")


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", required=True, help="tinyshakespeare as one text file")
    parser.add_argument("--output", required=True, type=Path, help="directory for the checkpoint")
    for name, value in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help="see SETTINGS")
    parser.add_argument("--brief", action="store_true", help="leave out the check against transformers")
    parser.add_argument("--sweep", action="store_true",
                        help="train CANDIDATES; of the settings above only --steps and --seed count")
    parser.add_argument("--jobs", type=int, default=6, help="processes of the sweep at a time")
    parser.add_argument("--max-seconds", type=float,
                        help="end the training, or the whole sweep (360), within this time")
    args = parser.parse_args()
    args.max_seconds = args.max_seconds or (360.0 if args.sweep else math.inf)
    return args


def main():
    args = parse_arguments()
    if args.sweep:
        sweep(args)
    else:
        print(json.dumps(train(args), indent=2), flush=True)
    if not args.brief:
        check_against_transformers(args.output, args.data)


if __name__ == "__main__":
    main()
