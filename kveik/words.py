"""Numbers with their nouns, in singular and plural."""

from __future__ import annotations


def counted(number: int, noun: str, form: str = "") -> str:
    """`1 record`, `0 records`, `7 entries`. `form`: of the number, as in an f-string; "," sets thousands apart."""
    return f"{number:{form}} {noun if number == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    return f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
