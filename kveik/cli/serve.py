"""kveik serve: an engine behind OpenAI's API."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from pathlib import Path

from kveik.cli.command import single
from kveik.cli.fetch import with_model
from kveik.cli.options import ENGINE, SERVER, Settings, takes
from kveik.cli.say import say
from kveik.config import CacheConfig, ModelConfig, ServerConfig
from kveik.engine.build import LoadedEngine, open_engine
from kveik.engine.cache_stats import CacheStats, cache_stats, reset_cache, tier_snapshots
from kveik.engine.engine import Engine
from kveik.engine.eviction import learnt_path, load_learnt, save_learnt
from kveik.engine.loop import EngineLoop
from kveik.model.catalogue import home_folder, is_hub_id
from kveik.observe.events import RequestRefused
from kveik.schedule.scheduler import Scheduler
from kveik.server.app import create_app
from kveik.server.auth import Tenants, tenant_secret
from kveik.server.serve import listen
from kveik.server.serve import serve as serve_app
from kveik.server.state import ServerState

log = logging.getLogger(__name__)


@takes(*ENGINE, SERVER)
def serve(settings: Settings) -> None:
    """Serve a model with OpenAI's API, and a page at /.

    \b
    kveik serve                                        smollm2-135m on http://127.0.0.1:8000
    kveik serve qwen2.5-coder-0.5b --port 9000         another model, another port
    kveik serve model.gguf --host 0.0.0.0 --api-key $KEY --max-model-len 8192
    kveik serve --config kveik.toml                    settings from a file

    A model that is not here yet is fetched first. The start-up lines tell how memory is cut; if the context does not fit, it
    says by how much and what would, and ends. Ctrl-C lets running requests end (--drain-seconds), a second one does not.
    """
    server, model = settings.of(ServerConfig), settings.of(ModelConfig)
    logging.basicConfig(level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    # Asked now, so that what cannot be is told before a model is loaded for minutes.
    secret = _secret(server)
    listen(server.host, server.port).close()
    if (note := unshared(server, settings.engine.cache)) is not None:
        log.info("%s", note)
    config = with_model(settings.engine)
    tenants = Tenants(server.api_key, secret)
    shares = {tenants.of_key(key): share for key, share in server.tenant_shares().items()}
    loaded = open_engine(config, log.info, shares=shares)
    loop = EngineLoop(loaded.engine, loaded.tokenizer, config.stream, max_waiting=config.schedule.max_waiting)
    learnt, scheduler = learnt_path(config.cache, loaded.fingerprint), loaded.engine.scheduler
    if load_learnt(learnt, scheduler.kv_cache.evictor, scheduler.below.costs):
        log.info("eviction goes on from what was learnt before: %s", learnt)
    names = server.served_model_name or (own_name(model.model),)
    loop.start()
    # What is alive now stays alive: the collector need not walk through model and vocabulary in the middle of a step.
    gc.collect()
    gc.freeze()
    try:
        state = _state(loaded, loop, server, names, secret, tenants.of_key(server.api_key[0]) if server.api_key else None)
        app = create_app(state)
        serve_app(app, server, lambda url: say(f"{names[0]} is served at {url} (API at {url}/v1). Ctrl-C stops."))
    finally:
        loop.stop()
        loaded.close(server.drain_seconds)
        save_learnt(learnt, scheduler.kv_cache.evictor, scheduler.below.costs)
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
        counts=lambda: _counts(loaded.engine.scheduler),
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


def _counts(scheduler: Scheduler) -> Mapping[str, int | float]:
    """The page's live numbers. Read beside the step loop, so that two of them may be a step apart."""
    groups = scheduler.kv_cache.usage
    queries = scheduler.prefix_queries
    return {
        "running": scheduler.running,
        "waiting": scheduler.waiting,
        "blocks held": sum(group.held for group in groups),
        "blocks cached": sum(group.cached for group in groups),
        "blocks free": sum(group.free for group in groups),
        "share of prompt tokens found in the cache": scheduler.prefix_hits / queries if queries else 0.0,
    }


def _secret(server: ServerConfig) -> bytes:
    # Without keys there is one tenant, and no reason to leave a file behind.
    if not server.api_key:
        return b""
    return tenant_secret(_secret_file(server))


def _secret_file(server: ServerConfig) -> Path:
    return Path(server.tenant_secret_file) if server.tenant_secret_file else home_folder() / "tenant-secret"


def unshared(server: ServerConfig, cache: CacheConfig) -> str | None:
    """What to tell whoever gives tenants a remote tier and leaves their secret to us: each host makes one of its own."""
    if not (cache.kv_remote and server.api_key) or server.tenant_secret_file:
        return None
    return (
        f"Tenants' blocks at --kv-remote are found by servers with the same secret alone; this one has {_secret_file(server)}, "
        "which every KVEIK_HOME makes for itself. To share with others, give all of them a copy with --tenant-secret-file."
    )


app = single(serve)
