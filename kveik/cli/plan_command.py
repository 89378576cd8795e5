"""Command `kveik plan`: the memory that a model needs on this machine, computed before any is taken."""

from __future__ import annotations

from kveik.cli.options import Settings
from kveik.cli.start import show
from kveik.config import EngineConfig
from kveik.engine.eviction import tier_setting
from kveik.engine.planner import expected_weight_bytes, plan_model
from kveik.model.catalogue import find_model
from kveik.model.weights import open_model
from kveik.offload.open_tiers import check_tiers, plan_tiers


def plan(_: Settings, config: EngineConfig) -> None:
    """Prints what fits."""
    check_tiers(config.cache, only_look=True)
    path = find_model(config.model.model)
    assert path is not None  # it was fetched before
    file = open_model(path)
    weights = expected_weight_bytes(config, file)
    fitting = plan_model(config, file.spec, weight_bytes=weights)
    tiers = plan_tiers(tier_setting(config, fitting))
    for line in (*fitting.lines(), *(tier.line(config.cache.block_size) for tier in tiers)):
        show(line)
