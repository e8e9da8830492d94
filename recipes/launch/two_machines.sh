#!/bin/bash
# Train on two machines without a scheduler. On each: recipes/launch/two_machines.sh RANK HOST recipe.yaml strategy=ddp
# RANK is 0 or 1, HOST the address of machine 0. Both need the code, the recipe and the same runs_dir.
set -euo pipefail
rank=$1 host=$2
shift 2
# Where a machine has several networks: export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
exec python -m camshaft.fit "$@" \
    launch.num_machines=2 \
    launch.machine_rank="$rank" \
    launch.main_process_ip="$host" \
    launch.main_process_port=29500
