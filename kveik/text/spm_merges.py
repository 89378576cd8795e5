"""Merges for a SentencePiece vocabulary, which has scores instead. Pure arithmetic on strings."""

from __future__ import annotations

from collections.abc import Sequence

Merge = tuple[str, str]


def merges_from_scores(
    texts: Sequence[str], scores: Sequence[float], *, first: Sequence[int], ordinary: Sequence[int]
) -> list[Merge]:
    """Every way to make a token from two others, best first.

    texts, scores [vocabulary]; `first` are ids whose merges precede all others (user-defined pieces, which SentencePiece finds
    before it merges), `ordinary` the ids that merging may make. Control and byte pieces are in neither: SentencePiece never
    makes them from text. Order: score, higher first; among equals the longer left part, as `generate_merges` of transformers
    (Apache-2.0) has it, so that ids agree. Takes about 1 s for 262,144 tokens: candidates are looked up, never compared.
    """
    known = frozenset(texts)
    merges = [merge for token in first for merge in _splits(texts[token], known)]
    best_first = sorted(ordinary, key=lambda token: -scores[token])
    start = 0
    while start < len(best_first):
        end = start + 1
        while end < len(best_first) and scores[best_first[end]] == scores[best_first[start]]:
            end += 1
        merges += _merges_of_equals([texts[token] for token in best_first[start:end]], known)
        start = end
    return merges


def _splits(text: str, known: frozenset[str]) -> list[Merge]:
    """The cuts of `text` into two known pieces, longest left part first."""
    return [(text[:cut], text[cut:]) for cut in range(len(text) - 1, 0, -1) if text[:cut] in known and text[cut:] in known]


def _merges_of_equals(texts: Sequence[str], known: frozenset[str]) -> list[Merge]:
    merges = [merge for text in texts for merge in _splits(text, known)]
    if len(texts) > 1:
        merges.sort(key=lambda merge: (-len(merge[0]), -len(merge[1])))
    return merges
