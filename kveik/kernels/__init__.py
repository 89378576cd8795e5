"""One door to the arithmetic on cache blocks; behind it `reference` (torch, slow, obvious) and faster siblings."""
