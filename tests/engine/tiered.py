"""Tiny engines with tiers below their pools."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.engine.llm import LLM
from kveik.offload.carrier import Transfers
from kveik.offload.cost import PrefillCost

CONTEXT, BLOCKS = 512, 40


class Dear(PrefillCost):
    """Computing is believed to be slow, whatever it takes: so loading always pays."""

    def observe(self, tokens: int, pairs_read: float, seconds: float) -> None:
        pass


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
    if (costs := llm.loaded.engine.scheduler.below.costs) is not None:
        costs.prefill = Dear(128, (seconds, seconds, 1e-9))


def transfers(llm: LLM) -> Transfers:
    """Its dealings with its tiers."""
    found = llm.loaded.engine.transfers
    assert found is not None
    return found


def read(llm: LLM, tier: str) -> int:
    """Records that came from a tier whole and verified."""
    return transfers(llm).parts.mover.snapshot(tier).counts.records_loaded


def metric(llm: LLM, name: str, label: str) -> float:
    """One of the engine's own metrics, all samples with this label's value added up."""
    families = text_string_to_metric_families(llm.loaded.metrics.exposition().decode())
    samples = [sample for family in families for sample in family.samples]
    return sum(one.value for one in samples if one.name == f"kveik:{name}" and label in one.labels.values())
