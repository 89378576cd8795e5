"""Request fields of OpenAI, vLLM and other servers that the body shapes lack: accepted, renamed, or refused.

A field is accepted where it cannot change the answer, and refused by name where an answer that ignored it would be wrong.
Every other name is ignored, counted, and logged once. docs/API.md has the table of all fields.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from kveik.errors import Unsupported

log = logging.getLogger(__name__)

MAX_NAMES_LOGGED = 256
"""Unknown names that are logged; later ones are only counted."""

MAX_NAME_CHARACTERS = 60

_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values without effect, whatever the field."""

ACCEPTED = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "parallel_tool_calls"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "include_obfuscation"),
        *("request_id", "session_id", "length_penalty", "spaces_between_special_tokens", "truncation_side", "stream_interval"),
        *("include_reasoning", "media_io_kwargs", "mm_processor_kwargs", "return_mm_kwargs", "return_token_offsets"),
        *("prompt", "messages", "reasoning_effort", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
        *("routed_experts_prompt_start", "cache_prompt", "id_slot", "rid", "separate_reasoning", "stream_reasoning"),
    )
)
"""Accepted and without effect: tuning hints, labels, and settings of features that the endpoint does not have."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = dict.fromkeys(
    (
        *("add_special_tokens", "allowed_token_ids", "audio", "bad_words", "chat_template", "custom_logit_processor"),
        *("documents", "dry_multiplier", "dynatemp_range", "ebnf", "ec_transfer_params", "echo", "functions"),
        *("grammar", "guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex"),
        *("json_schema", "kv_transfer_params", "logit_processors", "logits_processors", "logprob_token_ids"),
        *("lora_path", "lora_request", "mirostat", "moderation", "n_keep", "no_repeat_ngram_size"),
        *("penalty_alpha", "prompt_embeds", "reasoning", "regex", "repetition_detection"),
        *("return_hidden_states", "return_prompt_text", "return_token_ids", "return_tokens_as_token_ids"),
        *("structural_tag", "structured_outputs", "suffix", "tools", "top_a", "truncate_prompt_tokens"),
        *("use_beam_search", "vllm_xargs", "watermark", "watermarking", "web_search_options", "xtc_probability"),
    ),
    (),
) | {
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "num_beams": (1,),
    "response_format": ({"type": "text"},),
    "tfs_z": (1,),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "verbosity": ("medium",),
}
"""Refused, except with the values listed beside `_NOTHING`, which request what this server does anyway."""

RENAMED: Mapping[str, str] = {
    "do_sample": "temperature",
    **dict.fromkeys(("max_new_tokens", "max_output_tokens", "max_tokens_to_sample", "n_predict", "num_predict"), "max_tokens"),
    "min_new_tokens": "min_tokens",
    **dict.fromkeys(("n_probs", "top_n_tokens"), "logprobs"),
    "no_stop_trim": "include_stop_str_in_output",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
}
"""Names in other servers -> names of the same fields here."""


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Check the fields that the shape does not have.

    Raises:
        Unsupported: one of them requests something that is not built, or has another name here.
    """
    for name, value in fields.items():
        if name in RENAMED and value is not None:
            raise Unsupported(f"`{name}` is not a field of this server. Use `{RENAMED[name]}`.", param=name)
        if name in UNSUPPORTED and value not in _NOTHING and value not in UNSUPPORTED[name]:
            raise Unsupported(f"`{name}` is not supported by this server. Leave it out.", param=name)


class UnknownNames:
    """Unknown names in bodies: counted, and each logged once, up to a bound."""

    def __init__(self) -> None:
        self.count = 0
        self._logged: set[str] = set()

    def note(self, body: BaseModel) -> None:
        """Count and log what a body has beyond its shape, one level down as well (`stream_options`)."""
        inner = (value.model_extra or {} for _, value in body if isinstance(value, BaseModel))
        self._add(name for fields in (body.model_extra or {}, *inner) for name in fields)

    def _add(self, names: Iterable[str]) -> None:
        for name in names:
            if name in ACCEPTED or name in UNSUPPORTED or name in RENAMED:
                continue
            self.count += 1
            short = name[:MAX_NAME_CHARACTERS]
            if short not in self._logged and len(self._logged) < MAX_NAMES_LOGGED:
                self._logged.add(short)
                log.warning("unknown request field ignored: name=%r", short)
