"""Data as `deepspeed-cad plan` reads it: documents, their lengths, the shape of a model."""
