"""The files that docs/ARCHITECTURE.md lists for a step are the files whose code runs in one, as real engines show."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import pytest

from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.engine.engine import StepReport
from kveik.engine.llm import LLM
from kveik.request.request import SamplingParams
from tests.engine.tiered import believe, mover, read
from tests.engine.tiny import save_tiny_llama
from tests.tidy.sources import ROOT, text_of

PAGE = text_of(ROOT / "docs" / "ARCHITECTURE.md")
BEHIND = ("clock.py", "cache/eviction/", "model/", "kernels/", "sample/", "observe/")
"""What a step calls and its reader need not open: each stands behind one name that the page gives."""

BEHIND_THE_MOVER = (
    "offload/availability.py",
    "offload/counts.py",
    "offload/block_load.py",
    "offload/reader.py",
    "offload/tier_thread.py",
    "offload/writer.py",
    "offload/stores/",
)
STEP_LIMIT, TIERS_LIMIT = 20, 12
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)

Files = frozenset[str]


def listed(heading: str) -> Files:
    """Files in the table below a heading of the page, which begins with these words and ends with their number."""
    part = re.search(rf"^### {heading}: (\d+)(?: more)?\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    assert part, f"the page has no heading that begins with {heading!r}"
    files = re.findall(r"^\| `([\w/]+\.py)` \|", part[2], re.MULTILINE)
    assert len(files) == len(set(files)) == int(part[1]), f"{heading}: {part[1]} in the heading, {len(files)} in the table"
    return frozenset(files)


class Watched:
    """An engine, and the files of kveik whose code each of its steps ran on the step thread."""

    def __init__(self, model: Path, *, ram_bytes: int | None = None) -> None:
        self.llm = LLM(
            EngineConfig(
                model=ModelConfig(model=str(model), dtype="float32", max_model_len=512),
                cache=CacheConfig(num_gpu_blocks_override=40, kv_ram_bytes=ram_bytes),
                schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=256, prefill_chunk_size=128),
            )
        )
        self.steps: list[Files] = []
        self._step = self.llm.loaded.engine.step
        self.llm.loaded.engine.step = self._watched  # type: ignore[method-assign]  # watched while it runs

    def _watched(self) -> StepReport:
        modules: set[str] = set()

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                # Not the code's own file: methods that dataclasses write have none.
                modules.add(frame.f_globals.get("__name__", ""))

        sys.setprofile(note)
        try:
            return self._step()
        finally:
            sys.setprofile(None)
            names = [name.removeprefix("kveik.").replace(".", "/") + ".py" for name in modules if name.startswith("kveik.")]
            self.steps.append(frozenset(name for name in names if not name.startswith(BEHIND)))

    def ask(self, *prompts: Sequence[int]) -> list[Files]:
        """Answers them together. Returns the files of each step."""
        first = len(self.steps)
        self.llm.generate(list(prompts), GREEDY)
        return self.steps[first:]


def prompts(count: int) -> list[list[int]]:
    chance = random.Random(7)
    return [[number, *(chance.randrange(256) for _ in range(329))] for number in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def without_tiers(model: Path) -> tuple[Files, Files]:
    """Files of one step that only decodes, and of all steps of requests that share a beginning and evict others' blocks."""
    engine = Watched(model)
    first, second, *others = prompts(5)
    # The last step but one: the last ends the answer.
    decode = engine.ask(first)[-2]
    for asked in ([second, second], *([one] for one in others), [first]):
        engine.ask(*asked)
    engine.llm.close()
    return decode, frozenset[str]().union(*engine.steps)


def test_a_decode_runs_the_files_that_the_page_lists(without_tiers: tuple[Files, Files]) -> None:
    decode, _ = without_tiers
    assert decode == listed("A decode")
    assert len(decode) <= STEP_LIMIT


def test_other_steps_run_the_files_that_the_page_adds(without_tiers: tuple[Files, Files]) -> None:
    decode, every = without_tiers
    assert every - decode == listed("Beginnings and ends")


def test_tiers_add_the_files_that_the_page_adds(model: Path, without_tiers: tuple[Files, Files]) -> None:
    engine = Watched(model, ram_bytes=1 << 26)
    believe(engine.llm, seconds=1.0)
    asked = prompts(5)
    for prompt in [*asked, asked[0]]:
        engine.ask(prompt)
        mover(engine.llm).drain(engine.llm.loaded.engine.clock.now() + 3600)
        engine.llm.loaded.engine.attend()
    assert read(engine.llm, "ram") > 0, "nothing was loaded, so what loads was not watched"
    engine.llm.close()
    added = frozenset[str]().union(*engine.steps) - without_tiers[1]
    assert frozenset(name for name in added if not name.startswith(BEHIND_THE_MOVER)) == listed("With tiers")
    assert len(listed("With tiers")) <= TIERS_LIMIT


@pytest.mark.parametrize("name", [*BEHIND, *BEHIND_THE_MOVER])
def test_the_page_names_what_it_leaves_out(name: str) -> None:
    assert f"`{name}`" in PAGE.partition("## A step in")[2].partition("\n## ")[0]
