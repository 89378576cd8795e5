"""One file per command; wires parts together and holds no logic."""
