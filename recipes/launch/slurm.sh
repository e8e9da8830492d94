#!/bin/bash
# Train on several machines under SLURM: sbatch recipes/launch/slurm.sh recipes/chargpt.yaml strategy=fsdp
# The job goes on by itself when its time is up: SLURM sends SIGUSR1 five minutes before the end, the run
# saves and stops, and asks to be run again; resume: auto then continues it. Adapt the #SBATCH lines.
#SBATCH --job-name=camshaft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail

# One launcher a machine; each starts one process per GPU, and they meet on the first machine.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

# shellcheck disable=SC2016
srun bash -c 'exec python -m camshaft.fit "$@" launch.num_machines="$SLURM_NNODES" launch.machine_rank="$SLURM_NODEID"' \
    camshaft "$@" \
    launch.num_processes="${SLURM_GPUS_ON_NODE:-1}" \
    launch.main_process_ip="$first" \
    launch.main_process_port="$port" \
    launch.requeue=true
