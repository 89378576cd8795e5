"""Arithmetic on cache blocks: one door, behind it native kernels and torch."""
