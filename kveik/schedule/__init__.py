"""Decisions about the tokens of the next step. Pure: values in, values out; no tensors, clock or text."""
