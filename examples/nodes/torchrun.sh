#!/bin/sh
# torchrun on several nodes: start it on each of them, in the checkout, with a NODE_RANK of its own. 0 is the node that
# MASTER_ADDR names.
#
#     NODES=2 NODE_RANK=0 MASTER_ADDR=node-0 sh examples/nodes/torchrun.sh --model PATH --data FILES --context 65536
#
# GPUS: processes of this node (default: one for each GPU). MASTER_PORT: a port of node 0 (default 29500).
set -eu
exec torchrun --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "${GPUS:-gpu}" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    examples/finetune_deepspeed.py --deepspeed_config examples/ds_zero3_cad.json "$@"
