"""What one call may ask for, beside the caps of `request.request`; each is checked before anything is allocated for it.

The queue bounds what all calls together may ask for, and `ServerConfig.max_body_bytes` what one body may weigh.
"""

from __future__ import annotations

MAX_PROMPTS = 256
"""Prompts in one call of /v1/completions."""

MAX_CHOICES_PER_CALL = 1024
"""Prompts times n. No more than the default queue holds, so that a call is refused for good only where it never fits."""

MAX_PROMPT_LOGPROBS = 1 << 20
"""Log-probabilities of prompt tokens in one call: prompt tokens times (logprobs + 1)."""

MAX_MESSAGES = 4096
"""Messages in one chat."""

MAX_TOOLS = 128
"""Tools in one chat, as with OpenAI."""

MAX_STOP_TOKEN_IDS = 1024
"""Stop token ids in one call."""

MAX_TOKENIZE_TOKENS = 1 << 20
"""Tokens that /tokenize makes of a text in one call; a context that is longer raises it."""

MAX_DETOKENIZE_TOKENS = 1 << 20
"""Token ids that /detokenize turns into text in one call."""

MAX_BODIES_AT_ONCE = 16
"""How many of the largest allowed bodies all calls together may hold in memory while they are being read."""

THREAD_ABOVE_CHARACTERS = 16_384
"""Text longer than this is templated and tokenised in a thread: about 5 ms of work, which the event loop can bear."""

THREADS_FOR_TEXT = 2
"""Calls whose text is worked on in threads at the same time; the others wait."""

LOGPROB_FLOOR = -9999.0
"""What stands for minus infinity in JSON, which has no infinities."""

RETRY_AFTER_SECONDS = 1
"""Retry-After of a full queue."""
