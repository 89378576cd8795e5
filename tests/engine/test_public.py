"""Files with public beginnings become the tokens that requests have, and requests of all tenants share them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kveik.config import CacheConfig
from kveik.engine.build import public_tokens
from kveik.engine.llm import LLM
from kveik.errors import BadValue
from kveik.request.request import SamplingParams
from kveik.text.chat_template import ChatTemplate, TemplateSources
from kveik.text.tokenizer import tokenizer_from_folder
from tests.engine.test_build import config
from tests.engine.tiny import save_tiny_llama

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def written(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def test_a_file_holds_text_or_ids_or_messages(folder: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(folder)
    template = ChatTemplate.for_tokenizer(TemplateSources(TEMPLATE), tokenizer)
    files = [
        written(tmp_path / "a.txt", "hello there"),
        written(tmp_path / "b.json", [5, 6, 7]),
        written(tmp_path / "c.json", [{"role": "system", "content": "hello"}]),
    ]
    text, ids, chat = public_tokens(files, tokenizer, template)
    assert text == tuple(tokenizer.encode("hello there"))
    assert ids == (5, 6, 7)
    assert chat == tuple(tokenizer.encode("system: hello\n", add_special=False))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", "{", "cannot be read"),
        ("a.json", {"a": 1}, "list of token ids"),
        ("a.json", [1, -1], "token ids in"),
        ("a.json", [1, True], "token ids in"),
        ("a.json", [1 << 40], "token ids in"),
        ("a.json", [], "empty"),
        ("a.json", [{"role": "user", "content": "x"}], "no chat template"),
    ],
)
def test_a_file_that_holds_none_is_refused_with_its_name(
    folder: Path, tmp_path: Path, name: str, content: object, says: str
) -> None:
    with pytest.raises(BadValue, match=says) as caught:
        public_tokens([written(tmp_path / name, content)], tokenizer_from_folder(folder), None)
    assert name in str(caught.value)


def test_a_file_that_is_missing_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="--public-prefix"):
        public_tokens([str(tmp_path / "none.txt")], tokenizer_from_folder(folder), None)


def test_requests_with_different_salts_share_whole_public_blocks_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    declared = list(range(40))
    settings = config(folder)
    public = CacheConfig(num_gpu_blocks_override=64, public_prefix=(written(tmp_path / "p.json", declared),))
    llm = LLM(replace(settings, cache=public))
    once = SamplingParams(max_tokens=4, temperature=0.0)
    prompt = [*declared, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59]
    texts, found = [], []
    for salt in ("one", "other", "one"):
        texts.append("".join(delta.text for delta in llm.stream(prompt, once, cache_salt=salt)))
        found.append(llm.cached_tokens_last())
    llm.close()
    # Two whole blocks of sixteen lie within the forty tokens; of one's own all but the last token are found.
    assert found == [0, 32, 49]
    assert len(set(texts)) == 1
