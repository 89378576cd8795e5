"""Fields that other servers or OpenAI know and this one does not. Refused by name: an answer that ignored them would be wrong.

Fields that nobody here knows are ignored, as vLLM does, and named in the log at debug level.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kveik.errors import BadValue

log = logging.getLogger(__name__)

_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values that ask for nothing, whatever the field."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "chat_template": (),
    "documents": (),
    "echo": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logit_processors": (),
    "logits_processors": (),
    "lora_request": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (),
    "return_tokens_as_token_ids": (),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (),
    "web_search_options": (),
}
"""Known and not supported, each with the values beyond `_NOTHING` that ask for what we do anyway."""

RENAMED: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_tokens_to_sample": "max_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
}
"""What other servers call things that we have under another name."""


def refuse_foreign(fields: Mapping[str, Any]) -> None:
    """Look at the fields that the shape does not have.

    Raises:
        BadValue: one of them asks for something that is not built, or has another name here.
    """
    for name, value in fields.items():
        if name in RENAMED and value is not None:
            raise BadValue(f"{name} is called {RENAMED[name]} here.", param=name)
        if name in NEUTRAL and value not in _NOTHING and value not in NEUTRAL[name]:
            raise BadValue(f"{name} is not supported by this server; leave it out.", param=name)
        if name not in NEUTRAL:
            log.debug("Ignored the unknown request field %.60r.", name)
