"""Train the model that nanopaged bundles: a Qwen3-shaped decoder of at most 4M parameters on tinyshakespeare.

    python nanopaged/shakespeare/train.py --data tinyshakespeare.txt --output DIR
    python engine.py --model DIR --prompt "ROMEO:"                                   # what it writes

It needs `torch`, `tokenizers` and `safetensors`, and leaves a directory in Hugging Face layout, which anything that
reads Qwen3 can load (nanopaged/golden/make_models.py --reference makes transformers compute its logits). It knows
nothing about paging, and the engine knows nothing about it: it is here so that the bundled weights have no secret.

The text is one megabyte, so the trouble is memorising, not learning: a model of this size can recite the training text
after a few hundred passes. Against that stand dropout, weight decay, an average of the weights over the last few
hundred steps (EMA), training text that is tokenised a little differently each time (BPE-dropout, Provilkov et al. 2020,
so that there is more than one token sequence to recite), and keeping the weights with the best held-out loss. The last
tenth of the text is held out, from the tokenizer too. Losses are printed in nats per token, and in bits per byte, which
can be compared between vocabularies.

How the size was chosen: by runs on one H200 (2026-11-21). What a repository can carry without Git LFS, 8 MB, allows 4M
parameters in bfloat16, and at that size the learning rate, the shape and the vocabulary matter little; half the
parameters cost 0.05 bits per byte. Bundled is the first row, which SETTINGS has. It has begun to recite (training text
2.49 nats per token), which is where it was stopped.

    bits/byte  nats/token  training nats  parameters  best step   what differs from the bundled model
       2.006      3.200          2.493       3.90M         700    nothing
       2.030      3.239          2.545       3.90M         800    lr 0.001, and so in all rows below
       2.013      3.480          2.696       3.74M         800    vocabulary 1536, intermediate 512
       2.020      3.222          2.562       3.90M        1390    dropout 0.3, weight decay 1.0
       2.025      3.231          2.516       3.84M        1100    8 layers, hidden 192
       2.032      3.689          2.918       3.87M         700    vocabulary 2048, intermediate 512
       2.048      3.266          2.618       3.90M         600    no BPE-dropout
       2.055      3.278          2.599       3.85M         700    4 layers, hidden 320, intermediate 704
       2.058      3.283          2.578       1.87M         900    4 layers, hidden 192, dropout 0.1
"""

import argparse
import copy
import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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
    steps=2500, warmup=100, lr=2e-3, weight_decay=0.3,
    dropout=0.2,            # on embeddings, attention and residual branches
    bpe_dropout=0.05,       # rate of skipped merges in the training text's variants
    ema=0.995,              # decay of the average of the weights, per step
    eval_every=100,         # steps
    seed=0)


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

    @torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda")
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


def encode_streams(tokenizer, text, bpe_dropout, variants=16):
    """The text as one tensor of ids, followed by `variants` more tensors, in which each merge was skipped at rate
    bpe_dropout."""
    encoded = tokenizer.encode_batch([text])
    if bpe_dropout:
        tokenizer.model.dropout = bpe_dropout
        encoded += tokenizer.encode_batch([text] * variants)
        tokenizer.model.dropout = None
    return [torch.tensor(e.ids, device=DEVICE) for e in encoded]


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

@torch.no_grad()
def evaluate(model, stream, num_bytes, context):
    """(nats per token, bits per byte) of a whole token stream, cut into windows of `context` predictions."""
    rows = list(stream[:-1].split(context)), list(stream[1:].split(context))
    inputs, targets = (nn.utils.rnn.pad_sequence(r, batch_first=True, padding_value=p) for r, p in zip(rows, (0, -100)))
    nats = 0.0
    for x, y in zip(inputs.split(16), targets.split(16)):
        nats += F.cross_entropy(model(x).float().flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum").item()
    return nats / (len(stream) - 1), nats / math.log(2) / num_bytes


def train_step(model, average, optimizer, batch, lr, ema):
    """One update of the model and of the running average of its weights; returns the loss, still on the device."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - ema)
    return loss.detach()


def fit(model, streams, held_out, num_bytes, args):
    """Train; return the averaged model with the weights of the best held-out loss, and the record of that moment.

    Windows are as long as the longest sequence to be generated. Rope sees only distances, so moving shorter windows to
    random positions would teach nothing about far ones.
    """
    average, best, record = copy.deepcopy(model).eval(), None, dict(held_out_nats=math.inf, step=0)
    # The norms' gains do not decay.
    groups = [dict(params=[p for p in model.parameters() if p.dim() == 2], weight_decay=args.weight_decay),
              dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=DEVICE == "cuda")
    step, started = 0, time.time()
    # Eight evaluations without a better one: by now it only memorises.
    while step < args.steps and step - record["step"] < 8 * args.eval_every:
        progress = (step + 1) / args.steps
        lr = args.lr * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2) * min(1, (step + 1) / args.warmup)
        # Variants of the text at first, fewer and fewer of them, and at the end only text as prompts are tokenised.
        batch = draw_batch(streams, args.batch_size, args.context, varied=1 - progress)
        loss = train_step(model, average, optimizer, batch, lr, ema=min(args.ema, (1 + step) / (10 + step)))
        step += 1
        if step % args.eval_every and step < args.steps:
            continue
        nats, bits = evaluate(average, held_out, num_bytes, args.context)
        seen, _ = evaluate(average, streams[0][:len(held_out)], num_bytes, args.context)
        print(f"step {step:5d}  {time.time() - started:5.0f} s  nats per token: batch {loss.item():.3f}, "
              f"training text {seen:.3f}, held out {nats:.4f} ({bits:.4f} bits per byte)", flush=True)
        if nats < record["held_out_nats"]:
            best = copy.deepcopy(average.state_dict())
            record = dict(held_out_nats=nats, held_out_bits_per_byte=bits, training_nats=seen, step=step)
    if best is None:
        raise SystemExit(f"the loss is not a number: --lr {args.lr} is too high for this size")
    average.load_state_dict(best)
    return average, record | dict(steps_run=step, seconds=round(time.time() - started, 1))


def train(args):
    """Train one model and write it to args.output; returns what training.json says."""
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    text = args.data.read_text(encoding="utf-8")
    train_text, held_out_text = text[:len(text) * 9 // 10], text[len(text) * 9 // 10:]
    tokenizer = train_tokenizer(train_text, args.vocab_size)
    streams = encode_streams(tokenizer, train_text, args.bpe_dropout)
    held_out, = encode_streams(tokenizer, held_out_text, 0)
    first_token = tokenizer.decode(held_out[:1].tolist())  # it is given, not predicted
    num_bytes = len(held_out_text.encode()) - len(first_token.encode())
    config = make_config(args)
    model = Decoder(config, args.dropout).to(DEVICE)
    sizes = dict(parameters=sum(p.numel() for p in model.parameters()), training_tokens=len(streams[0]),
                 held_out_tokens=len(held_out))
    print(*(f"{name} {size:,}" for name, size in sizes.items()), DEVICE, flush=True)
    model, record = fit(model, streams, held_out, num_bytes, args)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())     # what is kept is bfloat16, so that is what is judged
    record["held_out_nats"], record["held_out_bits_per_byte"] = evaluate(model, held_out, num_bytes, args.context)
    summary = sizes | record | dict(settings={name: vars(args)[name] for name in SETTINGS})
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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="tinyshakespeare as one text file")
    parser.add_argument("--output", required=True, type=Path, help="directory for the checkpoint")
    for name, value in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help="see SETTINGS")
    print(json.dumps(train(parser.parse_args()), indent=2), flush=True)


if __name__ == "__main__":
    main()
