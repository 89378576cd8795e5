"""Which stored block goes first. Policies of equal shape for the pool and every tier; the protocol is in `policy`."""
