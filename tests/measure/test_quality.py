"""Whole measurements of tiny models: against transformers, against distributions that are known, and against themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.errors import BadValue, Broken, Unreachable
from kveik.measure import quality
from kveik.measure.hidden_states import windows
from kveik.measure.quality import Task, evaluate
from kveik.measure.verdict import Evaluation, quality_sentence
from kveik.text.heldout import HeldOutText
from tests.engine.tiny import save_tiny_llama

REAL = 257
"""Ids that the tiny tokenizer has; the model's vocabulary is padded beyond them."""

TEXT = HeldOutText(
    "rhyme", "a rhyme", "The yeast that was dried on a ring of straw works hot in the wort that the farmer saw. " * 12
)
TASK = Task(text=TEXT, tokens=300, context=100, prompts=3)


def config_of(folder: Path, **model: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), **{"dtype": "float32", "quantization": "bf16", **model}),  # type: ignore[arg-type]  # given by name
        cache=CacheConfig(kv_cache_memory_bytes=4 << 20),
        schedule=ScheduleConfig(prefill_chunk_size=32),
    )


def measured(config: EngineConfig, against: EngineConfig, task: Task = TASK) -> Evaluation:
    return evaluate(config, against, task, lambda stage, done, total: None)


def changed(folder: Path, into: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a saved model with every tensor changed."""
    into.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (into / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file({name: change(name, tensor) for name, tensor in tensors.items()}, into / "model.safetensors", {"format": "pt"})
    return into


def tokens_of(folder: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt the text, so that whatever is done to it makes it worse."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(0.1)
    tokens = torch.tensor(tokens_of(folder, TEXT.text))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(40):
        batch = tokens.roll(-step)[: 8 * 64].view(8, 64)
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def damaged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with noise on it, a third of each matrix's own size."""
    chance = torch.Generator().manual_seed(1)

    def noisy(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + tensor.std() * torch.randn(tensor.shape, generator=chance) / 3 if tensor.dim() > 1 else tensor

    return changed(folder, tmp_path_factory.mktemp("damaged") / "model", noisy)


def test_perplexity_is_that_of_transformers_over_the_same_windows(folder: Path) -> None:
    found = measured(config_of(folder), config_of(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = []
    for window in windows(tokens_of(folder, TEXT.text), 300, 100):
        tokens = torch.tensor([window])
        with torch.no_grad():
            logs = torch.log_softmax(model(tokens).logits[0, :-1, :REAL].double(), -1)
        losses += (-logs.gather(1, tokens[0, 1:, None])[:, 0]).tolist()
    assert found.tokens == len(losses) == 297
    assert found.windows == 3
    assert found.configuration.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert found.baseline.perplexity == found.configuration.perplexity
    assert 1 < found.baseline.perplexity < 20


def test_a_model_is_at_no_distance_from_itself(folder: Path) -> None:
    found = measured(config_of(folder), config_of(folder))
    assert found.same
    assert found.divergence.mean == found.divergence.max == found.loss_percent == found.margin_percent == 0
    assert found.top1_agreement == 1
    assert found.greedy is not None
    assert found.greedy.identical == found.greedy.prompts == 3
    assert found.greedy.equal_share == 1
    assert found.configuration.settings == {}
    assert "the very same numbers" in quality_sentence(found)


def test_how_a_text_is_cut_into_chunks_changes_nothing_but_rounding(folder: Path) -> None:
    whole = replace(config_of(folder), schedule=ScheduleConfig(prefill_chunk_size=512))
    found = measured(config_of(folder), whole)
    assert found.divergence.max < 1e-5
    assert found.chunk == 32
    assert found.baseline.settings == {"prefill-chunk-size": "512"}
    assert found.configuration.settings == {"prefill-chunk-size": "32"}


def test_a_model_that_knows_nothing_has_the_vocabulary_for_its_perplexity(folder: Path, tmp_path: Path) -> None:
    def blank(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor) if name == "lm_head.weight" else tensor

    blank_folder = changed(folder, tmp_path / "blank", blank)
    found = measured(config_of(blank_folder), config_of(folder))
    assert found.configuration.perplexity == pytest.approx(REAL, rel=1e-5)
    assert found.configuration.entropy == pytest.approx(math.log(REAL), rel=1e-5)
    assert found.baseline.perplexity < 20
    assert found.configuration.settings == {"model": str(blank_folder)}


def test_a_damaged_model_is_beyond_the_tolerance(folder: Path, damaged: Path) -> None:
    found = measured(config_of(damaged), config_of(folder))
    assert not found.within_tolerance
    assert found.loss_percent - found.margin_percent > 1
    assert "beyond the tolerance of 0.5 %" in quality_sentence(found)
    assert found.divergence.mean > 0.01
    assert found.top1_agreement < 1
    assert found.greedy is not None
    assert found.greedy.equal_share < 1
    back = measured(config_of(folder), config_of(damaged))
    assert back.within_tolerance
    assert back.configuration.perplexity == pytest.approx(found.baseline.perplexity)


@pytest.mark.parametrize(("kind", "share"), [("bfloat16", 1 / 2), ("int8", 18 / 64), ("fp8_e5m2", 18 / 64)])
def test_keys_and_values_are_read_back_as_they_were_stored(kind: str, share: float, folder: Path) -> None:
    """Stored in fewer bits than they were computed in, they move the distribution: the storage is really read."""
    narrow = replace(config_of(folder), cache=CacheConfig(kv_cache_memory_bytes=4 << 20, kv_cache_dtype=kind))  # type: ignore[arg-type]  # one of them
    found = measured(narrow, config_of(folder))
    assert 0 < found.divergence.mean < 0.05
    assert (found.configuration.kv_cache_dtype, found.baseline.kv_cache_dtype) == (kind, "float32")
    # Heads of 16 values, and for the narrow types a scale of two bytes.
    assert found.configuration.cache_bytes_per_token == share * found.baseline.cache_bytes_per_token


def test_progress_names_each_stage_and_ends_when_all_is_done(folder: Path) -> None:
    told: list[tuple[str, int, int]] = []
    evaluate(config_of(folder), config_of(folder), TASK, lambda *report: told.append(report))
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    verbs = [stage.split()[0] for stage in stages]
    assert verbs == ["loading", "reading", "writing"] * 2
    assert [stage.split()[-1] for stage in stages] == ["baseline"] * 3 + ["configuration"] * 3
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1:] == (2 * (297 + 3 * quality.NEW_TOKENS),) * 2


def test_without_prompts_nothing_is_written(folder: Path) -> None:
    found = measured(config_of(folder), config_of(folder), replace(TASK, prompts=0))
    assert found.greedy is None


def test_the_context_is_the_usual_one_or_as_much_as_the_model_has(folder: Path, tmp_path: Path) -> None:
    assert measured(config_of(folder), config_of(folder), replace(TASK, context=None, prompts=0)).context == quality.CONTEXT
    short = config_of(folder, max_model_len=64)
    assert measured(short, config_of(folder), replace(TASK, context=None, prompts=0)).context == 64


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (replace(TASK, context=5000), "--context is 5000; the model's context holds 4096 tokens"),
        (replace(TASK, tokens=1 << 40), "at most 16777216 tokens"),
        (replace(TASK, text=HeldOutText("a", "a", "a")), "The text has 1 token, and at least 2 are needed"),
    ],
    ids=["context", "tokens", "text"],
)
def test_what_cannot_be_measured_is_refused_with_the_number(task: Task, words: str, folder: Path) -> None:
    with pytest.raises(BadValue) as refused:
        measured(config_of(folder), config_of(folder), task)
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tokens": 1}, "--tokens is 1; it must be at least 2"),
        ({"context": 1}, "--context is 1; it must be at least 2"),
        ({"prompts": -1}, "--prompts is -1; it must be at least 0"),
        ({"tolerance_percent": math.nan}, "--tolerance is nan; it must be at least 0"),
    ],
)
def test_a_task_out_of_range_is_refused_by_the_name_of_its_option(values: dict[str, float], words: str) -> None:
    with pytest.raises(BadValue, match=words):
        replace(TASK, **values)  # type: ignore[arg-type]  # wrong on purpose


def test_models_with_different_tokens_are_not_compared(folder: Path, tmp_path: Path) -> None:
    other = changed(folder, tmp_path / "other", lambda name, tensor: tensor)
    path = other / "tokenizer.json"
    # Two letters change places in the vocabulary.
    path.write_text(path.read_text().replace('"t": ', '"?": ').replace('"h": ', '"t": ').replace('"?": ', '"h": '))
    with pytest.raises(BadValue, match="different tokens"):
        measured(config_of(other), config_of(folder))


def test_a_model_that_is_not_here_is_named(folder: Path) -> None:
    with pytest.raises(Unreachable, match="no-such-model"):
        measured(config_of(Path("no-such-model")), config_of(folder))


@pytest.mark.parametrize("broken", ["configuration", "baseline"])
def test_values_that_are_not_finite_are_told_and_not_averaged(broken: str, folder: Path, tmp_path: Path) -> None:
    def spoiled(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * math.nan if name.endswith("1.mlp.down_proj.weight") else tensor

    bad = config_of(changed(folder, tmp_path / "bad", spoiled))
    pair = (bad, config_of(folder)) if broken == "configuration" else (config_of(folder), bad)
    with pytest.raises(Broken, match="not finite on this text"):
        measured(*pair)
