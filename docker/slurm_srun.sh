#!/usr/bin/env bash
# Slurm starts the ranks; each finds its place in Slurm's variables. Tried with
# Slurm 22.05 on CPUs, never on GPUs.
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
set -euo pipefail

# All GPUs of a node are visible to its ranks; each takes the one of its local rank. On CPUs leave
# out --gpus-per-node. Two minutes before its time is over, the job gets SIGTERM.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
exec srun --kill-on-bad-exit=1 --wait=60 python "$@"
