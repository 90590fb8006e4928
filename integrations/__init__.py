"""Host frameworks: how a model, a trainer or a launcher meets the session. Nothing here is imported by the core."""
