"""Which record lies in which tier below the pool: values in, orders out. The bytes are moved elsewhere."""
