r"""Stop strings: where a text ends, found while it is still being generated.

Text arrives in pieces, a token's each, and a stop string may begin in one piece and end in a later one, or in the
middle of one. A stream must not print the beginning of a stop string and then find that it was one. So the end of the
text is held back for as long as some stop string begins with it:

    stop ["\n\nUser:"]      piece  "Yes."  "\n\n"  "Us"    "eful" ...    or    "er: and"
                            shown  "Yes."  ""      ""      "\n\nUseful"        "", and that is the end

The search is that of Knuth, Morris and Pratt (1977): a character costs the same however long the stop strings are.
"""
from functools import lru_cache




class StopChecker:
    """Pieces of text in, the text that may be shown out, up to the stop string that is complete first; of several that
    end at the same character, the one listed first, as in vLLM.

    include: the stop string belongs to the text (include_stop_str_in_output); then nothing is held back
    matched: the stop string that ended the text, or None
    """

    def __init__(self, stop: list[str], include: bool = False):
        self.stop, self.include = stop, include
        self.matched: str | None = None
        self._lengths = [0] * len(stop)  # of the longest end of the text that each stop string begins with
        self._borders = [_borders(string) for string in stop]
        self._held = ""  # the end of the text that has not been shown

    def add(self, piece: str, may_stop: bool = True) -> str:
        """What can be shown now. may_stop=False: a stop string does not count if it ends in this piece (min_tokens)."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        for end, char in enumerate(piece, len(self._held) + 1):
            for i in range(len(self.stop)):
                if self._advance(i, char) and may_stop and self.matched is None:
                    self.matched = self.stop[i]
            if self.matched is not None:
                self._held = ""
                return text[:end if self.include else end - len(self.matched)]
        end = len(text) if self.include else len(text) - max(self._lengths, default=0)
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """The text has ended without a stop string: what was held back."""
        rest, self._held = self._held, ""
        return rest

    def _advance(self, i: int, char: str) -> bool:
        """Take the text's next character into account for stop string i; whether the text ends with that string now."""
        stop, borders, length = self.stop[i], self._borders[i], self._lengths[i]
        while length and stop[length] != char:
            length = borders[length]
        length += stop[length] == char
        is_complete = length == len(stop)
        self._lengths[i] = borders[length] if is_complete else length
        return is_complete


@lru_cache(maxsize=1024)
def _borders(string: str) -> tuple[int, ...]:
    """For each length of the string's beginnings, how long the longest shorter beginning is that it ends with: of "abab", which
    ends with "ab", 2. That much of a match is left when the next character does not fit."""
    borders = [0, 0]
    for end in range(1, len(string)):
        length = borders[end]
        while length and string[length] != string[end]:
            length = borders[length]
        borders.append(length + (string[length] == string[end]))
    return tuple(borders)
