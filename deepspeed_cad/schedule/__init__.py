"""Schedules: a plan and a rank in; slices to send, slices to receive and fused varlen batches out. Pure."""

from deepspeed_cad.schedule.tables import GROUP as GROUP
from deepspeed_cad.schedule.tables import HOME as HOME
from deepspeed_cad.schedule.tables import HOME_ROW as HOME_ROW
from deepspeed_cad.schedule.tables import KEY as KEY
from deepspeed_cad.schedule.tables import KIND as KIND
from deepspeed_cad.schedule.tables import QUERY as QUERY
from deepspeed_cad.schedule.tables import ROWS as ROWS
from deepspeed_cad.schedule.tables import SERVER as SERVER
from deepspeed_cad.schedule.tables import SERVER_ROW as SERVER_ROW
from deepspeed_cad.schedule.tables import STAGE_ROW as STAGE_ROW
from deepspeed_cad.schedule.tables import Batch as Batch
from deepspeed_cad.schedule.tables import Schedule as Schedule
from deepspeed_cad.schedule.tables import Slices as Slices
from deepspeed_cad.schedule.tables import build_slices as build_slices
from deepspeed_cad.schedule.tables import padding_rows as padding_rows
from deepspeed_cad.schedule.tables import schedule_rank as schedule_rank
