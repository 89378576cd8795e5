"""Writes docs/CONFIGURATION.md from the settings themselves: `python docs/configuration.py > docs/CONFIGURATION.md`."""

from __future__ import annotations

import sys
from collections import defaultdict

from kveik.cli.options import CACHE, MODEL, SAMPLING, SCHEDULE, SERVER, STREAM
from kveik.cli.renamed_options import FOREIGN
from kveik.cli.setting import Setting, Slice, settings_of

_WHERE = (
    (MODEL, "`serve`, `chat`, `generate`, `plan`, `bench`, `evaluate`"),
    (CACHE, "`serve`, `chat`, `generate`, `plan`, `bench`, `evaluate`"),
    (SCHEDULE, "`serve`, `chat`, `generate`, `plan`, `bench`, `evaluate`"),
    (
        STREAM,
        "`serve`, `chat` (which draws its seed at every start unless one is given), `generate`, `plan`, `bench`, `evaluate`",
    ),
    (SERVER, "`serve`"),
    (
        SAMPLING,
        "`chat`, `generate`; for a server these are fields of the request, with OpenAI's defaults (temperature and top-p 1)",
    ),
)

_HEAD = """# Configuration

This page is generated: `make docs` writes it from the docstrings of `kveik/config.py` and `kveik/request/request.py`, and a
test compares it with them.

A setting's value is the command line's, else the file's that `--config` names, else its default. The file is TOML, one setting
per line, named as on the command line without the dashes in front. One file may hold the settings of several commands; each
takes its own. A name that no command knows is refused.

```toml
# for example kveik.toml, given as: kveik serve --config kveik.toml
model = "qwen2.5-coder-0.5b"
max-model-len = 8192
max-num-seqs = 16
enable-prefix-caching = true
served-model-name = ["coder", "default"]
```

Environment variables are read by the command line alone: `KVEIK_HOME`, the folder for what is fetched or made (default:
`$XDG_CACHE_HOME/kveik`, else `~/.cache/kveik`); `KVEIK_ISA`, the instruction set of the native kernels (portable, avx2, avx512,
avx512_bf16; default: the best that the processor has); and those that pip reads, because pip fetches the catalogue's models.
"""

_FOREIGN_HEAD = """
## Names from elsewhere

Options of other servers are refused with the name that they have here, never ignored.

| theirs | of | here |
|---|---|---|
"""


def configuration_page() -> str:
    """The whole page, as Markdown."""
    return _HEAD + "".join(_section(slice_, where) for slice_, where in _WHERE) + _FOREIGN_HEAD + _foreign_rows()


def _section(slice_: Slice, where: str) -> str:
    rows = "".join(map(_row, settings_of(slice_)))
    doc = (slice_.type.__doc__ or "").strip()
    return f"\n## {slice_.heading}\n\n{doc}\n\nFor {where}.\n\n| setting | value | default | |\n|---|---|---|---|\n{rows}"


def _row(setting: Setting) -> str:
    name = "`MODEL`, in a file `model`" if setting.positional else f"`{'/'.join(setting.flags)}`"
    default = "" if setting.default_text is None else f"`{setting.default_text}`"
    return f"| {name} | {_cell(setting.kind_text)} | {default} | {_cell(setting.help)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _foreign_rows() -> str:
    same: dict[tuple[str, str], list[str]] = defaultdict(list)
    for flag, foreign in FOREIGN.items():
        same[foreign.source, foreign.advice].append(f"`{flag}`")
    return "".join(f"| {', '.join(flags)} | {source} | {_cell(advice)} |\n" for (source, advice), flags in same.items())


if __name__ == "__main__":
    sys.stdout.write(configuration_page())
