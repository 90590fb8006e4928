"""A timeline of a few micro-batches over all ranks: recorded while training, written as one Perfetto file."""
