"""Texts to measure a model on: two that every Python brings along, or a file. Independent of tokens and models.

They are the same on every machine with the same Python, which is all that a comparison of two configurations needs: both read
the same tokens. They are no benchmark of models against each other, since a model may have been trained on them.
"""

from __future__ import annotations

import platform
import pydoc_data.topics
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from kveik.errors import BadValue, Unreachable

FILE_BYTES = 8 << 20
"""Bytes of a file that are read at most: about two million tokens, more than any measurement takes."""

CODE = (
    *("argparse.py", "ast.py", "bisect.py", "calendar.py", "cmd.py", "configparser.py", "contextlib.py", "csv.py"),
    *("dataclasses.py", "difflib.py", "enum.py", "fractions.py", "functools.py", "gettext.py", "heapq.py", "inspect.py"),
    *("ipaddress.py", "optparse.py", "pprint.py", "queue.py", "random.py", "selectors.py", "shlex.py", "shutil.py"),
    *("statistics.py", "string.py", "subprocess.py", "tarfile.py", "textwrap.py", "threading.py", "tokenize.py", "uuid.py"),
)
"""Modules of the standard library, those of them that this Python has: 0.9 MB in Python 3.11."""


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """A text and where it is from."""

    name: str
    """english, code, or the name of a file."""

    origin: str
    """A phrase for people: which text in which version."""

    text: str


def heldout_text(source: str) -> HeldOutText:
    """`english`: Python's help on its language. `code`: its standard library. Anything else: the path of a file in UTF-8.

    Raises Unreachable for a file that cannot be read, BadValue for one without text.
    """
    if source == "english":
        topics = pydoc_data.topics.topics
        text = "\n\n".join(topics[name] for name in sorted(topics))
        return HeldOutText(source, f"pydoc_data.topics of Python {platform.python_version()}", text)
    if source == "code":
        return HeldOutText(source, f"the standard library of Python {platform.python_version()}", _library())
    path = Path(source)
    text = _read(path)
    if not text.strip():
        raise BadValue(f"The text in {path} is empty.", param="text")
    return HeldOutText(path.name, f"the file {path.name}", text)


def _library() -> str:
    folder = Path(sysconfig.get_path("stdlib"))
    parts = [path.read_text(encoding="utf-8") for name in CODE if (path := folder / name).is_file()]
    if not parts:
        # Zipped or stripped: Python runs without its sources.
        raise Unreachable("This Python keeps no sources of its standard library; give a text with --text FILE.")
    return "\n\n".join(parts)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES)
    except OSError as error:
        raise Unreachable(
            f"The text {path} cannot be read: {error.strerror}. --text is the path of a file, or 'english', or 'code'."
        ) from error
    if (nul := content.find(0)) >= 0:
        # Valid UTF-8, but no text has it; UTF-16 and most binary formats do.
        raise BadValue(f"The file {path} is not text in UTF-8: it has a byte 0 at {nul}.", param="text")
    # What was cut off at the end may be half a character.
    ignored = 3 if len(content) == FILE_BYTES else 0
    for cut in range(ignored + 1):
        try:
            return content[: len(content) - cut].decode("utf-8")
        except UnicodeDecodeError as error:
            problem = error
    raise BadValue(f"The file {path} is not text in UTF-8: {problem.reason} at byte {problem.start}.", param="text")
