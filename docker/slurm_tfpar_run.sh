#!/usr/bin/env bash
# `tfpar run` starts the ranks on the nodes of a Slurm allocation, over ssh: it tells which rank
# failed, and goes on without it. Nodes have to let each other in. Tried with
# Slurm 22.05 on CPUs, never on GPUs.
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
set -euo pipefail

# Hosts and slots are the allocation's. `exec`: the signal, two minutes before the end, is tfpar's.
exec tfpar run --min-np 4 --grace 90 --output-dir "tfpar-$SLURM_JOB_ID" python "$@"
