"""Pipelines of DeepSpeed, in lockstep rounds: every tick is planned over all stages."""
