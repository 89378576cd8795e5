"""Builds an engine from a configuration: opens, plans, loads, measures and joins the parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kveik.cache.evictor import leading
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.public_prefixes import PublicPrefixes
from kveik.cache.storage import BlockStorage
from kveik.clock import Clock, SystemClock
from kveik.config import EngineConfig
from kveik.engine.engine import Engine
from kveik.engine.eviction import Shares, eviction_policy, tier_setting
from kveik.engine.executor import ModelExecutor
from kveik.engine.expected import expected_weight_bytes, quantization_of
from kveik.engine.planner import ROOT, ModelPlan, dtype_name, logits_bytes, memory_for_process, plan_model
from kveik.engine.public import public_tokens
from kveik.engine.record import Recorder
from kveik.engine.workspace import measured_activation_bytes
from kveik.errors import BadValue, ModelBroken, Unreachable
from kveik.kernels import native
from kveik.machine.allocator import resident_bytes, return_free_memory
from kveik.machine.huge_pages import bytes_on_huge_pages, collapse_onto_huge_pages
from kveik.machine.prefault import first_bytes, prefault
from kveik.model.catalogue import find_model
from kveik.model.decoder import Decoder, load_decoder
from kveik.model.spec import ModelSpec
from kveik.model.weights import ModelFile, open_model
from kveik.observe.bus import EventBus
from kveik.observe.metrics import EngineFacts, Metrics
from kveik.observe.tiers import log_tiers
from kveik.offload.carrier import PoolMemory
from kveik.offload.open_tiers import check_tiers, open_tiers, plan_tiers
from kveik.offload.protocol import Offload
from kveik.sample.sampler import Sampler
from kveik.schedule.scheduler import Scheduler
from kveik.schedule.step_cost import StepCost
from kveik.text.chat_template import ChatTemplate, TemplateSources, chat_template_from_folder, chat_template_from_gguf
from kveik.text.gguf_vocabulary import tokenizer_from_gguf
from kveik.text.tokenizer import Tokenizer, tokenizer_from_folder
from kveik.words import counted

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""For what is worth keeping, when nobody says how long the end may take."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine with all that its faces need to know of it."""

    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    plan: ModelPlan
    config: EngineConfig
    bus: EventBus
    metrics: Metrics
    fingerprint: bytes
    """SHA-256 over the weights."""

    arithmetic: str
    """How weights are multiplied: bfloat16, float32, w8a8 or w4a8."""

    @property
    def spec(self) -> ModelSpec:
        return self.plan.spec

    @property
    def max_model_len(self) -> int:
        return self.plan.max_model_len

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.plan.dtype)

    @property
    def kv_dtype_name(self) -> str:
        return self.plan.kv_type.name

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Check the laws once more: what ends well leaves its books in order. Raises AssertionError where it does not. What is
        worth keeping goes to a tier that lasts, if that takes no more than so many seconds.
        """
        try:
            self.engine.scheduler.check()
        finally:
            self.engine.offload.retire(self.engine.clock.now(), seconds)


def open_engine(
    config: EngineConfig, report: Report, *, clock: Clock | None = None, shares: Shares | None = None
) -> LoadedEngine:
    """Load a model and everything around it; `report` gets the start-up lines. `shares`: of the cache, by tenant.

    Raises `Unreachable`, `Unsupported`, `ModelBroken` or `DoesNotFit`, as early as each can be known.
    """
    path = find_model(config.model.model)
    if path is None:
        raise Unreachable(f"The model '{config.model.model}' is not here; fetch it with: kveik pull {config.model.model}")
    check_tiers(config.cache)
    native.use_environment()
    available = memory_for_process(ROOT)
    file = open_model(path)
    weights = expected_weight_bytes(config, file)
    first_plan = plan_model(config, file.spec, available_bytes=available, weight_bytes=weights)
    set_threads(first_plan.threads.threads)
    with ThreadPoolExecutor(1) as aside:
        # Hashing leaves the interpreter's lock to whoever reads the vocabulary meanwhile.
        hashing = aside.submit(file.fingerprint)
        tokenizer, template = open_text(config, file)
    fingerprint = hashing.result()
    check_vocabulary(tokenizer, file.spec)
    public = PublicPrefixes(public_tokens(config.cache.public_prefix, tokenizer, template), config.cache.block_size)
    decoder = load_decoder(file, first_plan.dtype, quantization_of(config))
    # Before the heap moves onto huge pages, which would make its free parts resident again.
    return_free_memory()
    huge = _on_huge_pages(decoder)
    plan = _plan_again(config, first_plan, decoder, available)
    for line in plan.lines():
        report(line)
    report(native.described())
    report(decoder.described)
    report(f"{huge >> 20} MiB of the process on huge pages" if huge else "no huge pages: decoding is some percent slower")
    clock = clock or SystemClock()
    setting = tier_setting(config, plan, fingerprint, _kv_dtype(decoder, plan), shares)
    kv_cache = _kv_cache(config, fingerprint, decoder, plan, shares, public, record_facts=bool(plan_tiers(setting)))
    memory, step_cost, bus = plan.memory, StepCost(), EventBus()
    storage = BlockStorage(memory.layouts, memory.blocks, plan.kv_type.storage)
    offload = open_tiers(setting, kv_cache, step_cost, PoolMemory(storage.tensors), clock, report=report, publish=bus.publish)
    scheduler = Scheduler(kv_cache, config.schedule, plan.max_model_len, tokenizer.eos_ids | file.eos_ids, offload)
    prefault(storage.tensors, first_bytes(storage.tensors, config.cache.block_size, plan.max_model_len))
    metrics = _metrics(config, plan, decoder, bus, offload)
    executor = _executor(config, plan, decoder, tokenizer, file, kv_cache, storage)
    engine = _join(scheduler, executor, clock, bus, step_cost, seed=config.stream.seed)
    return LoadedEngine(engine, tokenizer, template, plan, config, bus, metrics, fingerprint, decoder.arithmetic)


def _on_huge_pages(decoder: Decoder) -> int:
    """Bytes that lie there once it is seen to it; native weights were put there as they were packed."""
    huge = bytes_on_huge_pages()
    return huge if huge > 0.8 * decoder.weight_bytes else collapse_onto_huge_pages()


def set_threads(threads: int) -> None:
    """Threads of torch's arithmetic, for the whole process; they are the only ones that compute."""
    torch.set_num_threads(threads)


def open_text(config: EngineConfig, file: ModelFile) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer, and the chat template where there is one: the configured file's, else the model's own."""
    if file.folder is not None:
        tokenizer, sources = tokenizer_from_folder(file.folder), chat_template_from_folder(file.folder)
    else:
        assert file.metadata is not None
        tokenizer, sources = tokenizer_from_gguf(file.metadata), chat_template_from_gguf(file.metadata)
    if config.model.chat_template is not None:
        sources = TemplateSources(_read_template(Path(config.model.chat_template)))
    return tokenizer, None if sources is None else ChatTemplate.for_tokenizer(sources, tokenizer)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue(f"The file of --chat-template cannot be read: {error}.", param="chat_template") from error


def check_vocabulary(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """Raises `ModelBroken` where the tokenizer makes ids that the embedding table does not have."""
    if tokenizer.vocab_size > spec.vocab:
        raise ModelBroken(
            f"The tokenizer has {counted(tokenizer.vocab_size, 'token')}, the model's embedding table only "
            f"{counted(spec.vocab, 'row')}; "
            "the two do not belong together."
        )


def _plan_again(config: EngineConfig, first: ModelPlan, decoder: Decoder, available: int) -> ModelPlan:
    """The plan with the weights' true size, a measured step and a measured process in place of the estimates."""
    measured = measured_activation_bytes(decoder, first)
    workspace = None if measured is None else measured + logits_bytes(config, first.spec)
    return_free_memory()
    return plan_model(
        config,
        first.spec,
        available_bytes=available,
        weight_bytes=decoder.weight_bytes,
        workspace_bytes=workspace,
        process_bytes=max(0, resident_bytes() - decoder.weight_bytes),
    )


def _kv_cache(
    config: EngineConfig,
    fingerprint: bytes,
    decoder: Decoder,
    plan: ModelPlan,
    shares: Shares | None,
    public: PublicPrefixes,
    *,
    record_facts: bool,
) -> KVCacheManager:
    blocks = plan.memory.blocks
    return KVCacheManager(
        plan.spec.groups,
        blocks,
        block_size=config.cache.block_size,
        rows=config.schedule.max_num_seqs,
        max_model_len=plan.max_model_len,
        max_chunk=plan.max_chunk,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        fingerprint=fingerprint,
        kv_dtype=_kv_dtype(decoder, plan),
        eviction=eviction_policy(config.cache, blocks[leading(plan.spec.groups)], config.stream.seed, shares),
        public=public,
        record_facts=record_facts,
    )


def _kv_dtype(decoder: Decoder, plan: ModelPlan) -> str:
    """Keys and values depend on the arithmetic that made them, not only on how they are stored."""
    return f"{plan.kv_type.name} of {decoder.arithmetic}"


def _executor(
    config: EngineConfig,
    plan: ModelPlan,
    decoder: Decoder,
    tokenizer: Tokenizer,
    file: ModelFile,
    kv_cache: KVCacheManager,
    storage: BlockStorage,
) -> ModelExecutor:
    return ModelExecutor(
        decoder,
        Sampler(plan.spec.vocab, tokenizer.vocab_size, tokenizer.eos_ids | file.eos_ids),
        storage,
        plan.spec.groups,
        config.cache.block_size,
        plan.kv_type.of_bytes,
    )


def _metrics(config: EngineConfig, plan: ModelPlan, decoder: Decoder, bus: EventBus, offload: Offload) -> Metrics:
    """Counts the bus's events from now on; the log tells of tiers."""
    places = {one.snapshot.name: one.place for one in offload.stats()}
    facts = EngineFacts(
        threads=plan.threads.threads,
        dtype=dtype_name(plan.dtype),
        arithmetic=decoder.arithmetic,
        isa=native.isa() or "none",
        kv_cache_dtype=plan.kv_type.name,
        block_size=config.cache.block_size,
        pool_bytes=plan.memory.cache_bytes,
        planned_bytes=plan.memory.planned_bytes,
        tiers=tuple(places),
    )
    metrics = Metrics(facts, lambda: bus.errors, lambda: [one.snapshot for one in offload.stats()], resident_bytes)
    bus.subscribe(metrics.listen)
    bus.subscribe(partial(log_tiers, places=places))
    return metrics


def _join(
    scheduler: Scheduler, executor: ModelExecutor, clock: Clock, bus: EventBus, step_cost: StepCost, *, seed: int
) -> Engine:
    recorder = Recorder(bus, scheduler)
    # A gauge that appears with the first request only looks as if something had been wrong before it.
    recorder.idled()
    engine = Engine(scheduler, executor, clock, recorder, seed=seed, step_cost=step_cost)
    engine.offload.start()
    return engine
