r"""Stop strings: the end of a text, found while the text is still being generated.

Text arrives in deltas, one per token. A stop string may begin in one delta and end in a later one, and it may end in
the middle of a delta. A stream must not print the beginning of a stop string. The checker therefore holds back the end
of the text as long as a stop string begins with that end:

    stop ["\n\nUser:"]      delta  "Yes."  "\n\n"  "Us"    "eful" ...    or    "er: and"
                            shown  "Yes."  ""      ""      "\n\nUseful"        "", and the text ends
"""


class StopChecker:
    """Takes deltas of text and returns the text that may be shown, up to the stop string that is complete first.

    If several stop strings end at the same character, the one listed first ends the text, as in vLLM.

    include: the stop string is part of the text (include_stop_str_in_output); then no text is held back
    matched: the stop string that ended the text, or None
    """

    def __init__(self, stop: list[str], include: bool = False):
        self.stop, self.include = stop, include
        self.matched: str | None = None
        self._begun = ""  # the end of the text, as far as a stop string begins with it

    def add(self, delta: str, may_stop: bool = True) -> str:
        """The text that can be shown now. may_stop=False ignores stop strings that end in this delta (min_tokens)."""
        if self.matched is not None:
            return ""
        text, old = self._begun + delta, len(self._begun)
        shown = old if self.include else 0
        # A stop string that ends in the delta begins at most its length - 1 before the delta.
        ends = [(place + len(string), i) for i, string in enumerate(self.stop)
                if may_stop and (place := text.find(string, max(0, old - len(string) + 1))) >= 0]
        if ends:
            end, i = min(ends)  # the first of those that end there
            self.matched, self._begun = self.stop[i], ""
            return text[shown:end if self.include else end - len(self.matched)]
        # From here on the text is the beginning of a stop string, and not all of it.
        held = next((i for i in range(len(text)) if any(
            string.startswith(text[i:]) and string != text[i:] for string in self.stop)), len(text))
        self._begun = text[held:]
        return text[shown:] if self.include else text[:held]

    def finish(self) -> str:
        """The text that was held back, when generation has ended without a stop string."""
        rest, self._begun = "" if self.include else self._begun, ""
        return rest
