#!/bin/bash
# Pretraining on several machines under SLURM: one task a machine, torchrun starts its ranks.
#
#   sbatch tools/slurm_pretrain.sh --config-file configs/pretrain/kscl_k5_rho40_r50_200ep.yaml \
#       DATA.TRAIN /data/imagenet/train OUTPUT_DIR /shared/runs/kscl
#
# Two minutes before the time is up, the ranks are asked to stop, save their step, and the job puts
# itself back into the queue; a job that was preempted or lost a machine is queued again by SLURM.
# Each start resumes where the last one ended, so OUTPUT_DIR must be on storage that all share.

#SBATCH --job-name=kscl-pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log

set -u

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_NNODES" \
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$first_node:29500" \
    --rdzv-id="$SLURM_JOB_ID" \
    --max-restarts=3 \
    tools/pretrain.py --auto-resume "$@" &
run=$!

time_is_up=false
trap 'time_is_up=true; kill -TERM "$run"' USR1

wait "$run"
code=$?
if $time_is_up; then
    wait "$run" # the first wait ended with the signal, not with the run
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
