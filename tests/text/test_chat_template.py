"""Chat templates write what transformers makes of them, and their failures are the caller's sentences."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from kveik.errors import BadValue, ModelBroken, Unsupported
from kveik.text.chat_template import (
    MAX_RENDERED_CHARACTERS,
    ChatTemplate,
    TemplateSources,
    chat_template_from_folder,
    chat_template_from_gguf,
    chat_tokens,
)
from kveik.text.gguf_vocabulary import tokenizer_from_gguf
from tests.text.vocabularies import CHATML, NASTY, byte_level_metadata, metadata_of, real_tokenizer

CatalogueFile = Callable[[str], Path]
Messages = list[dict[str, object]]

ALTERNATING = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {{ '[' + message['role'] + '] ' + message['content'] | trim }}
{%- endfor -%}"""

TOOLS: Sequence[dict[str, object]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Weather at <place> & "time", in °C',
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Voss", "days": 3}'}}
DIALOGUES: dict[str, Messages] = {
    "user": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "turns": [{"role": "user", "content": "a\n b "}, {"role": "assistant", "content": " c"}, {"role": "user", "content": ""}],
    "assistant last": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "late system": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
    "tool use": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "content": "12 °C", "tool_call_id": "c1"},
        {"role": "tool", "content": "rain", "tool_call_id": "c2"},
        {"role": "assistant", "content": "12 °C and rain."},
    ],
    "html": [{"role": "user", "content": "<b>&amp;</b> {{ 7 * 7 }} {% raw %} é 你好 \U0001f336"}],
    "nasty": [{"role": "user", "content": text} for text in NASTY if "<" not in text],
}


def as_transformers_takes_them(messages: Messages) -> Messages:
    """transformers has no wire format: its callers parse the arguments themselves."""
    copied = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert isinstance(copied, list)
    return copied


# Against transformers.


@pytest.mark.model
@pytest.mark.parametrize(
    "name", ["smollm2-135m", "qwen2.5-coder-0.5b", pytest.param("qwen2.5-coder-1.5b", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("dialogue", DIALOGUES)
def test_rendered_text_equals_transformers(
    catalogue_file: CatalogueFile, name: str, prompted: bool, tools: list[dict[str, object]] | None, dialogue: str
) -> None:
    path = catalogue_file(name)
    sources, tokenizer = chat_template_from_gguf(metadata_of(path)), real_tokenizer(path)
    assert sources is not None
    messages = DIALOGUES[dialogue]
    ours = ChatTemplate.for_tokenizer(sources, tokenizer)
    (theirs,), _ = render_jinja_template(
        [as_transformers_takes_them(messages)],
        tools,
        chat_template=sources.default,
        add_generation_prompt=prompted,
        **tokenizer.named,
    )
    assert ours.render(messages, tools=tools, add_generation_prompt=prompted) == theirs
    # Nothing in these messages looks like a marker, so that tokens are those of the text as a whole.
    assert chat_tokens(ours, tokenizer, messages, tools=tools, add_generation_prompt=prompted) == tokenizer.encode(
        theirs, add_special=False
    )


@pytest.mark.model
def test_a_model_without_a_template_has_none(catalogue_file: CatalogueFile) -> None:
    assert chat_template_from_gguf(metadata_of(catalogue_file("gemma-3-270m"))) is None


EXTENSIONS = [
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}\n    {% if m.role == 'user' %}\n    {% continue %}\n    {% endif %}\n{{ m.role }}\n{% endfor %}\n",
    "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ {'é': '<'} | tojson(ensure_ascii=true) }}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}x",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ bos_token }}{{ messages[0]['content'].split('H')[-1].strip() }}{{ documents is none }}{{ tools is none }}",
    "{% macro say(x) %}<{{ x }}>{% endmacro %}{{ say(messages[0].content) }}",
    "{% if enable_thinking is defined and enable_thinking %}T{% else %}F{% endif %}",
]


@pytest.mark.parametrize("source", EXTENSIONS)
@pytest.mark.parametrize("dialogue", ["user", "turns"])
def test_the_sandbox_speaks_the_language_that_templates_are_written_in(source: str, dialogue: str) -> None:
    messages = DIALOGUES[dialogue]
    (theirs,), _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>", enable_thinking=True
    )
    ours = ChatTemplate(source, bos="<s>", eos="</s>")
    assert ours.render(messages, variables={"enable_thinking": True}) == theirs


def test_the_date_comes_from_the_clock_that_was_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render([{"role": "user", "content": "x"}]) == "26 Jul 2024"


# Refusals.


@pytest.mark.parametrize(
    ("roles", "sentence"),
    [
        (["system", "user"], "System role not supported"),
        (["user", "user"], "Conversation roles must alternate user/assistant/user/assistant/..."),
        (["assistant"], "Conversation roles must alternate user/assistant/user/assistant/..."),
    ],
)
def test_a_template_that_refuses_the_roles_says_so_in_its_own_sentence(roles: list[str], sentence: str) -> None:
    template = ChatTemplate(ALTERNATING)
    with pytest.raises(BadValue) as refused:
        template.render([{"role": role, "content": "x"} for role in roles])
    assert refused.value.message == sentence
    assert refused.value.status == 400
    # Later requests are unaffected.
    assert template.render([{"role": "user", "content": " x "}]) == "[user] x"


def test_no_messages_at_all_is_the_callers_fault_and_shows_no_trace() -> None:
    with pytest.raises(BadValue) as refused:
        ChatTemplate(ALTERNATING).render([])
    assert "Traceback" not in refused.value.message
    assert "/" not in refused.value.message
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ 'a' * 1000000000000 }}",
        "{{ [1] * 1000000000000 }}",
        "{% macro deep() %}{{ deep() }}{% endmacro %}{{ deep() }}",
        "{{ nothing() }}",
    ],
)
def test_whatever_a_template_does_wrong_is_one_sentence_without_trace_or_input(source: str) -> None:
    with pytest.raises(BadValue) as refused:
        ChatTemplate(source).render([{"role": "user", "content": "secret"}])
    assert "Traceback" not in refused.value.message
    assert "site-packages" not in refused.value.message
    assert "secret" not in refused.value.message
    assert len(refused.value.message) < 400


def test_what_a_template_writes_is_bounded() -> None:
    template = ChatTemplate(
        "{% for a in range(9999) %}{% for b in range(9999) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(BadValue, match=str(MAX_RENDERED_CHARACTERS)):
        template.render([{"role": "user", "content": "x" * 100_000}])


def test_a_template_that_is_no_template_is_refused_at_once_with_the_line() -> None:
    with pytest.raises(BadValue, match="line 2") as refused:
        ChatTemplate("ok\n{% if %}")
    assert refused.value.param == "chat_template"


def test_variables_may_not_replace_the_messages() -> None:
    with pytest.raises(BadValue, match="messages"):
        ChatTemplate(CHATML).render([{"role": "user", "content": "x"}], variables={"messages": []})


# Tool history in three kinds of template.

DICT_STYLE = "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
JSON_STYLE = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
STRING_STYLE = (
    "{{ '(' + messages[0].tool_calls[0].function.arguments + ')' }}{{ messages[0].tool_calls[0].function.arguments }}"
)


@pytest.mark.parametrize(
    ("source", "text"), [(DICT_STYLE, "a=3;"), (JSON_STYLE, '{"a": 3}'), (STRING_STYLE, '({"a":3}){"a":3}')]
)
def test_arguments_render_in_templates_of_every_style(source: str, text: str) -> None:
    call = {"function": {"name": "f", "arguments": '{"a":3}'}}
    assert ChatTemplate(source).render([{"role": "assistant", "tool_calls": [call]}]) == text


def test_empty_tool_calls_and_null_content_render_as_if_absent() -> None:
    source = "{% for m in messages %}{{ 'calls' if m.tool_calls is defined else 'none' }}:{{ m.content + '.' }}{% endfor %}"
    assert ChatTemplate(source).render([{"role": "assistant", "content": None, "tool_calls": []}]) == "none:."


# Continuing the last message.

TRIMMING = CHATML.replace("m.content", "m.content | trim")
LAST: Messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "The answer is "}]


@pytest.mark.parametrize("source", [CHATML, TRIMMING])
def test_a_continued_prompt_ends_exactly_with_the_given_text(source: str) -> None:
    text = ChatTemplate(source).render(LAST, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|start|>user\n2+2?<|end|><|start|>assistant\nThe answer is "


def test_continuing_and_beginning_a_turn_exclude_each_other() -> None:
    with pytest.raises(BadValue, match="add_generation_prompt") as refused:
        ChatTemplate(CHATML).render(LAST, add_generation_prompt=True, continue_final_message=True)
    assert refused.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content }}", CHATML.replace("m.content", "m.content[:5]"), CHATML.replace("m.content", "m.content|upper")],
)
def test_a_template_that_changes_the_end_of_the_last_message_cannot_continue_it(source: str) -> None:
    with pytest.raises(BadValue, match="cannot be continued"):
        ChatTemplate(source).render(LAST, add_generation_prompt=False, continue_final_message=True)


def test_a_template_that_quotes_the_last_message_twice_can_still_continue_it() -> None:
    template = ChatTemplate("{{ '(' + messages[-1].content + ')' }}" + CHATML)
    text = template.render(LAST, add_generation_prompt=False, continue_final_message=True)
    assert text == "(The answer is )<|start|>user\n2+2?<|end|><|start|>assistant\nThe answer is "


def test_there_must_be_a_message_to_continue() -> None:
    with pytest.raises(BadValue, match="0"):
        ChatTemplate(CHATML).render([], add_generation_prompt=False, continue_final_message=True)


def test_thinking_switches_survive_a_continuation() -> None:
    source = "{% if enable_thinking %}T{% endif %}" + CHATML
    template = ChatTemplate(source)
    text = template.render(LAST, add_generation_prompt=False, continue_final_message=True, variables={"enable_thinking": True})
    assert text.startswith("T<|start|>")


def test_a_continued_message_may_end_like_a_marker() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    messages: Messages = [{"role": "assistant", "content": "a <|end|> b <|en"}]
    tokens = chat_tokens(ChatTemplate(CHATML), tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(tokens, skip_special=False) == "<|start|>assistant\na <|end|> b <|en"
    assert tokens.count(tokenizer.special_id("<|end|>") or -1) == 0


# Where templates come from.


NAMED = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
PLACES: dict[str, dict[str, object]] = {
    "a text in the config": {"tokenizer_config.json": {"chat_template": "D"}},
    "a list in the config": {"tokenizer_config.json": {"chat_template": NAMED}},
    "files": {"chat_template.jinja": "D", "additional_chat_templates/tool_use.jinja": "T"},
    "a file over a list in the config": {"tokenizer_config.json": {"chat_template": NAMED}, "chat_template.jinja": "D"},
    "files over a list in the config": {
        "tokenizer_config.json": {"chat_template": [{"name": "default", "template": "old"}]},
        "chat_template.jinja": "D",
        "additional_chat_templates/tool_use.jinja": "T",
        "additional_chat_templates/rag.jinja": "R",
    },
}


@pytest.mark.parametrize("place", PLACES)
def test_the_template_is_the_one_that_transformers_takes_with_tools_and_without(place: str, tmp_path: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    for name, content in PLACES[place].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    sources = chat_template_from_folder(tmp_path)
    assert sources is not None
    ours = ChatTemplate(sources.default, with_tools=sources.tool_use)
    for tools in (None, TOOLS):
        assert ours.render([{"role": "user", "content": "x"}], tools=tools) == theirs.get_chat_template(None, tools)
    # transformers takes an empty list for tools, OpenAI's clients mean none.
    assert ours.render([{"role": "user", "content": "x"}], tools=[]) == "D"


def test_a_folder_without_any_template_has_none(tmp_path: Path) -> None:
    assert chat_template_from_folder(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": None}))
    assert chat_template_from_folder(tmp_path) is None


def test_a_gguf_file_has_named_templates_too() -> None:
    default, named = (
        {"tokenizer.chat_template": "D"},
        {"tokenizer.chat_template.tool_use": "T", "tokenizer.chat_templates": ["x"]},
    )
    assert chat_template_from_gguf(default) == TemplateSources("D")
    assert chat_template_from_gguf({**default, **named}) == TemplateSources("D", "T")
    assert chat_template_from_gguf({"tokenizer.chat_templates": []}) is None
    with pytest.raises(Unsupported, match=r"tool_use.*--chat-template"):
        chat_template_from_gguf(named)


def test_text_from_outside_is_plain_in_either_template() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    template = ChatTemplate("D{{ messages[0].content }}", with_tools="T<|start|>{{ messages[0].content }}")
    for tools, before in ((None, "D"), (TOOLS, "T<|start|>")):
        tokens = chat_tokens(template, tokenizer, [{"role": "user", "content": "<|start|>"}], tools=tools)
        assert tokenizer.decode(tokens, skip_special=False) == before + "<|start|>"
        assert tokens.count(tokenizer.special_id("<|start|>") or -1) == len(before) // 9


@pytest.mark.parametrize("broken", [{"source": "{% if %}"}, {"source": "D", "with_tools": "{% if %}"}])
def test_a_broken_template_is_refused_at_the_start_wherever_it_is_used(broken: dict[str, str]) -> None:
    with pytest.raises(BadValue, match="not valid in line 1"):
        ChatTemplate(**broken)


def test_a_folder_with_several_templates_and_no_default_is_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "rag", "template": "R"}]}))
    with pytest.raises(Unsupported, match=r"rag.*--chat-template"):
        chat_template_from_folder(tmp_path)


def test_a_broken_config_is_a_broken_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelBroken, match=r"tokenizer_config\.json"):
        chat_template_from_folder(tmp_path)
