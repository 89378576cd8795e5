"""Builds an engine from a configuration: opens, plans, loads, measures and joins the parts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kveik.cache.evictor import leading
from kveik.cache.key_chains import PublicPrefixes
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import blocks_for
from kveik.clock import Clock, SystemClock
from kveik.config import EngineConfig
from kveik.device.cpu import CpuDevice
from kveik.device.device import Device
from kveik.engine.engine import Engine
from kveik.engine.eviction import Shares, eviction_policy, tier_setting
from kveik.engine.executor import ModelExecutor
from kveik.engine.planner import (
    ROOT,
    ModelPlan,
    dtype_name,
    expected_weight_bytes,
    logits_bytes,
    measured_activation_bytes,
    memory_for_process,
    plan_model,
    quantization_of,
)
from kveik.engine.recorder import Recorder
from kveik.errors import BadValue, ModelBroken, Refused, Unreachable
from kveik.machine.allocator import resident_bytes, return_free_memory
from kveik.model.catalogue import find_model
from kveik.model.decoder import Decoder, load_decoder
from kveik.model.spec import ModelSpec
from kveik.model.weights import ModelFile, open_model
from kveik.observe.bus import EventBus
from kveik.observe.metrics import EngineFacts, Metrics
from kveik.observe.tiers import log_tiers
from kveik.offload.interface import Offload
from kveik.offload.open_tiers import check_tiers, open_tiers, plan_tiers
from kveik.sample.sampler import Sampler
from kveik.schedule.scheduler import Scheduler
from kveik.schedule.step_cost import StepCost
from kveik.text.chat_template import (
    ChatTemplate,
    Message,
    TemplateSources,
    chat_template_from_folder,
    chat_template_from_gguf,
    chat_tokens,
)
from kveik.text.gguf_vocabulary import tokenizer_from_gguf
from kveik.text.tokenizer import Tokenizer, tokenizer_from_folder
from kveik.words import counted

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""For what is worth keeping, when nobody says how long the end may take."""

Report = Callable[[str], None]

DEVICES: dict[str, Callable[[], Device]] = {"cpu": CpuDevice}
"""Values of --device."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, with its text and the plan of its memory."""

    decoder: Decoder
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_ids: frozenset[int]
    public: PublicPrefixes
    fingerprint: bytes
    plan: ModelPlan

    @property
    def kv_dtype(self) -> str:
        """Keys and values depend on the arithmetic that made them, not only on how they are stored."""
        return f"{self.plan.kv_type.name} of {self.decoder.arithmetic}"


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine with all that its faces need to know of it."""

    engine: Engine
    device: Device
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
            self.device.close()


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
    device = DEVICES[config.model.device]()
    model = _load_model(config, path, device)
    for line in (*model.plan.lines(), *device.describe(), model.decoder.described):
        report(line)
    return _join(config, device, model, clock or SystemClock(), shares, report)


def _load_model(config: EngineConfig, path: Path, device: Device) -> LoadedModel:
    available = memory_for_process(ROOT)
    file = open_model(path)
    weights = expected_weight_bytes(config, file)
    first_plan = plan_model(config, file.spec, available_bytes=available, weight_bytes=weights)
    device.use_threads(first_plan.threads.threads)
    with ThreadPoolExecutor(1) as aside:
        # Hashing leaves the interpreter's lock to whoever reads the vocabulary meanwhile.
        hashing = aside.submit(file.fingerprint)
        tokenizer, template = open_text(config, file)
    fingerprint = hashing.result()
    check_vocabulary(tokenizer, file.spec)
    public = PublicPrefixes(public_tokens(config.cache.public_prefix, tokenizer, template), config.cache.block_size)
    decoder = load_decoder(file, first_plan.dtype, quantization_of(config))
    device.keep_weights(decoder.weight_bytes)
    plan = _plan_again(config, first_plan, device, decoder, available)
    return LoadedModel(decoder, tokenizer, template, tokenizer.eos_ids | file.eos_ids, public, fingerprint, plan)


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


def public_tokens(files: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate | None) -> list[tuple[int, ...]]:
    """One beginning per file. Raises BadValue, with the file's name, where it holds none.

    .json: a list of token ids, or a list of chat messages, which the model's template writes; anything else is text, as a
    completion's prompt is. What a tokenizer makes of the very end may depend on what follows; such a token is not shared.
    """
    return [tuple(_read_public(Path(name), tokenizer, template)) for name in files]


def _read_public(path: Path, tokenizer: Tokenizer, template: ChatTemplate | None) -> Sequence[int]:
    try:
        text = path.read_text(encoding="utf-8")
        tokens = _public_json(json.loads(text), tokenizer, template) if path.suffix == ".json" else tokenizer.encode(text)
    except (OSError, ValueError, Refused) as error:
        raise BadValue(f"The file {path} of --public-prefix cannot be read: {error}", param="public_prefix") from error
    if not tokens:
        raise BadValue(f"The file {path} of --public-prefix is empty.", param="public_prefix")
    return tokens


def _public_json(content: object, tokenizer: Tokenizer, template: ChatTemplate | None) -> Sequence[int]:
    """Raises ValueError where it is neither ids nor messages."""
    if not isinstance(content, list):
        raise ValueError("it must be a list of token ids or of messages.")
    if all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in content):
        return content
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in content):
        raise ValueError(f"it must be a list of token ids in [0, {tokenizer.vocab_size}) or of messages.")
    if template is None:
        raise ValueError("the model has no chat template that could write these messages.")
    messages: list[Message] = content
    return chat_tokens(template, tokenizer, messages, add_generation_prompt=False)


def check_vocabulary(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """Raises `ModelBroken` where the tokenizer makes ids that the embedding table does not have."""
    if tokenizer.vocab_size > spec.vocab:
        raise ModelBroken(
            f"The tokenizer has {counted(tokenizer.vocab_size, 'token')}, the model's embedding table only "
            f"{counted(spec.vocab, 'row')}; "
            "the two do not belong together."
        )


def _plan_again(config: EngineConfig, first: ModelPlan, device: Device, decoder: Decoder, available: int) -> ModelPlan:
    """The plan with the weights' true size, a measured step and a measured process in place of the estimates."""
    measured = measured_activation_bytes(device, decoder, first)
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


def _kv_cache(config: EngineConfig, model: LoadedModel, shares: Shares | None, *, record_facts: bool) -> KVCacheManager:
    plan = model.plan
    blocks = plan.memory.blocks
    return KVCacheManager(
        plan.spec.groups,
        blocks,
        block_size=config.cache.block_size,
        rows=config.schedule.max_num_seqs,
        max_model_len=plan.max_model_len,
        max_chunk=plan.max_chunk,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        fingerprint=model.fingerprint,
        kv_dtype=model.kv_dtype,
        eviction=eviction_policy(config.cache, blocks[leading(plan.spec.groups)], config.stream.seed, shares),
        public=model.public,
        record_facts=record_facts,
    )


def _metrics(config: EngineConfig, device: Device, model: LoadedModel, bus: EventBus, offload: Offload) -> Metrics:
    """Counts the bus's events from now on; the log tells of tiers."""
    plan, places = model.plan, {one.snapshot.name: one.place for one in offload.stats()}
    facts = EngineFacts(
        threads=plan.threads.threads,
        dtype=dtype_name(plan.dtype),
        arithmetic=model.decoder.arithmetic,
        isa=device.isa,
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
    config: EngineConfig, device: Device, model: LoadedModel, clock: Clock, shares: Shares | None, report: Report
) -> LoadedEngine:
    plan, decoder, tokenizer, block_size = model.plan, model.decoder, model.tokenizer, config.cache.block_size
    step_cost, bus = StepCost(), EventBus()
    setting = tier_setting(config, plan, model.fingerprint, model.kv_dtype, shares)
    kv_cache = _kv_cache(config, model, shares, record_facts=bool(plan_tiers(setting)))
    ready = blocks_for(plan.max_model_len, block_size)
    memory = device.allocate(plan.memory.layouts, plan.memory.blocks, plan.kv_type.storage, ready=ready)
    offload = open_tiers(setting, kv_cache, step_cost, memory, clock, report=report, publish=bus.publish)
    scheduler = Scheduler(kv_cache, config.schedule, plan.max_model_len, model.eos_ids, offload)
    metrics = _metrics(config, device, model, bus, offload)
    sampler = Sampler(plan.spec.vocab, tokenizer.vocab_size, model.eos_ids)
    executor = ModelExecutor(decoder, sampler, memory, plan.spec.groups, block_size, plan.kv_type.of_bytes)
    recorder = Recorder(bus, scheduler)
    # A gauge that appears with the first request only looks as if something had been wrong before it.
    recorder.idled()
    engine = Engine(scheduler, executor, clock, recorder, seed=config.stream.seed, step_cost=step_cost)
    engine.offload.start()
    return LoadedEngine(
        engine, device, tokenizer, model.chat_template, plan, config, bus, metrics, model.fingerprint, decoder.arithmetic
    )
