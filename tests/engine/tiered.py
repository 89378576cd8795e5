"""Tiny engines with tiers below their pools."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.engine.llm import LLM
from kveik.offload.carrier import TierCarrier
from kveik.offload.manager import OffloadManager
from kveik.offload.mover import Mover
from kveik.schedule.step_cost import StepCost

CONTEXT, BLOCKS = 512, 40


def opened(model: str, *, seconds: float = 1.0, report: Callable[[str], None] = lambda _: None, **cache: object) -> LLM:
    """An engine that believes a token to take so many seconds; `report` gets its lines at start."""
    settings: dict[str, object] = {"num_gpu_blocks_override": BLOCKS, **cache}
    llm = LLM(
        EngineConfig(
            model=ModelConfig(model=model, dtype="float32", max_model_len=CONTEXT),
            cache=CacheConfig(**settings),  # type: ignore[arg-type]  # a test's own words
            schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=256, prefill_chunk_size=128),
        ),
        report,
    )
    believe(llm, seconds)
    return llm


def believe(llm: LLM, seconds: float) -> None:
    """From now on a token takes so many seconds, as far as the engine knows."""
    cost = llm.loaded.engine.step_cost
    cost.prefills = StepCost((seconds, seconds, 1e-9)).prefills
    cost.observe = lambda *_: None  # type: ignore[method-assign]  # believed, whatever it takes


def offload(llm: LLM) -> OffloadManager:
    """Its tiers, of which there are some."""
    found = llm.loaded.engine.offload
    assert isinstance(found, OffloadManager)
    return found


def carrier(llm: LLM) -> TierCarrier:
    """Its dealings with its tiers."""
    found = offload(llm).carrier
    assert isinstance(found, TierCarrier)
    return found


def mover(llm: LLM) -> Mover:
    return carrier(llm).mover


def read(llm: LLM, tier: str) -> int:
    """Records that came from a tier whole and verified."""
    return mover(llm).snapshot(tier).counts.records_loaded


def metric(llm: LLM, name: str, label: str) -> float:
    """One of the engine's own metrics, all samples with this label's value added up."""
    families = text_string_to_metric_families(llm.loaded.metrics.exposition().decode())
    samples = [sample for family in families for sample in family.samples]
    return sum(one.value for one in samples if one.name == f"kveik:{name}" and label in one.labels.values())
