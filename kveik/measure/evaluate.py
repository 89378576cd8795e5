"""Measures what a configuration costs in quality: the same text, read and continued by a baseline and by the configuration.

The two are loaded one after the other, so that a model which fits once can be measured. Divergence over the whole vocabulary
needs both distributions of a position at once; what is kept of the baseline is its final hidden states and its product with the
vocabulary, from which its logits come out again, exactly, beside the configuration's. Per token that is 2 or 4 bytes times the
hidden size (1 to 6 kB for the catalogue's models), where logits would be 100 to 600 kB, rounded, on a disk that has to hold
them. The price is computing the baseline's vocabulary product twice.
"""

from __future__ import annotations

import ctypes
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from kveik.config import EngineConfig
from kveik.engine.llm import LLM, none_failed
from kveik.errors import BadValue, Unreachable
from kveik.measure.distance import Distances, Floats, distances
from kveik.measure.evaluation import Evaluation, GreedyAgreement, Side, divergence_of, loss_of, shift_of
from kveik.measure.excerpts import Tokens, prompts, windows
from kveik.measure.listening import Logits, executor_of, head_of, read_text
from kveik.model.catalogue import find_model
from kveik.model.weights import open_model
from kveik.request.request import SamplingParams
from kveik.text.heldout import HeldOutText
from kveik.text.tokenizer import Tokenizer
from kveik.words import counted

CONTEXT = 2048
PROMPT_TOKENS = 64
NEW_TOKENS = 64

ROWS = 64
"""Positions whose logits are compared at once at most."""

ROWS_BYTES = 64 << 20
"""Bytes of float32 logits compared at once; six times as much is alive meanwhile."""

PROMPTS_MAX = 1024
"""Prompts at most: 65,536 tokens of answers from each of the two."""

HIDDEN_BYTES = 4 << 30
"""Bytes of the baseline's hidden states at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is read and written. Checked once."""

    text: HeldOutText
    tokens: int = 8192
    context: int | None = None
    """Tokens of a window; None: `CONTEXT`, or the model's own where that is shorter."""

    prompts: int = 8
    tolerance_percent: float = 0.5

    def __post_init__(self) -> None:
        for name, low in (("tokens", 2), ("context", 2), ("prompts", 0), ("tolerance_percent", 0)):
            value = getattr(self, name)
            # Written so that NaN fails too.
            if value is not None and not value >= low:
                flag = "--" + name.removesuffix("_percent")
                raise BadValue(f"{flag} is {value}; it must be at least {low}.", param=name)
        if self.prompts > PROMPTS_MAX:
            raise BadValue(f"--prompts is {self.prompts}; it must be at most {PROMPTS_MAX}.", param="prompts")


@dataclass(frozen=True, slots=True)
class EvaluationProgress:
    """How far a measurement is."""

    stage: str
    """What is being done, and with which of the two."""

    done: int
    total: int
    """Tokens that are read or written, both configurations together."""


Report = Callable[[EvaluationProgress], None]


@dataclass(frozen=True, slots=True)
class Excerpts:
    """The parts of the text, as tokens."""

    windows: list[Tokens]
    prompts: list[Tokens]

    @property
    def read(self) -> int:
        """Tokens whose next one is known: what every mean is over."""
        return sum(len(window) - 1 for window in self.windows)

    @property
    def written(self) -> int:
        return NEW_TOKENS * len(self.prompts)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What is kept of the baseline once its engine is gone."""

    excerpts: Excerpts
    hidden: list[Tensor]
    """Per window: [tokens - 1, hidden], in the type that the decoder gave"""

    head: Logits
    answers: list[tuple[int, ...]]
    loaded: Loaded


@dataclass(frozen=True, slots=True)
class Loaded:
    """Facts of an engine that outlive it."""

    dtype: str
    kv_cache_dtype: str
    weights: str
    weight_bytes: int
    cache_bytes_per_token: int
    tokens_real: int
    chunk: int

    @classmethod
    def of(cls, llm: LLM) -> Loaded:
        loaded, executor = llm.loaded, executor_of(llm)
        return cls(
            dtype=loaded.dtype_name,
            kv_cache_dtype=loaded.kv_dtype_name,
            weights=executor.decoder.described,
            weight_bytes=executor.decoder.weight_bytes,
            cache_bytes_per_token=sum(layout.block_bytes // layout.block_size for layout in loaded.plan.memory.layouts),
            tokens_real=executor.sampler.tokens_real,
            chunk=loaded.plan.max_chunk,
        )


def evaluate(config: EngineConfig, against: EngineConfig, task: Task, report: Report) -> Evaluation:
    """Hold `config` against the baseline `against`.

    Raises BadValue where the context or the text does not suit the models, and what `open_engine` and a step raise.
    """
    context = _context((config, against), task)
    progress = _Progress(report)
    baseline = _run_baseline(_fitted(against, context), context, task, progress)
    _give_back_memory()
    progress.say("loading the configuration")
    llm = LLM(_fitted(config, context))
    if _excerpts(llm, context, task) != baseline.excerpts:
        raise BadValue(
            "The two models cut the text into different tokens, so their perplexities cannot be compared.", param="against"
        )
    found = _compare(llm, baseline, progress)
    answers = _write(llm, baseline.excerpts.prompts, progress, "the configuration")
    facts = Loaded.of(llm)
    llm.close()
    greedy = GreedyAgreement.of(baseline.answers, answers) if answers else None
    return _evaluation(task, (against, config), (baseline.loaded, facts), baseline.excerpts, context, found, greedy)


def _give_back_memory() -> None:
    """Before the next model is loaded, let go of the one before, which circles of references hold, and let the system have it.

    glibc keeps freed memory for itself, 300 MB after SmolLM2-135M; other C libraries have no such call, or need none.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Progress:
    """Tokens read and written so far, by both."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._stage = ""
        self._done = 0
        self.total = 0

    def say(self, stage: str) -> None:
        self._stage = stage
        self.advance(0)

    def advance(self, tokens: int) -> None:
        self._done += tokens
        self._report(EvaluationProgress(self._stage, self._done, self.total))


def _context(configs: tuple[EngineConfig, EngineConfig], task: Task) -> int:
    """Tokens of a window. Raises BadValue where it is more than a model's context, or the hidden states would be too many."""
    context = task.context
    for config in configs:
        path = find_model(config.model.model)
        if path is None:
            raise Unreachable(f"The model '{config.model.model}' is not here; fetch it with: kveik pull {config.model.model}")
        spec = open_model(path).spec
        most = min(spec.context, config.model.max_model_len or spec.context)
        if context is None:
            context = min(CONTEXT, most)
        if context > most:
            raise BadValue(f"--context is {context}; the model's context holds {counted(most, 'token')}.", param="context")
        needed = task.tokens * spec.hidden * 4
        if needed > HIDDEN_BYTES:
            raise BadValue(
                f"--tokens is {task.tokens}; the baseline's hidden states would take {counted(needed, 'byte')} of "
                f"{HIDDEN_BYTES} that "
                f"are allowed: at most {HIDDEN_BYTES // (spec.hidden * 4)} tokens.",
                param="tokens",
            )
    assert context is not None
    return context


def _fitted(config: EngineConfig, context: int) -> EngineConfig:
    """For this work: every window is computed anew, and no longer context is planned for than is used."""
    return replace(
        config,
        model=replace(config.model, max_model_len=context),
        cache=replace(config.cache, enable_prefix_caching=False),
    )


def _excerpts(llm: LLM, context: int, task: Task) -> Excerpts:
    tokenizer = llm.loaded.tokenizer
    tokens = tokenizer.encode(task.text.text, add_special=False, parse_special=False)
    lead = _lead(tokenizer)
    found = Excerpts(
        windows(tokens, task.tokens, context, lead),
        # Half of a short context at most, so that there is room for an answer.
        prompts(tokens, task.prompts, min(PROMPT_TOKENS, context // 2), lead) if context > len(lead) + 1 else [],
    )
    if not found.windows:
        raise BadValue(f"The text has {counted(len(tokens), 'token')}, and at least 2 are needed.", param="text")
    return found


def _lead(tokenizer: Tokenizer) -> Tokens:
    """The start token, where the model's texts begin with one."""
    start = tokenizer.bos
    return (start,) if start is not None and tokenizer.encode("a")[0] == start else ()


def _run_baseline(config: EngineConfig, context: int, task: Task, progress: _Progress) -> Baseline:
    """Load the baseline, and let go of all but what the comparison needs."""
    progress.say("loading the baseline")
    llm = LLM(config)
    excerpts = _excerpts(llm, context, task)
    progress.total = 2 * (excerpts.read + excerpts.written)
    progress.say("reading with the baseline")
    hidden = [read_text(llm, window[:-1], progress.advance) for window in excerpts.windows]
    answers = _write(llm, excerpts.prompts, progress, "the baseline")
    facts, head = Loaded.of(llm), head_of(executor_of(llm).decoder)
    llm.close()
    return Baseline(excerpts, hidden, head, answers, facts)


def _compare(llm: LLM, baseline: Baseline, progress: _Progress) -> Distances:
    """Read the text again, now with the configuration, and hold every position against the baseline's. Outside of the engine's
    steps, which end requests where something goes wrong."""
    progress.say("reading with the configuration")
    decoder = executor_of(llm).decoder
    real = baseline.loaded.tokens_real
    rows = max(1, min(ROWS, ROWS_BYTES // (4 * real)))
    parts = []
    for window, theirs in zip(baseline.excerpts.windows, baseline.hidden, strict=True):
        ours = read_text(llm, window[:-1], progress.advance)
        targets = torch.tensor(window[1:])
        for first in range(0, len(targets), rows):
            span = slice(first, first + rows)
            # Ids that the tokenizer does not have are padding of the vocabulary: nobody can draw them.
            kept, new = baseline.head(theirs[span])[:, :real], decoder.logits(ours[span])[:, :real]
            parts.append(distances(kept, new, targets[span]))
    return Distances.joined(parts)


def _write(llm: LLM, prompts: Sequence[Tokens], progress: _Progress, whose: str) -> list[tuple[int, ...]]:
    """The likeliest continuation of every prompt, all of them batched."""
    if not prompts:
        return []
    progress.say(f"writing with {whose}")
    room = min(NEW_TOKENS, min(llm.max_new_tokens(prompt) for prompt in prompts))
    answers = none_failed(llm.generate(prompts, SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)))
    progress.advance(NEW_TOKENS * len(prompts))
    return [answer.tokens for answer in answers]


def _evaluation(
    task: Task,
    configs: tuple[EngineConfig, EngineConfig],
    loaded: tuple[Loaded, Loaded],
    excerpts: Excerpts,
    context: int,
    found: Distances,
    greedy: GreedyAgreement | None,
) -> Evaluation:
    """configs, loaded: the baseline's and the configuration's."""
    loss, margin = loss_of(found)
    theirs, ours = _differences(*configs)
    return Evaluation(
        model=configs[1].model.model,
        text=task.text.name,
        origin=task.text.origin,
        tokens=len(found),
        context=context,
        windows=len(excerpts.windows),
        chunk=loaded[1].chunk,
        baseline=_side(theirs, loaded[0], found.loss_baseline, found.entropy_baseline, found.tail_baseline),
        configuration=_side(ours, loaded[1], found.loss, found.entropy, found.tail),
        loss_percent=loss,
        margin_percent=margin,
        tolerance_percent=task.tolerance_percent,
        top1_agreement=float(found.same_top.mean()),
        divergence=divergence_of(found),
        temperature_shift=shift_of(found),
        greedy=greedy,
    )


def _side(settings: dict[str, str], loaded: Loaded, loss: Floats, entropy: Floats, tail: Floats) -> Side:
    return Side(
        settings=settings,
        dtype=loaded.dtype,
        kv_cache_dtype=loaded.kv_cache_dtype,
        weights=loaded.weights,
        weight_bytes=loaded.weight_bytes,
        cache_bytes_per_token=loaded.cache_bytes_per_token,
        perplexity=math.exp(loss.mean()),
        entropy=float(entropy.mean()),
        tail=float(tail.mean()),
    )


def _differences(baseline: EngineConfig, config: EngineConfig) -> tuple[dict[str, str], dict[str, str]]:
    """The settings in which the two differ, by name as typed, and what each has."""
    theirs, ours = {}, {}
    for slice_ in fields(EngineConfig):
        one, other = getattr(baseline, slice_.name), getattr(config, slice_.name)
        for field in fields(one):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if a != b:
                name = field.name.replace("_", "-")
                theirs[name], ours[name] = str(a), str(b)
    return theirs, ours
