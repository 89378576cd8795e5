"""Eviction policies: siblings of equal shape for the pool and every tier. The protocol is in `policy`."""
