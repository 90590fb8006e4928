"""From the loader to planned micro-batches, one step ahead, on one background thread."""
