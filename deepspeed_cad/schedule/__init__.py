"""Schedules: a plan and a rank in; slices to send, slices to receive and fused varlen batches out. Pure.

`reference` says what is right in numpy; `native` gives the same tables from the compiled library, faster.
"""

from deepspeed_cad.schedule.reference import (
    GROUP,
    HOME,
    HOME_ROW,
    KEY,
    KIND,
    QUERY,
    ROWS,
    SERVER,
    SERVER_ROW,
    STAGE_ROW,
    Batch,
    Schedule,
    Slices,
    build_slices,
    padding_rows,
    schedule_rank,
)

__all__ = [
    "GROUP",
    "HOME",
    "HOME_ROW",
    "KEY",
    "KIND",
    "QUERY",
    "ROWS",
    "SERVER",
    "SERVER_ROW",
    "STAGE_ROW",
    "Batch",
    "Schedule",
    "Slices",
    "build_slices",
    "padding_rows",
    "schedule_rank",
]
