"""A conversation in the terminal, with a scripted model in the engine's place."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from types import SimpleNamespace

import pytest

from kveik.cli.chat import Conversation, converse
from kveik.engine.stream import Delta
from kveik.errors import BadValue, Broken, NonFiniteLogits, PromptTooLong
from kveik.request.request import SamplingParams

SAMPLING = SamplingParams(max_tokens=8)


class ScriptedLLM:
    """Answers every conversation with the same words; remembers what it was asked and whether streams were closed."""

    def __init__(self, words: Sequence[str], *, interrupt_after: int | None = None, context: int = 1000) -> None:
        self.words, self.interrupt_after, self.context = words, interrupt_after, context
        self.asked: list[list[dict[str, object]]] = []
        self.fault: Broken | None = None
        """Raised after the first word."""

        self.closed = 0
        self.loaded = SimpleNamespace(max_model_len=context)

    def tokens_of_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        self.asked.append([dict(message) for message in messages])
        return list(range(sum(len(str(message["content"])) for message in messages)))

    def stream(self, prompt: Sequence[int], sampling: SamplingParams) -> Generator[Delta, None, None]:
        if len(prompt) >= self.context:
            raise PromptTooLong(tokens=len(prompt), allowed=self.context)
        try:
            for number, word in enumerate(self.words):
                if number and self.fault is not None:
                    raise self.fault
                if number == self.interrupt_after:
                    os.kill(os.getpid(), signal.SIGINT)
                yield Delta(0, word, (number,), finish_reason="stop" if number == len(self.words) - 1 else None)
        finally:
            self.closed += 1

    def cached_tokens_last(self) -> int:
        return 3


def converse_with(llm: ScriptedLLM, typed: str, monkeypatch: pytest.MonkeyPatch, *, interactive: bool = False) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    converse(Conversation(llm, SAMPLING, None), interactive=interactive)


def test_each_line_of_a_pipe_gets_an_answer_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    converse_with(ScriptedLLM(["Warm", " wort."]), "One?\n\nTwo?\n", monkeypatch)
    captured = capsys.readouterr()
    assert captured.out == "Warm wort.\nWarm wort.\n"
    assert captured.err.count("3 of") == 2


def test_the_conversation_so_far_is_sent_along(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM(["Yes."])
    converse_with(llm, "One?\nTwo?\n", monkeypatch)
    assert [message["content"] for message in llm.asked[1]] == ["One?", "Yes.", "Two?"]
    assert [message["role"] for message in llm.asked[1]] == ["user", "assistant", "user"]


def test_clear_forgets_all_but_the_system_message() -> None:
    llm = ScriptedLLM(["Yes."])
    conversation = Conversation(llm, SAMPLING, "Be brief.")
    list(conversation.ask("One?"))
    conversation.clear()
    list(conversation.ask("Two?"))
    assert [message["content"] for message in llm.asked[1]] == ["Be brief.", "Two?"]


def test_exit_ends_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM(["Yes."])
    converse_with(llm, "One?\n/exit\nTwo?\n", monkeypatch)
    assert len(llm.asked) == 1


def test_ctrl_c_stops_an_answer_between_steps_and_keeps_what_came() -> None:
    llm = ScriptedLLM(["Warm", " wort", " never", " shown"], interrupt_after=1)
    conversation = Conversation(llm, SAMPLING, None)
    before = signal.getsignal(signal.SIGINT)
    assert "".join(conversation.ask("One?")) == "Warm wort …"
    assert llm.closed == 1
    assert signal.getsignal(signal.SIGINT) is before
    list(conversation.ask("Two?"))
    assert llm.asked[1][1] == {"role": "assistant", "content": "Warm wort"}


def test_a_full_context_ends_a_pipe_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PromptTooLong):
        converse_with(ScriptedLLM(["Yes."], context=4), "Too long for it\n", monkeypatch)


def test_a_full_context_is_only_told_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = ScriptedLLM(["Yes."], context=4)
    converse_with(llm, "Too long for it\n/clear\nOK?\n", monkeypatch, interactive=True)
    captured = capsys.readouterr()
    assert "/clear starts a new one." in captured.err
    assert captured.out.endswith("Yes.\n> \n")


def test_an_answer_that_fails_ends_its_turn_in_a_terminal_and_a_pipe_at_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(["Warm", " wort."])
    llm.fault = NonFiniteLogits()
    converse_with(llm, "One?\nTwo?\n", monkeypatch, interactive=True)
    captured = capsys.readouterr()
    assert captured.out.count("Warm\n") == 2
    assert captured.err.count("not finite") == 2
    assert len(llm.asked[1]) == 1, "what failed is no part of the conversation"
    with pytest.raises(NonFiniteLogits):
        converse_with(llm, "One?\n", monkeypatch)


def test_what_a_template_refuses_is_only_told_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(["Yes."])
    plain = llm.tokens_of_chat

    def picky(messages: Sequence[Mapping[str, object]]) -> list[int]:
        if messages[-1]["content"] == "No?":
            raise BadValue("The template does not like this.", param="messages")
        return plain(messages)

    monkeypatch.setattr(llm, "tokens_of_chat", picky)
    converse_with(llm, "One?\nNo?\nTwo?\n", monkeypatch, interactive=True)
    assert "The template does not like this." in capsys.readouterr().err
    assert [message["content"] for message in llm.asked[1]] == ["One?", "Yes.", "Two?"]
    with pytest.raises(BadValue):
        converse_with(llm, "No?\n", monkeypatch)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("interactive", [False, True])
def test_a_line_that_is_not_utf_8_is_told_and_the_conversation_kept(
    errors: str, interactive: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(["Yes."])
    typed = io.BytesIO("Où?\n".encode() + b"W\xffrt\n" + b"Two?\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(typed, "utf-8", errors=errors))
    converse(Conversation(llm, SAMPLING, None), interactive=interactive)
    assert capsys.readouterr().err.count("not UTF-8") == 1
    assert [[message["content"] for message in asked] for asked in llm.asked] == [["Où?"], ["Où?", "Yes.", "Two?"]]


def test_the_figures_tell_pace_and_cached_tokens() -> None:
    conversation = Conversation(ScriptedLLM(["a", "b", "c"]), SAMPLING, None)
    list(conversation.ask("12345"))
    assert conversation.figures.startswith("[3 tokens, ")
    assert conversation.figures.endswith("; 3 of 5 prompt tokens were cached]")
