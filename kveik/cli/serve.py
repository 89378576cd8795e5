"""kveik serve: an engine behind OpenAI's API."""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import Mapping
from pathlib import Path

from kveik.cli.options import Settings
from kveik.cli.start import say
from kveik.config import EngineConfig, ModelConfig, ServerConfig
from kveik.engine.build import LoadedEngine, open_engine
from kveik.engine.cache_stats import CacheStats, cache_stats, reset_cache, tier_snapshots
from kveik.engine.engine import Engine
from kveik.engine.eviction import can_keep, learnt_path, load_learnt, save_learnt
from kveik.engine.loop import EngineLoop
from kveik.model.catalogue import is_hub_id
from kveik.observe.events import RequestRefused
from kveik.schedule.scheduler import Scheduler
from kveik.server.app import create_app
from kveik.server.auth import Tenants
from kveik.server.http_server import serve as serve_app
from kveik.server.sockets import addresses
from kveik.server.state import ServerState

log = logging.getLogger(__name__)


def serve(settings: Settings, config: EngineConfig, sockets: list[socket.socket], secret: bytes) -> None:
    """Serves until a signal. `sockets` listen already."""
    server = settings.of(ServerConfig)
    log.info("listening on %s", addresses(sockets))
    tenants = Tenants(server.api_key, secret)
    shares = {tenants.of_key(key): share for key, share in server.tenant_shares().items()}
    loaded = open_engine(config, log.info, shares=shares)
    loop = EngineLoop(loaded.engine, loaded.tokenizer, config.stream, max_waiting=config.schedule.max_waiting)
    learnt, engine = learnt_path(config.cache, loaded.fingerprint), loaded.engine
    evictor = engine.scheduler.kv_cache.evictor
    if learnt is not None and load_learnt(learnt, evictor, engine.offload, engine.step_cost):
        log.info("eviction goes on from what was learnt before: %s", learnt)
    keeping = can_keep(learnt)
    names = server.served_model_name or (own_name(settings.of(ModelConfig).model),)
    loop.start()
    # What is alive now stays alive: the collector need not walk through model and vocabulary in the middle of a step.
    gc.collect()
    gc.freeze()
    try:
        state = _state(loaded, loop, server, names, secret, tenants.of_key(server.api_key[0]) if server.api_key else None)
        app = create_app(state)
        serve_app(app, server, lambda url: say(f"{names[0]} is served at {url} (API at {url}/v1). Ctrl-C stops."), sockets)
    finally:
        loop.stop()
        loaded.close(server.drain_seconds)
        if learnt is not None and keeping:
            save_learnt(learnt, evictor, engine.offload, engine.step_cost)
        # What is frozen is not collected at the end either, and the native module complains of all that is left of it.
        gc.unfreeze()


def own_name(model: str) -> str:
    """The name that a model is served under when none is given: a catalogue or hub name as it is, of a path its last part."""
    return model if is_hub_id(model) and not Path(model).exists() else Path(model).name.removesuffix(".gguf")


def _state(
    loaded: LoadedEngine,
    loop: EngineLoop,
    server: ServerConfig,
    names: tuple[str, ...],
    secret: bytes,
    operator: bytes | None,
) -> ServerState:
    return ServerState(
        door=loop,
        tokenizer=loaded.tokenizer,
        chat_template=loaded.chat_template,
        max_model_len=loaded.max_model_len,
        config=server,
        names=names,
        secret=secret,
        metrics=loaded.metrics.exposition,
        counts=lambda: _counts(loop, loaded.engine.scheduler),
        prompt_tokens=lambda: loaded.metrics.prompt_tokens,
        tiers=lambda: tier_snapshots(loaded.engine),
        facts={"type of the arithmetic": loaded.dtype_name, "type of keys and values": loaded.kv_dtype_name},
        fingerprint=f"kveik-{loaded.fingerprint.hex()[:16]}",
        alive=lambda: loop.alive,
        cache_stats=lambda: loop.ask(cache_stats),
        cache_reset=lambda: loop.ask(_reset),
        operator=operator,
        refused=lambda error: loaded.bus.publish(RequestRefused.because_of(error)),
    )


def _reset(engine: Engine) -> CacheStats:
    reset_cache(engine)
    return cache_stats(engine)


def _counts(loop: EngineLoop, scheduler: Scheduler) -> Mapping[str, int | float]:
    """The page's live numbers. Read beside the step loop, so that two of them may be a step apart."""
    groups = scheduler.kv_cache.usage
    queries = scheduler.prefix_queries
    return {
        **loop.occupancy._asdict(),
        "blocks held": sum(group.held for group in groups),
        "blocks cached": sum(group.cached for group in groups),
        "blocks free": sum(group.free for group in groups),
        "share of prompt tokens hit in the cache": scheduler.prefix_hits / queries if queries else 0.0,
    }
