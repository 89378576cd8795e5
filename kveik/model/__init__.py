"""From a file on disk to logits: spec · catalogue · weights · gguf · rope · layers · linear · decoder · batch."""
