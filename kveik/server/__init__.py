"""The OpenAI door: protocol (shapes) · translate (pure) · routes · sse · app · auth; page/ (static files)."""
