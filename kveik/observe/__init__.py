"""Readers of the engine's events: metrics and, later, trace and diagnosis."""
