r"""Stop strings: the end of a text, found while the text is still being generated.

Text arrives in deltas, one per token. A stop string may begin in one delta and end in a later one, and it may end in
the middle of a delta. A stream must not print the beginning of a stop string. The checker therefore holds back the end
of the text as long as a stop string begins with that end:

    stop ["\n\nUser:"]      delta  "Yes."  "\n\n"  "Us"    "eful" ...    or    "er: and"
                            shown  "Yes."  ""      ""      "\n\nUseful"        "", and the text ends

The search is that of Knuth, Morris and Pratt (1977): its cost per character does not depend on the length of the stop
strings.
"""
from functools import lru_cache


class StopChecker:
    """Takes deltas of text and returns the text that may be shown, up to the stop string that is complete first.

    If several stop strings end at the same character, the one listed first ends the text, as in vLLM.

    include: the stop string is part of the text (include_stop_str_in_output); then no text is held back
    matched: the stop string that ended the text, or None
    """

    def __init__(self, stop: list[str], include: bool = False):
        self.stop = stop
        self.include = include
        self.matched: str | None = None
        self._lengths = [0] * len(stop)  # for each stop string, the length of its beginning that ends the text now
        self._borders = [_borders(string) for string in stop]
        self._held = ""  # the end of the text that has not been shown

    def add(self, delta: str, may_stop: bool = True) -> str:
        """The text that can be shown now. may_stop=False ignores stop strings that end in this delta (min_tokens)."""
        if self.matched is not None:
            return ""
        text = self._held + delta
        for end, char in enumerate(delta, len(self._held) + 1):
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
        """The text that was held back, when generation has ended without a stop string."""
        rest, self._held = self._held, ""
        return rest

    def _advance(self, i: int, char: str) -> bool:
        """Match the text's next character against stop string i. True if the text now ends with that string."""
        stop = self.stop[i]
        borders = self._borders[i]
        length = self._lengths[i]
        while length and stop[length] != char:
            length = borders[length]
        length += stop[length] == char
        is_complete = length == len(stop)
        self._lengths[i] = borders[length] if is_complete else length
        return is_complete


@lru_cache(maxsize=1024)
def _borders(string: str) -> tuple[int, ...]:
    """For each prefix of the string, the length of the longest shorter prefix that is also its suffix ("abab": 2).

    If the next character does not fit, this much of the match remains.
    """
    borders = [0, 0]
    for end in range(1, len(string)):
        length = borders[end]
        while length and string[length] != string[end]:
            length = borders[length]
        borders.append(length + (string[length] == string[end]))
    return tuple(borders)
