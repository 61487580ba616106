#!/usr/bin/env bash
# `tfpar run` starts the ranks on the nodes of a Slurm allocation, over ssh: it tells which rank
# failed, and goes on without it. Nodes have to let each other in. Tried with
# Slurm 22.05 on CPUs, never on GPUs; queueing the job again only without a Slurm.
#
#   sbatch docker/slurm_tfpar_run.sh train.py
#
#SBATCH --job-name=tfpar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# Hosts and slots are the allocation's. The signal, two minutes before the end, is passed on.
tfpar run --min-np 4 --grace 90 \
  --output-dir "tfpar-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" python "$@" &
run=$!
trap 'kill -TERM "$run"' TERM
status=
until [[ -n $status ]] && ! kill -0 "$run" 2>/dev/null; do  # a signal ends `wait` early
  status=0
  wait "$run" || status=$?
done

# 143: `tap.Checkpoint` has saved. The job waits for its turn again, and goes on from there.
if ((status == 143)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
