"""Tiers below the pool: what is stored where, what is loaded, what it costs, and the threads that move it."""
