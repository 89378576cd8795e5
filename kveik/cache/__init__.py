"""Which sequence holds which cache block, and which content can be found again. Pure."""
