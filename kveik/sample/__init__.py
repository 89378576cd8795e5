"""From logits to tokens, vectorised over the batch. Knows nothing of caches, text or time."""
