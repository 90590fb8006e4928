"""DeepSpeed: activation from the JSON, look-ahead on the engine's loader, statistics to the engine's monitor."""
