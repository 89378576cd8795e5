"""Between text and tokens: tokenizer · chat · detokenize. Knows nothing of requests or models."""
