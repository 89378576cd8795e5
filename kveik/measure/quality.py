"""Measures the quality of a configuration: the same text, read and continued by a baseline and by the configuration.

One is loaded after the other, so that a model which fits once can be measured. Divergence over the whole vocabulary needs both
distributions of a position at once. The baseline's final hidden states and its product with the vocabulary are kept: they give
its exact logits again, beside the configuration's. Hidden states take 2 or 4 bytes times the hidden size per token (1 to 6 kB
for the catalogue's models). Logits would take 100 to 600 kB, and rounding to fit a disk. The price is computing the baseline's
vocabulary product twice.
"""

from __future__ import annotations

import ctypes
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from kveik.config import EngineConfig
from kveik.engine.llm import LLM, none_failed
from kveik.errors import BadValue, Unreachable
from kveik.measure.distance import Distances, distances, divergence_of, loss_of, shift_of
from kveik.measure.hidden_states import Logits, Tokens, executor_of, head_of, prompts, read_text, windows
from kveik.measure.verdict import Evaluation, GreedyAgreement, Side
from kveik.model.catalogue import find_model
from kveik.model.weights import open_model
from kveik.request.request import SamplingParams
from kveik.text.heldout import HeldOutText
from kveik.words import counted

CONTEXT = 2048
PROMPT_TOKENS = 64
NEW_TOKENS = 64

ROWS = 64
"""Most positions whose logits are compared at once."""

ROWS_BYTES = 64 << 20
"""Bytes of float32 logits compared at once; six times as much is alive meanwhile."""

PROMPTS_MAX = 1024
"""Most prompts: 65,536 tokens of answers from each of the two."""

HIDDEN_BYTES = 4 << 30
"""Most bytes of the baseline's hidden states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Text, and how much of it is read and continued. Checked once."""

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


Excerpts = tuple[list[Tokens], list[Tokens]]
"""Parts of the text, as tokens: windows that are read, and prompts that are continued."""

Report = Callable[[str, int, int], None]
"""Takes the stage with the configuration it is about, then the tokens read and written so far and in all, by both."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Results that are kept of the baseline once its engine is closed."""

    excerpts: Excerpts
    hidden: list[Tensor]
    """Per window: [tokens - 1, hidden], in the decoder's type"""

    head: Logits
    tokens_real: int
    """Ids that the tokenizer has. Those behind are padding of the vocabulary, which nobody can draw."""

    answers: list[tuple[int, ...]]
    side: partial[Side]


def evaluate(config: EngineConfig, against: EngineConfig, task: Task, report: Report) -> Evaluation:
    """Compares `config` with the baseline `against`.

    Raises BadValue if the context or the text does not suit the models, and everything that `open_engine` and a step raise.
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
    answers = _write(llm, baseline.excerpts[1], progress, "the configuration")
    side, chunk = _side(llm), llm.loaded.plan.max_chunk
    llm.close()
    loss, margin = loss_of(found)
    theirs, ours = _differences(against, config)
    return Evaluation(
        model=config.model.model,
        text=task.text.name,
        origin=task.text.origin,
        tokens=len(found),
        context=context,
        windows=len(baseline.excerpts[0]),
        chunk=chunk,
        baseline=baseline.side(
            settings=theirs,
            perplexity=math.exp(found.loss_baseline.mean()),
            entropy=float(found.entropy_baseline.mean()),
            tail=float(found.tail_baseline.mean()),
        ),
        configuration=side(
            settings=ours,
            perplexity=math.exp(found.loss.mean()),
            entropy=float(found.entropy.mean()),
            tail=float(found.tail.mean()),
        ),
        loss_percent=loss,
        margin_percent=margin,
        tolerance_percent=task.tolerance_percent,
        top1_agreement=float(found.same_top.mean()),
        divergence=divergence_of(found),
        temperature_shift=shift_of(found),
        greedy=GreedyAgreement.of(baseline.answers, answers) if answers else None,
    )


def _side(llm: LLM) -> partial[Side]:
    """Facts of an engine that outlive it; the figures on the text come later."""
    decoder = executor_of(llm).decoder
    return partial(
        Side,
        dtype=llm.loaded.dtype_name,
        kv_cache_dtype=llm.loaded.kv_dtype_name,
        weights=decoder.described,
        weight_bytes=decoder.weight_bytes,
        cache_bytes_per_token=sum(layout.block_bytes // layout.block_size for layout in llm.loaded.plan.memory.layouts),
    )


def _give_back_memory() -> None:
    """Frees the closed model, which reference cycles keep alive, and returns its memory to the system.

    glibc keeps freed memory, 300 MB after SmolLM2-135M. Other C libraries lack the call or do not need it.
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
        self._report(self._stage, self._done, self.total)


def _context(configs: tuple[EngineConfig, EngineConfig], task: Task) -> int:
    """Returns the tokens of a window. Raises BadValue if a model's context is shorter, or hidden states would take too much."""
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
                f"{HIDDEN_BYTES} that are allowed: at most {HIDDEN_BYTES // (spec.hidden * 4)} tokens.",
                param="tokens",
            )
    assert context is not None
    return context


def _fitted(config: EngineConfig, context: int) -> EngineConfig:
    """Returns the configuration with this context at most, and without prefix caching, so that every window is computed."""
    return replace(
        config,
        model=replace(config.model, max_model_len=context),
        cache=replace(config.cache, enable_prefix_caching=False),
    )


def _excerpts(llm: LLM, context: int, task: Task) -> Excerpts:
    tokenizer = llm.loaded.tokenizer
    tokens = tokenizer.encode(task.text.text, add_special=False, parse_special=False)
    start = tokenizer.bos
    # The start token, if the model's texts begin with one.
    lead = (start,) if start is not None and tokenizer.encode("a")[0] == start else ()
    read = windows(tokens, task.tokens, context, lead)
    if not read:
        raise BadValue(f"The text has {counted(len(tokens), 'token')}, and at least 2 are needed.", param="text")
    # Half of a short context at most, so that there is room for an answer.
    length = min(PROMPT_TOKENS, context // 2)
    return read, prompts(tokens, task.prompts, length, lead) if context > len(lead) + 1 else []


def _run_baseline(config: EngineConfig, context: int, task: Task, progress: _Progress) -> Baseline:
    """Loads the baseline, and keeps only what the comparison needs."""
    progress.say("loading the baseline")
    llm = LLM(config)
    excerpts = read, prompts = _excerpts(llm, context, task)
    progress.total = 2 * (sum(len(window) - 1 for window in read) + NEW_TOKENS * len(prompts))
    progress.say("reading with the baseline")
    hidden = [read_text(llm, window[:-1], progress.advance) for window in read]
    answers = _write(llm, prompts, progress, "the baseline")
    executor = executor_of(llm)
    baseline = Baseline(excerpts, hidden, head_of(executor.decoder), executor.sampler.tokens_real, answers, _side(llm))
    llm.close()
    return baseline


def _compare(llm: LLM, baseline: Baseline, progress: _Progress) -> Distances:
    """Reads the text again with the configuration, and compares every position with the baseline's. Runs outside of the
    engine's steps, which end requests when something goes wrong."""
    progress.say("reading with the configuration")
    decoder = executor_of(llm).decoder
    real = baseline.tokens_real
    rows = max(1, min(ROWS, ROWS_BYTES // (4 * real)))
    parts = []
    for window, theirs in zip(baseline.excerpts[0], baseline.hidden, strict=True):
        ours = read_text(llm, window[:-1], progress.advance)
        targets = torch.tensor(window[1:])
        for first in range(0, len(targets), rows):
            span = slice(first, first + rows)
            kept, new = baseline.head(theirs[span])[:, :real], decoder.logits(ours[span])[:, :real]
            parts.append(distances(kept, new, targets[span]))
    return Distances.joined(parts)


def _write(llm: LLM, prompts: Sequence[Tokens], progress: _Progress, whose: str) -> list[tuple[int, ...]]:
    """Returns the greedy continuation of every prompt, all of them in one batch."""
    if not prompts:
        return []
    progress.say(f"writing with {whose}")
    room = min(NEW_TOKENS, min(llm.max_new_tokens(prompt) for prompt in prompts))
    answers = none_failed(llm.generate(prompts, SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)))
    progress.advance(NEW_TOKENS * len(prompts))
    return [answer.tokens for answer in answers]


def _differences(baseline: EngineConfig, config: EngineConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the settings in which the two differ, by name as typed: the values of each."""
    theirs, ours = {}, {}
    for slice_ in fields(EngineConfig):
        one, other = getattr(baseline, slice_.name), getattr(config, slice_.name)
        for field in fields(one):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if a != b:
                name = field.name.replace("_", "-")
                theirs[name], ours[name] = str(a), str(b)
    return theirs, ours
