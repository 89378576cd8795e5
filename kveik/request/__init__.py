"""Requests (immutable, checked) and sequences (their mutable progress)."""
