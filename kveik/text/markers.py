"""Separation of text that looks like a template marker from the markers that the template writes.

Before rendering, a sentinel (an unused private-use character) is put inside every look-alike in the strings that
come from outside. After rendering, the markers that are still whole are the template's own: the text is cut there, and the
rest, with the sentinel taken out, is encoded with those markers switched off.

    from outside   "say <|im_end|> twice"     ->  "say <·|im_end|> twice"
    rendered       "<|im_start|>user\\nsay <·|im_end|> twice<|im_end|>\\n"
    cut            marker, "user\\nsay <|im_end|> twice" as plain text, marker, "\\n"

A string that begins with the end of a marker, or ends with the beginning of one, gets the sentinel too: its neighbour may be
another string from outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from kveik.errors import BadValue
from kveik.text.messages import ToolArguments
from kveik.text.tokenizer import Tokenizer

_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_PRIVATE_USE_CHARACTERS = re.compile("[\U000f0000-\U000ffffd]")
_TAG = re.compile(r"[<\[{]\S+[>\]}]")


class Markers:
    """A set of added tokens that only a template may write."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """`tokens`: id by text; a text has at least two characters, as the sentinel goes inside."""
        self.ids = frozenset(tokens.values())
        self._tokens = dict(tokens)
        self._any = re.compile(_alternatives(_tree(tokens)) if tokens else "(?!)")
        self._starts = frozenset(text[:cut] for text in tokens for cut in range(1, len(text)))
        self._ends = frozenset(text[cut:] for text in tokens for cut in range(1, len(text)))
        self._longest = max(map(len, tokens), default=0)

    def disarm(self, value: object, sentinel: str) -> object:
        """The same value with the sentinel inside every look-alike in its strings, mappings' keys included."""
        if isinstance(value, str):
            return self.disarm_text(value, sentinel)
        if isinstance(value, ToolArguments):
            pairs = {self.disarm_text(key, sentinel): self.disarm(item, sentinel) for key, item in value.items()}
            return ToolArguments(pairs, self.disarm_text(str(value), sentinel))
        if isinstance(value, Mapping):
            return {self.disarm(key, sentinel): self.disarm(item, sentinel) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.disarm(item, sentinel) for item in value]
        return value

    def disarm_text(self, text: str, sentinel: str) -> str:
        # Again and again, because look-alikes may overlap and only one of them is broken at a time.
        while self._any.search(text):
            text = self._any.sub(lambda match: match[0][:1] + sentinel + match[0][1:], text)
        lengths = range(1, min(self._longest, len(text) + 1))
        if any(text[:length] in self._ends for length in lengths):
            text = sentinel + text
        if any(text[-length:] in self._starts for length in lengths):
            text += sentinel
        return text

    def encode(self, text: str, tokenizer: Tokenizer, sentinel: str) -> list[int]:
        """The ids of a rendered text: whole markers are tokens, all else is plain text, and the sentinel is nothing."""
        rules = tokenizer.added_tokens()
        ids: list[int] = []
        start, strip = 0, False
        for match in self._any.finditer(text):
            token = self._tokens[match[0]]
            between = text[start : match.start()].replace(sentinel, "")
            between = between.lstrip() if strip else between
            between = between.rstrip() if rules[token].lstrip else between
            ids += tokenizer.encode_without(between, self.ids)
            ids.append(token)
            start, strip = match.end(), rules[token].rstrip
        ending = text[start:].replace(sentinel, "")
        return ids + tokenizer.encode_without(ending.lstrip() if strip else ending, self.ids)


def special_markers(tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens, which mean something wherever they stand: id by text."""
    texts = {tokenizer.added_tokens()[token].content: token for token in tokenizer.special_ids}
    return {text: token for text, token in texts.items() if len(text) > 1}


def tag_markers(tokenizer: Tokenizer, source: str) -> dict[str, int]:
    """User-defined tokens that look like a tag and that this template writes, such as <tool_call>: id by text."""
    added = tokenizer.added_tokens().items()
    return {
        each.content: token
        for token, each in added
        if not each.special and _TAG.fullmatch(each.content) and each.content in source
    }


def unused_character(*values: object) -> str:
    """A private-use character that occurs nowhere in these strings, mappings and lists. Raises `BadValue` if all do."""
    used = {found for text in _strings(values) for found in _PRIVATE_USE_CHARACTERS.findall(text)}
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise BadValue(f"The messages use all {len(_PRIVATE_USE)} private-use characters of plane 15; one must be free.")


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value.items()))
        if isinstance(value, ToolArguments):
            yield str(value)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


class _Tree(dict[str, "_Tree"]):
    """Characters in order; `ends` where a text ends."""

    ends = False


def _tree(texts: Mapping[str, int]) -> _Tree:
    root = _Tree()
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, _Tree())
        node.ends = True
    return root


def _alternatives(node: _Tree) -> str:
    """A pattern for the tree: one test per character, where a list of thousands of markers would be tried one by one."""
    if not node:
        return ""
    branches = "|".join(re.escape(character) + _alternatives(child) for character, child in node.items())
    return f"(?:{branches})" + ("?" if node.ends else "")
