"""kveik plan: the arithmetic of a model on this machine, before any memory is taken."""

from __future__ import annotations

import typer

from kveik.cli.command import single
from kveik.cli.fetch import fetch_model
from kveik.cli.options import ENGINE, Settings, takes
from kveik.engine.expected import expected_weight_bytes
from kveik.engine.planner import plan_model
from kveik.model.weights import open_model
from kveik.offload.open_tiers import check_below, lines_below


@takes(*ENGINE)
def plan(settings: Settings) -> None:
    """Tell what fits: blocks, tokens, requests at once.

    \b
    kveik plan qwen2.5-coder-1.5b
    kveik plan qwen2.5-coder-1.5b --max-model-len 32768 --kv-cache-dtype float32
    kveik plan qwen2.5-coder-1.5b --kv-ram-bytes 4GB --kv-disk ~/kv --kv-disk-bytes 50GB

    It reads the model's header and the machine's memory, loads nothing, and prints what `kveik serve` would do with the same
    options, tiers below the pool included; their folder is neither made nor opened. Where they do not fit, it says by how
    much and what would, and ends with exit code 1.

    A model that is not here yet is fetched first, as the other commands do; `kveik models` tells which are here, and how large
    the others are.
    """
    check_below(settings.engine.cache, only_look=True)
    file = open_model(fetch_model(settings.engine.model.model))
    weights = expected_weight_bytes(settings.engine, file)
    fitting = plan_model(settings.engine, file.spec, weight_bytes=weights)
    for line in (*fitting.lines(), *lines_below(settings.engine, fitting)):
        typer.echo(line)


app = single(plan)
