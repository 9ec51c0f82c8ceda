"""Byte pair encoding: the merges of a byte-level vocabulary, and the same merges as ranks for tiktoken.

A piece of text starts as one symbol per byte of its UTF-8. The list of merges names pairs of symbols in the order in
which training found them. Encoding joins the adjacent pair that comes first in this list, and repeats that until no
adjacent pair is listed. Each remaining symbol is a token (Sennrich et al. 2016):

    merges: ("h", "e"), ("l", "l"), ("he", "ll")        h e l l o  ->  he l l o  ->  he ll o  ->  hell o

tiktoken is fast but follows another rule. It joins *any* adjacent pair whose bytes together are a token, lowest rank
first, and it takes a whole piece that is a token without any merge. `tiktoken_ranks` finds ranks for which both rules
give the same tokens. A few vocabularies have no such ranks; `merge` applies the list itself, more slowly.
"""

# GPT-2 writes each byte as one printable character: the byte's own character if printable, else one from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF = {chr(b): b for b in _PRINTABLE}
BYTE_OF |= {chr(0x100 + i): b for i, b in enumerate(b for b in range(256) if b not in _PRINTABLE)}
CHAR_OF = {b: c for c, b in BYTE_OF.items()}
NO_RANK = 1 << 32

Merges = dict[tuple[str, str], int]  # pair of symbols -> its place in the list of merges


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
