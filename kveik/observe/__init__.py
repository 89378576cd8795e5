"""Events of the engine, and their listeners: metrics and log lines."""
