"""KV cache: blocks, the sequences that hold them, and their content, found again by key. Pure."""
