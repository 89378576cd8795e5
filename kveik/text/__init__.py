"""Text and tokens: tokenizer · chat_template · detokenize. Independent of requests and models."""
