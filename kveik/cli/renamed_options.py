"""Options of other servers, and their names here.

Refused by name: a flag that is silently ignored, or taken for another, would cost its user an afternoon.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Foreign:
    """An option of another server."""

    source: str
    """The server that has it."""

    advice: str
    """The option to write instead, or the reason why there is none. Every `--name` in it is one of ours; a test looks."""


def _named(source: str, instead: str, *flags: str) -> dict[str, Foreign]:
    return {flag: Foreign(source, f"The name here is {instead}.") for flag in flags}


def _absent(source: str, advice: str, *flags: str) -> dict[str, Foreign]:
    return {flag: Foreign(source, advice) for flag in flags}


_MODEL = "The model stands without a flag: kveik serve MODEL."
_CPU = "kveik computes on the CPU; there are no layers to move elsewhere."
_ALONE = "One process serves one model; it is not split over devices."
_CHUNKED = "Long prompts are always computed in chunks; --prefill-chunk-size is how many tokens a step takes."
_SWAP = "Preempted sequences are recomputed, nothing is swapped; --kv-cache-memory-bytes sizes the cache."

FOREIGN: dict[str, Foreign] = {
    # vLLM, removed ones too
    **_absent("vLLM", _SWAP, "--swap-space", "--cpu-offload-gb"),
    **_named("vLLM", "--gpu-memory-utilization", "--gpu-memory"),
    **_absent("vLLM", _CHUNKED, "--enable-chunked-prefill", "--no-enable-chunked-prefill"),
    **_absent("vLLM", "The model's own tokenizer is always used.", "--tokenizer", "--tokenizer-mode", "--skip-tokenizer-init"),
    **_absent("vLLM", _MODEL, "--model"),
    **_absent("vLLM", _ALONE, "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size"),
    **_absent("vLLM", "Code that a model brings along is never run.", "--trust-remote-code"),
    **_absent("vLLM", "Nothing is captured or compiled ahead; steps always run eagerly.", "--enforce-eager"),
    **_absent("vLLM", "Speculative decoding is not built yet.", "--speculative-config", "--num-speculative-tokens"),
    **_absent("vLLM", "LoRA adapters are not built yet.", "--enable-lora", "--lora-modules", "--max-loras"),
    **_named("vLLM", "--quantization", "-q"),
    **_absent("vLLM", "The format is seen from the file: a folder of safetensors, or GGUF.", "--load-format"),
    **_absent(
        "vLLM", "Access lines come with --log-level info and go with warning.", "--disable-log-requests", "--uvicorn-log-level"
    ),
    # llama.cpp
    **_named("llama.cpp", "--max-model-len", "-c", "--ctx-size"),
    **_absent("llama.cpp", _CPU, "-ngl", "--n-gpu-layers", "--gpu-layers", "--main-gpu", "--tensor-split"),
    **_named("llama.cpp", "--threads, for prompts and new tokens alike", "-t", "-tb", "--threads-batch"),
    **_named("llama.cpp", "--max-num-batched-tokens", "-b", "--batch-size"),
    **_named("llama.cpp", "--prefill-chunk-size", "-ub", "--ubatch-size"),
    **_named("llama.cpp", "--max-num-seqs", "-np", "--parallel"),
    **_named("llama.cpp", "--kv-cache-dtype", "-ctk", "-ctv", "--cache-type-k", "--cache-type-v"),
    **_named("llama.cpp", "--max-tokens; a server takes it from each request", "-n", "--predict", "--n-predict"),
    **_named("llama.cpp", "--temperature", "--temp"),
    **_named("llama.cpp", "--repetition-penalty", "--repeat-penalty"),
    **_named("llama.cpp", "--prompts-file, with one prompt a line", "-f", "--file"),
    **_named("llama.cpp", "--served-model-name", "-a", "--alias"),
    **_absent("llama.cpp", _MODEL, "-m", "-hf", "-hfr", "--hf-repo"),
    **_absent("llama.cpp", "Requests are batched continuously at all times.", "-cb", "--cont-batching"),
    **_absent("llama.cpp", "Attention is chosen by the kernels.", "-fa", "--flash-attn"),
    **_absent("llama.cpp", "Files are read once at start, into memory.", "--mlock", "--no-mmap"),
    **_absent("llama.cpp", "The whole prefix is found by content; --enable-prefix-caching, which is on.", "--cache-reuse"),
    **_named("llama.cpp", "--chat-template, which takes a file", "--chat-template-file"),
    # SGLang
    **_named("SGLang", "--gpu-memory-utilization", "--mem-fraction-static"),
    **_named("SGLang", "--prefill-chunk-size", "--chunked-prefill-size"),
    **_named("SGLang", "--max-num-seqs", "--max-running-requests"),
    **_named("SGLang", "--max-model-len", "--context-length"),
    **_named("SGLang", "--max-waiting", "--max-queued-requests"),
    **_named("SGLang", "--scheduling-policy", "--schedule-policy"),
    **_named("SGLang", "--block-size", "--page-size"),
    **_named("SGLang", "--no-enable-prefix-caching", "--disable-radix-cache"),
    **_named("SGLang", "--seed", "--random-seed"),
    **_absent("SGLang", _MODEL, "--model-path"),
    **_absent("SGLang", _ALONE, "--tp", "--tp-size", "--dp", "--dp-size"),
    **_absent("SGLang", "kveik picks the attention for the machine itself.", "--attention-backend"),
    # Text Generation Inference
    **_named("TGI", "--max-model-len", "--max-total-tokens"),
    **_named("TGI", "--max-num-seqs", "--max-concurrent-requests", "--max-batch-size"),
    **_named("TGI", "--max-num-batched-tokens", "--max-batch-total-tokens"),
    **_named("TGI", "--prefill-chunk-size", "--max-batch-prefill-tokens"),
    **_absent("TGI", _MODEL, "--model-id"),
}


def advice_for(words: Sequence[str], known: Collection[str]) -> str | None:
    """Advice on the first word that is an option of another server and not one of `known`; None where there is none."""
    options = itertools.takewhile(lambda word: word != "--", words)
    for option in (word.partition("=")[0] for word in options):
        if option in FOREIGN and option not in known:
            return f"{option} is {FOREIGN[option].source}'s. {FOREIGN[option].advice}"
    return None
