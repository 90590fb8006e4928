"""How CAD that is asked for reaches every process of a run, and DeepSpeed's `initialize` in each."""
