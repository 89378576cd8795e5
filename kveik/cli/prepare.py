"""Checks and inputs of commands before anything slow is imported: ports, secrets, prompts, baselines."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kveik.cli.baselines import baseline_of
from kveik.cli.command import WrongLine
from kveik.cli.fetch import with_model
from kveik.cli.options import Settings
from kveik.config import CacheConfig, ServerConfig
from kveik.errors import BadValue, Unreachable
from kveik.model.catalogue import home_folder
from kveik.server.sockets import listen

log = logging.getLogger(__name__)


def prepare_serve(settings: Settings, own: dict[str, Any], held: ExitStack) -> None:
    """Takes the port, and reads or makes the tenants' secret."""
    server = settings.of(ServerConfig)
    logging.basicConfig(level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    own["secret"] = b""
    # Without keys there is one tenant, and no reason to leave a file behind.
    if server.api_key:
        # Late because starlette takes a tenth of a second, which `kveik --help` should not cost.
        own["secret"] = importlib.import_module("kveik.server.auth").tenant_secret(secret_file(server))
    own["sockets"] = [held.enter_context(sock) for sock in listen(server.host, server.port)]
    if (note := unshared(server, settings.of(CacheConfig))) is not None:
        log.info("%s", note)


def prepare_generate(_: Settings, own: dict[str, Any], __: ExitStack) -> None:
    """Reads the prompts."""
    own["prompts"] = prompts_of(own.pop("prompt") or (), own.pop("prompts_file"))


def prepare_evaluate(settings: Settings, own: dict[str, Any], _: ExitStack) -> None:
    """Makes the baseline's configuration, and fetches its model."""
    try:
        baseline = baseline_of(settings.engine, own.pop("against"))
    except BadValue as error:
        raise WrongLine(error.message) from error
    own["baseline"] = with_model(baseline)


def secret_file(server: ServerConfig) -> Path:
    """The file of the tenants' secret."""
    return Path(server.tenant_secret_file) if server.tenant_secret_file else home_folder() / "tenant-secret"


def unshared(server: ServerConfig, cache: CacheConfig) -> str | None:
    """Note for tenants with a remote tier and a secret that this host makes for itself; None where there is nothing to note."""
    if not (cache.kv_remote and server.api_key) or server.tenant_secret_file:
        return None
    return (
        f"Tenants' blocks at --kv-remote are found by servers with the same secret alone; this one has {secret_file(server)}, "
        "which every KVEIK_HOME makes for itself. To share with others, give all of them a copy with --tenant-secret-file."
    )


def prompts_of(typed: Sequence[str], path: Path | None) -> list[str]:
    """All prompts in order. Raises BadValue where there is none, or where a line of the file is not a prompt."""
    prompts = list(typed) if path is None else [*typed, *_read(path)]
    if not prompts:
        raise BadValue("There is no prompt. Give one with -p TEXT, or a file of them with --prompts-file.", param="prompt")
    return prompts


def _read(path: Path) -> list[str]:
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreachable(f"The prompts in {path} are not UTF-8: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise Unreachable(f"The prompts cannot be read from {path}: {error.strerror}.") from error
    # Not splitlines(), which also cuts at characters that belong to a text, such as U+2028.
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    return [_json_prompt(line, number) for number, line in enumerate(lines, 1)] if path.suffix == ".jsonl" else lines


def _json_prompt(line: str, number: int) -> str:
    """The prompt of one JSON line: a string, or an object with a `prompt`."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadValue(f"Prompt {number} of the file is not valid JSON: {error}.", param="prompts_file") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise BadValue(f'Prompt {number} of the file must be a string, or an object with a "prompt".', param="prompts_file")
    return prompt
