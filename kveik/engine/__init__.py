"""engine.step(): plan, run, settle, record · loop (the only thread that steps) · stream · llm (offline face) · executor."""
