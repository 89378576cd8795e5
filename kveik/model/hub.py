"""Models by hub id, `org/name`, where the Hugging Face hub can be reached. Fetches what we read and nothing else.

The files go into the hub library's own cache, which other tools share, so what one of them has fetched is here already. The
library is there in any case, since `tokenizers` needs it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import tqdm

from kveik.errors import Unreachable, Unsupported
from kveik.model.catalogue import CATALOGUE, Progress, PullProgress

PATTERNS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jin*"),
    "additional_chat_templates/*.jinja",
    *("*.safetensors", "*.safetensors.index.json"),
)
"""Names of the files that are fetched. Weights in pickled formats are not: reading them runs code."""

_TIMEOUT_SECONDS = 10.0


def pull_hub(hub_id: str, *, progress: Progress) -> Path:
    """The folder of a hub model, fetched where it is not in the hub library's cache yet.

    Raises `Unreachable` where the hub or the model cannot be had, and `Unsupported` for a model without safetensors weights.
    """
    try:
        revision, sizes = _files(hub_id)
        return _download(hub_id, revision, sizes, progress)
    except Unsupported:
        raise
    except GatedRepoError as error:
        raise Unreachable(
            f"{hub_id} is gated: its owners give access on its page; then log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise Unreachable(f"The hub has no model '{hub_id}', or it is private; `hf auth whoami` tells who asks.") from error
    except HFValidationError as error:
        raise Unreachable(f"'{hub_id[:100]}' is not a name that the hub can have. Use organisation/name.") from error
    except Exception as error:
        # So wide because the library lets errors of the HTTP client below it through, and that client has changed.
        return _cached(hub_id, error)


def _files(hub_id: str) -> tuple[str, dict[str, int]]:
    """The commit that the model stands at, and name -> bytes of the files that we read."""
    info = HfApi().model_info(hub_id, files_metadata=True, timeout=_TIMEOUT_SECONDS)
    names = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    sizes = {name: size for name, size in names.items() if any(fnmatch.fnmatch(name, pattern) for pattern in PATTERNS)}
    if not any(name.endswith(".safetensors") for name in sizes):
        raise Unsupported(f"{hub_id} has no *.safetensors weights; kveik reads those and .gguf files.")
    assert info.sha is not None
    return info.sha, sizes


def _download(hub_id: str, revision: str, sizes: dict[str, int], progress: Progress) -> Path:
    total, before, arrived = sum(sizes.values()), 0, 0

    def count(more: int) -> None:
        nonlocal arrived
        arrived += more
        progress(PullProgress("downloading", min(before + arrived, total), total))

    for name, size in sizes.items():
        hf_hub_download(hub_id, name, revision=revision, tqdm_class=_counter(count))
        # A file that was in the cache already has not been counted on the way.
        before, arrived = before + size, 0
        count(0)
    # Nothing is left to fetch, but only this writes down which commit the name stands for; without it the model could not be
    # found again offline.
    return Path(str(snapshot_download(hub_id, allow_patterns=list(PATTERNS), tqdm_class=_counter(lambda _: None))))


def _counter(count: Callable[[int], None]) -> type[tqdm]:
    """A progress bar that shows nothing and passes on what it is told."""

    class Counter(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]  # as the library has it

        def update(self, n: float | None = 1) -> None:
            count(int(n or 0))

    return Counter


def _cached(hub_id: str, error: Exception) -> Path:
    """The folder that an earlier pull left in the library's cache, where it is whole; for a machine that is offline now."""
    try:
        folder = Path(str(snapshot_download(hub_id, allow_patterns=list(PATTERNS), local_files_only=True)))
    except (OSError, ValueError):
        # The library's own errors are of these two kinds: nothing in its cache, or a cache that cannot be read.
        folder = None
    if folder is None or not (folder / "config.json").exists() or not any(folder.glob("*.safetensors")):
        raise Unreachable(
            f"The hub could not be asked for {hub_id} ({type(error).__name__}). These come from the package index instead: "
            f"{', '.join(CATALOGUE)}. A folder or .gguf file that was fetched elsewhere works too: kveik serve PATH."
        ) from error
    return folder
