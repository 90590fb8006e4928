"""Schedules: a plan and a rank in; slices to send, slices to receive and fused varlen batches out. Pure."""

from deepspeed_cad.schedule.build import build_slices, schedule_rank
from deepspeed_cad.schedule.tables import (
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
    padding_rows,
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
