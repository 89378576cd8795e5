"""kveik: an LLM inference server whose KV cache is paged, shared and explainable."""

__version__ = "0.1.0"
