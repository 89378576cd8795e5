"""Settings as frozen slices, one per folder that needs them. Command line, docs page and config file come from here.

A field's docstring is its help text; its unit stands in the sentence. A field that the command line should not offer has
`metadata={"hidden": True}`. Checked once, in `__post_init__`; nothing edits a slice afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kveik.errors import BadValue

BLOCK_SIZES = (8, 16, 32, 64)

KV_ALIASES = {"bf16": "bfloat16", "fp8": "fp8_e4m3"}
"""Other names for types of keys and values -> the type."""


LASTING_BYTES = 16 << 30
"""Default capacity of a tier that outlives the server, in bytes."""

LARGEST = (1 << 63) - 1
"""Largest number of bytes, tokens or threads that a setting may have; native code relies on it."""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _at_least(slice_: object, **minima: float) -> None:
    for name, low in minima.items():
        value = getattr(slice_, name)
        if value is not None and not value >= low:
            raise BadValue(f"{_flag(name)} is {value}; it must be at least {low}.", param=name)
        if isinstance(value, int) and value > LARGEST:
            raise BadValue(f"{_flag(name)} is {value}; it must be at most {LARGEST}.", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Model, and the arithmetic that it runs in."""

    model: str = "smollm2-135m"
    """A catalogue name, a folder in Hugging Face layout, or a .gguf file."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic of weights and activations. auto: bfloat16 where the CPU multiplies it natively, else float32."""

    quantization: Literal["auto", "bf16", "w8a8", "w4a8"] = "auto"
    """Format of weights in memory and arithmetic of products. bf16: as --dtype says, nothing quantised anew. w8a8: 8-bit
    weights, one scale per 32 inputs (without native kernels: per output), times 8-bit activations. w4a8: the blocks of a
    quantised GGUF file as they are, times 8-bit activations. auto: the fastest of them that leaves the file's weights as they
    are."""

    max_model_len: int | None = None
    """Context in tokens, prompt and output together. Default: the model's own."""

    chat_template: str | None = None
    """File with a Jinja chat template, in place of the model's own."""

    device: str = "cpu"
    """Device that computes and holds the cache: cpu."""

    threads: int | None = None
    """CPU threads for the arithmetic. Default: the least of affinity, cgroup quota and physical cores."""

    def __post_init__(self) -> None:
        _at_least(self, max_model_len=1, threads=1)
        if self.device != "cpu":
            raise BadValue(
                f'--device is "{self.device[:40]}"; this version computes on the CPU alone. Use --device cpu.', param="device"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Size of the memory for keys and values, and its division into blocks and tiers."""

    block_size: int = 16
    """Tokens per block: 8, 16, 32 or 64. Smaller wastes less at the tail; larger keeps tables short."""

    enable_prefix_caching: bool = True
    """Reuse blocks of earlier prompts by content. Off: only the choices of one request share blocks."""

    eviction_policy: Literal["hazard", "lru"] = "hazard"
    """Order in which cached blocks are evicted. hazard: the block that is least likely to be used soon, as learnt from earlier
    reuse, goes first. lru: the least recently used block goes first."""

    eviction_file: str | None = None
    """File that keeps what hazard has learnt over restarts. Default: one per model in the user's cache folder."""

    public_prefix: tuple[str, ...] = ()
    """Files with beginnings of prompts whose blocks all tenants share; may be given several times. Text as a completion's
    prompt, or in .json a list of token ids or of chat messages. Only whole blocks inside the beginning are shared."""

    kv_cache_dtype: Literal["auto", "bfloat16", "bf16", "float32", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type of stored keys and values. auto: the model's. int8 and fp8 (alias of fp8_e4m3) hold nearly twice as many tokens as
    bfloat16 (bf16): one byte per value, and a scale of two bytes per token and head. int8 is the most exact of them."""

    kv_cache_memory_bytes: int | None = None
    """Bytes for keys and values, allocated once at start. Default: the rest of --gpu-memory-utilization."""

    gpu_memory_utilization: float = 0.5
    """Share of the available memory (cgroup limits included) for weights, workspace and blocks together; in (0, 1]."""

    num_gpu_blocks_override: int | None = None
    """Blocks per layer group, in place of a number derived from memory. For tests and experiments."""

    kv_ram_bytes: int | None = None
    """Bytes of RAM, beside the pool, for blocks that the pool evicts. Default: no such tier."""

    kv_ram_encoding: Literal["auto", "int8", "raw"] | None = None
    """Encoding of blocks in that RAM. auto: int8 where the pool has bfloat16 or float32, which holds two to four times as many,
    but raw with --dtype float32; raw: as the pool has them, without loss. Default: auto."""

    kv_disk: str | None = None
    """Folder for blocks that pool and RAM evict, and for blocks worth keeping over a restart. One server at a time."""

    kv_disk_bytes: int | None = None
    """Bytes of the folder at most, all its files included. Default: 16 GiB."""

    kv_remote: str | None = None
    """Address of a Valkey or Redis server that several servers share: redis://host:6379/0, or rediss:// for TLS. With
    --api-key, servers share blocks where all have the same --tenant-secret-file."""

    kv_remote_bytes: int | None = None
    """Bytes there at most, of blocks that this server wrote within the last day. Default: 16 GiB."""

    kv_write_policy: Literal["filtered", "write-through", "second-touch"] | None = None
    """Time at which a block is stored in a tier. filtered: when the tier above evicts it and it is worth storing.
    write-through: as soon as it is cached, so that a crash loses little. second-touch: when it is evicted after two uses, for
    worn drives. Default: filtered."""

    hybrid_kv_cache_fraction: float | None = None
    """Share of the memory for keys and values that becomes a tier in RAM, as with --kv-ram-bytes; in [0, 1). 0.2 to 0.3 suits
    contexts beyond 100,000 tokens. Default: no such tier."""

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise BadValue(f"--block-size is {self.block_size}; it must be one of 8, 16, 32, 64.", param="block_size")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise BadValue(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1.",
                param="gpu_memory_utilization",
            )
        _at_least(self, kv_cache_memory_bytes=1, num_gpu_blocks_override=1, kv_ram_bytes=1, kv_disk_bytes=1, kv_remote_bytes=1)
        self._check_places()
        self._check_below()

    @property
    def disk_bytes(self) -> int:
        """The bound of --kv-disk, as given or by default."""
        return LASTING_BYTES if self.kv_disk_bytes is None else self.kv_disk_bytes

    @property
    def remote_bytes(self) -> int:
        """The bound of --kv-remote, as given or by default."""
        return LASTING_BYTES if self.kv_remote_bytes is None else self.kv_remote_bytes

    @property
    def ram_encoding(self) -> Literal["auto", "int8", "raw"]:
        """Encoding of blocks in RAM, as given or by default."""
        return self.kv_ram_encoding or "auto"

    @property
    def write_policy(self) -> Literal["filtered", "write-through", "second-touch"]:
        """Time at which a block is stored in a tier, as given or by default."""
        return self.kv_write_policy or "filtered"

    def _check_places(self) -> None:
        """Refuse empty names, and settings of a tier that is not configured: they would have no effect."""
        for name, what in (("kv_disk", "a folder"), ("kv_remote", "an address")):
            place = getattr(self, name)
            if place is not None and not place.strip():
                raise BadValue(f"{_flag(name)} is empty; it must be {what}.", param=name)
        ram, ram_flags = self.kv_ram_bytes or self.hybrid_kv_cache_fraction, "--kv-ram-bytes or --hybrid-kv-cache-fraction"
        wanted = (
            ("kv_disk_bytes", self.kv_disk, "--kv-disk"),
            ("kv_remote_bytes", self.kv_remote, "--kv-remote"),
            ("kv_ram_encoding", ram, ram_flags),
            ("kv_write_policy", ram or self.kv_disk or self.kv_remote, f"--kv-disk, --kv-remote, {ram_flags}"),
        )
        for name, tier, flags in wanted:
            if not tier and (value := getattr(self, name)) is not None:
                raise BadValue(
                    f"{_flag(name)} is {value}; it has no effect without {flags}. Add one, or leave it out.", param=name
                )

    def _check_below(self) -> None:
        fraction = self.hybrid_kv_cache_fraction
        if fraction is not None and not 0 <= fraction < 1:
            raise BadValue(
                f"--hybrid-kv-cache-fraction is {fraction}; it must be at least 0 and below 1.",
                param="hybrid_kv_cache_fraction",
            )
        if fraction is not None and (self.kv_ram_bytes is not None or self.num_gpu_blocks_override is not None):
            raise BadValue(
                "--hybrid-kv-cache-fraction excludes --kv-ram-bytes and --num-gpu-blocks-override. Give one or the other.",
                param="hybrid_kv_cache_fraction",
            )
        if not self.enable_prefix_caching and (fraction or self.kv_ram_bytes or self.kv_disk or self.kv_remote):
            raise BadValue(
                "Tiers below the pool need prefix caching. Give --enable-prefix-caching, or leave the tiers out.",
                param="enable_prefix_caching",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Bounds on tokens and sequences of a step, and the order of requests."""

    max_num_seqs: int = 64
    """Sequences that run at once."""

    max_num_batched_tokens: int = 2048
    """Tokens in one step, decodes and prefill chunks together."""

    prefill_chunk_size: int = 512
    """Prompt tokens in one step, all sequences together. 512 keeps streams smooth; 2048 suits batch work."""

    long_prefill_token_threshold: int | None = None
    """Prompt tokens of one sequence in one step at most, so that short prompts pass long ones. Default: no bound."""

    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """fcfs: first come, first served. priority: lower `priority` first, then arrival."""

    priority_aging_seconds: float = 30.0
    """Seconds of age that weigh as much as one priority level, so that every request waits a bounded time. inf: no aging."""

    max_waiting: int = 1024
    """Sequences in the waiting queue at most; more are refused with 429."""

    look_past: int = 8
    """Waiting sequences that may be passed over because they do not fit, so that smaller ones behind them are admitted."""

    look_past_limit: int = 64
    """Times that one waiting sequence may be passed over, before no other is admitted ahead of it."""

    @property
    def chunk_tokens_max(self) -> int:
        """Tokens of one sequence in one step at most."""
        cap = self.long_prefill_token_threshold or self.prefill_chunk_size
        return min(self.prefill_chunk_size, self.max_num_batched_tokens, cap)

    def __post_init__(self) -> None:
        _at_least(self, max_num_seqs=1, max_num_batched_tokens=1, prefill_chunk_size=1, long_prefill_token_threshold=1)
        _at_least(self, max_waiting=1, look_past=0, look_past_limit=0)
        if not self.priority_aging_seconds > 0:
            raise BadValue(
                f"--priority-aging-seconds is {self.priority_aging_seconds}; it must be above 0 (inf: no aging).",
                param="priority_aging_seconds",
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise BadValue(
                f"--max-num-seqs is {self.max_num_seqs}, more than --max-num-batched-tokens {self.max_num_batched_tokens}; "
                "every running sequence needs one token of every step. Lower the first or raise the second.",
                param="max_num_seqs",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Delivery of tokens to their readers."""

    stream_buffer_tokens: int = 1024
    """Tokens of one choice that may wait for a slow reader; beyond that the request is aborted and its blocks are freed."""

    seed: int = 0
    """Seed from which the seeds of requests without one are derived."""

    def __post_init__(self) -> None:
        _at_least(self, stream_buffer_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """HTTP server: addresses, keys, bounds and timeouts."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 8000
    """Port to listen on."""

    served_model_name: tuple[str, ...] = ()
    """Names under which the model is served; may be given several times. Default: the model's own."""

    api_key: tuple[str, ...] = ()
    """API keys with access, one tenant each; may be given several times. Default: access without a key, as one tenant."""

    tenant_share: tuple[str, ...] = ()
    """KEY=RESERVED or KEY=RESERVED:MAXIMUM, for one --api-key; may be given several times. Shares of the cached blocks, from 0
    to 1: RESERVED is never evicted for other keys, MAXIMUM is never exceeded."""

    tenant_secret_file: str | None = None
    """File with the secret from which tenants' cache salts are derived, of 16 bytes or more. Servers that share a --kv-remote
    need a copy of the same file. Default: one created in the user's cache folder."""

    max_body_bytes: int = 16 * 1024 * 1024
    """Bytes of a request body at most."""

    stall_seconds: float = 60.0
    """Timeout in seconds for a client that does not send its request body or does not read a streamed answer."""

    keep_alive_seconds: float = 75.0
    """Seconds that a connection may stay idle between two calls. Longer than the timeouts of most proxies and clients, so that
    they close it first."""

    drain_seconds: float = 30.0
    """Seconds that running requests may continue after a stop signal, before they are aborted. Blocks worth keeping are then
    stored in --kv-disk or --kv-remote for as many seconds at most."""

    special_tokens_in_content: bool = False
    """Let text inside messages act as template markers. Off: such text is plain text."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""

    def __post_init__(self) -> None:
        _at_least(self, max_body_bytes=1024, stall_seconds=0.1, keep_alive_seconds=0.1, drain_seconds=0)
        if not 0 <= self.port <= 65535:
            raise BadValue(f"--port is {self.port}; it must be between 0 and 65535.", param="port")
        self._check_keys()
        self.tenant_shares()

    def _check_keys(self) -> None:
        """Refuse keys that no Authorization header can carry, and those given twice. A message never shows a key."""
        for place, key in enumerate(self.api_key, start=1):
            if not key.strip():
                problem = "is empty or blank"
            elif key != key.strip():
                problem = "begins or ends with a blank or a line break"
            elif any(code < 32 or code == 127 or 0xD800 <= code <= 0xDFFF for code in map(ord, key)):
                problem = "has a character that an Authorization header cannot carry"
            elif key in self.api_key[: place - 1]:
                problem = f"is the same as number {self.api_key.index(key) + 1}"
            else:
                continue
            raise BadValue(f"--api-key number {place} {problem}. Give another.", param="api_key")

    def tenant_shares(self) -> dict[str, tuple[float, float]]:
        """Returns key -> (reserved share, maximum share). Raises BadValue; a message never names a key."""
        shares = {}
        for place, entry in enumerate(self.tenant_share, start=1):
            key, _, numbers = entry.rpartition("=")
            try:
                low, _, high = numbers.partition(":")
                reserved, maximum = float(low), float(high or 1.0)
            except ValueError:
                reserved, maximum = 1.0, 0.0
            if key not in self.api_key or key in shares or not 0 <= reserved <= maximum <= 1:
                raise BadValue(
                    f"--tenant-share number {place} must be KEY=RESERVED or KEY=RESERVED:MAXIMUM, with an --api-key that has "
                    "no other share, and 0 <= RESERVED <= MAXIMUM <= 1.",
                    param="tenant_share",
                )
            shares[key] = (reserved, maximum)
        total = sum(reserved for reserved, _ in shares.values())
        if total > 1:
            raise BadValue(f"--tenant-share reserves {total:g} of the cache in all. Reserve at most 1.", param="tenant_share")
        return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Slices that an engine needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
