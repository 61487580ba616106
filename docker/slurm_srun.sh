#!/usr/bin/env bash
# Slurm starts the ranks; each finds its place in Slurm's variables. Tried with
# Slurm 22.05 on CPUs, never on GPUs; queueing the job again only without a Slurm.
#
#   sbatch docker/slurm_srun.sh train.py
#
#SBATCH --job-name=tfpar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# All GPUs of a node are visible to its ranks; each takes the one of its local rank. On CPUs leave
# out --gpus-per-node.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
status=0
srun --kill-on-bad-exit=1 --wait=60 python "$@" || status=$?

# Two minutes before its time is over, the job's ranks get SIGTERM. `tap.Checkpoint` saves and ends
# them with 143: the job waits for its turn again, and goes on from there. `scontrol requeue` and
# preemption end ranks by SIGTERM, too, and queue the job by themselves.
if ((status == 143)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
