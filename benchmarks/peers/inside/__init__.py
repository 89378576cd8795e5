"""Programs inside the engines' own processes, each in its own environment."""
