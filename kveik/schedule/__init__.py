"""Which tokens the next step computes. Pure: values in, values out; knows no tensors, clock or text."""
