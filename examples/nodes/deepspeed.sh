#!/bin/sh
# DeepSpeed's launcher on several nodes. HOSTFILE names them and their GPUs (default: the file beside this one).
#
# Where the first node reaches all nodes by ssh without a password, and pdsh is installed, once and there:
#
#     MASTER_ADDR=node-0 sh examples/nodes/deepspeed.sh --model PATH --data FILES --context 65536
#
# Without ssh, on each node of the hostfile with its number there:
#
#     NODE_RANK=0 MASTER_ADDR=node-0 sh examples/nodes/deepspeed.sh --model PATH --data FILES --context 65536
set -eu
set -- examples/finetune_deepspeed.py --deepspeed_config examples/ds_zero3_cad.json "$@"
if [ -n "${NODE_RANK:-}" ]; then
    set -- --no_ssh --node_rank "$NODE_RANK" "$@"
fi
exec deepspeed --hostfile "${HOSTFILE:-examples/nodes/hostfile}" \
    --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}" "$@"
