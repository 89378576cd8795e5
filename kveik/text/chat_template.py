"""Chat messages to a prompt, through the model's own Jinja template. Independent of HTTP and requests.

Templates are foreign code: they run in Jinja's immutable sandbox, with the settings they are written for (those of
transformers' `apply_chat_template`), and what they write is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kveik.errors import BadValue, KveikError, PromptTooLong, Unsupported
from kveik.text.markers import Markers, special_markers, tag_markers, unused_character
from kveik.text.messages import normalize_messages
from kveik.text.tokenizer import Tokenizer, read_json

MAX_RENDERED_CHARACTERS = 32 * 1024 * 1024
"""Characters that a template may write at most. Twice the characters of the largest request body."""

_MAX_SENTENCE = 300
_OWN_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})

Message = Mapping[str, object]


class _Said(jinja2.TemplateError):
    """The template itself refuses the messages, in a sentence of its own."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; for a prompt it is nothing."""

    tags = {"generation"}  # noqa: RUF012 -- Jinja's own way of declaring tags

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which already bounds `range`; here `'a' * 10**10` is bounded, too."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        # Any: a template's values are of any type.
        if operator == "**":
            raise SecurityError("powers are not allowed")
        for text, count in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and isinstance(count, int) and len(text) * count > MAX_RENDERED_CHARACTERS:
                raise SecurityError("a repeated text is too long")
        return super().call_binop(context, operator, left, right)


def _environment(now: Callable[[], datetime]) -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _compiled(source: str, now: Callable[[], datetime]) -> jinja2.Template:
    try:
        return _environment(now).from_string(source)
    except jinja2.TemplateSyntaxError as error:
        sentence = (error.message or "")[:_MAX_SENTENCE]
        raise BadValue(f"The chat template is not valid in line {error.lineno}: {sentence}", param="chat_template") from None


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own filter writes < and > as escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise _Said(str(message))


class TemplateSources(NamedTuple):
    """Chat templates that a model brings along."""

    default: str
    tool_use: str | None = None
    """In place of the default where the request has tools."""


class ChatTemplate:
    """A compiled template with the tokens it may name. Immutable to its users; safe to share among threads."""

    def __init__(
        self,
        source: str,
        *,
        with_tools: str | None = None,
        bos: str = "",
        eos: str = "",
        special: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`with_tools`: the source in place of `source` where there are tools. `special`: further tokens by the name that
        templates use (unk_token, pad_token). `now` serves `strftime_now`.

        Raises `BadValue` when a source is not a template.
        """
        self.source = source + (with_tools or "")
        """Everything that a prompt's own text may come from."""

        self._fixed: dict[str, object] = {**(special or {}), "bos_token": bos, "eos_token": eos}
        self._markers: tuple[Tokenizer, Markers, Markers] | None = None
        self._template = _compiled(source, now)
        self._with_tools = self._template if with_tools is None else _compiled(with_tools, now)

    @classmethod
    def for_tokenizer(cls, sources: TemplateSources, tokenizer: Tokenizer) -> ChatTemplate:
        """The template with this tokenizer's bos_token, eos_token, unk_token and pad_token."""
        named = tokenizer.named
        bos, eos = named.get("bos_token", ""), named.get("eos_token", "")
        return cls(sources.default, with_tools=sources.tool_use, bos=bos, eos=eos, special=named)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] = {},
    ) -> str:
        """The prompt's text. Messages are normalised first.

        With `continue_final_message` the text ends exactly where the last message ends, so that the model goes on with it.
        Raises `BadValue` when the template refuses the messages (with its own sentence), fails on them, drops the end of a
        message to be continued, or writes more than MAX_RENDERED_CHARACTERS.
        """
        if add_generation_prompt and continue_final_message:
            raise BadValue(
                "continue_final_message goes on with the last message, add_generation_prompt begins a new one; set only one.",
                param="continue_final_message",
            )
        if reserved := sorted(_OWN_NAMES & set(variables)):
            raise BadValue(f"chat_template_kwargs may not set {reserved[0]}.", param="chat_template_kwargs")
        listed = normalize_messages(messages)
        context = {"documents": None, **self._fixed, **variables}
        context |= {"tools": list(tools) if tools else None, "add_generation_prompt": add_generation_prompt}
        if not continue_final_message:
            return self._write({**context, "messages": listed})
        return self._write_open(context, listed)

    def _write_open(self, context: Mapping[str, object], messages: list[dict[str, object]]) -> str:
        """Up to the end of the last message: a character that is used nowhere else marks it."""
        if not messages:
            raise BadValue("continue_final_message needs a message to continue; there are 0.", param="messages")
        content = str(messages[-1]["content"])
        mark = unused_character(self.source, messages, list(context.values()))
        last = {**messages[-1], "content": content + mark}
        text, found, _ = self._write({**context, "messages": [*messages[:-1], last]}).rpartition(mark)
        text = text.replace(mark, "")  # a template may also quote the message further up
        # A template may trim what stands before the text; what it does to the end would change what is continued.
        if not found or not text.endswith(content.lstrip()):
            raise BadValue(
                "The chat template changes the end of the last message, so it cannot be continued.",
                param="continue_final_message",
            )
        return text

    def _write(self, context: Mapping[str, object]) -> str:
        written: list[str] = []
        room = MAX_RENDERED_CHARACTERS
        try:
            template = self._with_tools if context["tools"] else self._template
            for part in template.generate(context):
                room -= len(part)
                if room < 0:
                    raise BadValue(
                        f"The chat template writes more than {MAX_RENDERED_CHARACTERS} characters.", param="messages"
                    )
                written.append(part)
        except KveikError:
            raise
        except Exception as error:  # a template is foreign code: whatever it raises is about these messages
            raise BadValue(_sentence(error), param="messages") from None
        return "".join(written)

    def markers(self, tokenizer: Tokenizer) -> tuple[Markers, Markers]:
        """Markers forbidden in the assistant's earlier messages (special tokens), and in all other text (tags, too)."""
        known = self._markers
        if known is None or known[0] is not tokenizer:
            special = special_markers(tokenizer)
            known = (tokenizer, Markers(special), Markers({**tag_markers(tokenizer, self.source), **special}))
            self._markers = known
        return known[1], known[2]


def _sentence(error: Exception) -> str:
    """The failure in words, without trace, path or input; the template's own sentence where it has one."""
    if isinstance(error, _Said):
        return str(error)[:_MAX_SENTENCE]
    if isinstance(error, jinja2.UndefinedError | SecurityError):
        return f"The chat template cannot render these messages: {str(error)[:_MAX_SENTENCE]}."
    return f"The chat template cannot render these messages ({type(error).__name__})."


def chat_tokens(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, object] = {},
    special_tokens_in_content: bool = False,
    limit: int | None = None,
) -> list[int]:
    """The prompt's token ids; the template writes start and end tokens itself.

    Text in messages, tools and variables that looks like a marker stays plain text, unless `special_tokens_in_content`. Tags
    that are user-defined tokens (<think>, <tool_call>) keep their meaning in the assistant's own earlier messages.
    A text that has far more than `limit` tokens is not cut to its end; it raises `PromptTooLong`.
    """
    listed = normalize_messages(messages)
    options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    if special_tokens_in_content:
        text = template.render(listed, tools=tools, variables=variables, **options)
        _check_length(text, tokenizer, limit)
        return tokenizer.encode(text, add_special=False)
    special, all_markers = template.markers(tokenizer)
    sentinel = unused_character(template.source, listed, list(tools or []), variables)
    text = template.render(
        [_disarmed(special if message["role"] == "assistant" else all_markers, message, sentinel) for message in listed],
        tools=[_disarmed(all_markers, tool, sentinel) for tool in tools] if tools else None,
        variables=_disarmed(all_markers, variables, sentinel),
        **options,
    )
    # Look-alikes count as the one token that they resemble, which is less than they have.
    _check_length(text.replace(sentinel, ""), tokenizer, limit)
    if sentinel not in text:
        return tokenizer.encode(text, add_special=False)
    return all_markers.encode(text, tokenizer, sentinel)


def _check_length(text: str, tokenizer: Tokenizer, limit: int | None) -> None:
    least = None if limit is None else tokenizer.more_than(text, limit)
    if limit is not None and least is not None:
        raise PromptTooLong(tokens=least, allowed=limit, prompt_field="messages", at_least=True)


def _disarmed(markers: Markers, value: Mapping[str, object], sentinel: str) -> dict[str, object]:
    disarmed = markers.disarm(value, sentinel)
    assert isinstance(disarmed, dict)  # a mapping stays a mapping
    return disarmed


def chat_template_from_folder(folder: Path) -> TemplateSources | None:
    """Templates of a model folder; None when it has none. Raises `Unsupported` when none of several is called 'default'.

    The default is chat_template.jinja, and additional_chat_templates/NAME.jinja are named ones; where these files are not, all
    are in tokenizer_config.json, as one text or as a list of named ones.
    """
    found = read_json(folder / "tokenizer_config.json").get("chat_template")
    named: dict[str, object] = {}
    if isinstance(found, str):
        named["default"] = found
    elif isinstance(found, list):
        named = {str(each.get("name")): each.get("template") for each in found if isinstance(each, dict)}
    if (path := folder / "chat_template.jinja").is_file():
        named = {"default": path.read_text("utf-8")}
    named |= {path.stem: path.read_text("utf-8") for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    return _sources(named)


def chat_template_from_gguf(metadata: Mapping[str, object]) -> TemplateSources | None:
    """Templates inside a GGUF file; None when it has none. Raises as `chat_template_from_folder` does."""
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(f"{prefix}."): value for key, value in metadata.items() if key.startswith(f"{prefix}.")}
    return _sources({**named, **({"default": metadata[prefix]} if metadata.get(prefix) else {})})


def _sources(named: Mapping[str, object]) -> TemplateSources | None:
    if not named:
        return None
    default, tool_use = named.get("default"), named.get("tool_use")
    if not isinstance(default, str):
        raise Unsupported(f"The model has chat templates {', '.join(named)} but no 'default'; give one with --chat-template.")
    return TemplateSources(default, tool_use if isinstance(tool_use, str) else None)
