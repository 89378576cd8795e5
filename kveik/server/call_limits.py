"""Limits of one call, beside those of `request.request`; each is checked before memory is allocated for it.

The queue bounds all calls together, and `ServerConfig.max_body_bytes` the size of one body.
"""

from __future__ import annotations

MAX_PROMPTS = 256
"""Prompts in one call of /v1/completions."""

MAX_CHOICES_PER_CALL = 1024
"""Prompts times n. At most the default queue's capacity, so that a larger call, which never fits, is refused with 400."""

MAX_PROMPT_LOGPROBS = 1 << 20
"""Log-probabilities of prompt tokens in one call: prompt tokens times (logprobs + 1)."""

MAX_MESSAGES = 4096
"""Messages in one chat."""

MAX_TOOLS = 128
"""Tools in one chat, as with OpenAI."""

MAX_STOP_TOKEN_IDS = 1024
"""Stop token ids in one call."""

MAX_TOKENIZE_TOKENS = 1 << 20
"""Tokens that /tokenize makes of a text in one call; a longer context raises it."""

MAX_DETOKENIZE_TOKENS = 1 << 20
"""Token ids that /detokenize turns into text in one call."""

MAX_BODIES_AT_ONCE = 16
"""Number of largest allowed bodies that all calls together may have in memory while they are being read."""

THREAD_ABOVE_CHARACTERS = 16_384
"""Text longer than this is templated and tokenised in a thread: it takes about 5 ms, an acceptable delay for the event loop."""

THREADS_FOR_TEXT = 2
"""Calls whose text is processed in threads at the same time; the others wait."""

LOGPROB_FLOOR = -9999.0
"""Replaces minus infinity in JSON, which has no infinities."""

RETRY_AFTER_SECONDS = 1
"""Retry-After of a full queue."""
