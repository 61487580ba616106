#!/usr/bin/env bash
# What both images install: a virtual environment with tfpar, TensorFlow, and Horovod built for it.
#
#   docker/install.sh SOURCE FOLDER [--cuda]
#
# SOURCE is a checkout of tfpar, FOLDER the environment to make. It needs python3 with venv, g++
# and make; --cuda, which adds NCCL and TensorFlow's CUDA libraries, needs nvcc and nccl.h too.
# Nothing in it asks for a container: docker/check.sh runs it without one.
set -euo pipefail

source=$1
folder=$2
case "${3:-}" in
  "") tensorflow=tensorflow nccl=--no-nccl ;;
  --cuda) tensorflow='tensorflow[and-cuda]' nccl=--nccl ;;
  *)
    echo "install.sh: $3 is no option, there is --cuda" >&2
    exit 2
    ;;
esac

python3 -m venv "$folder"
"$folder/bin/pip" install --no-cache-dir "${source}[horovod]" "$tensorflow==${TENSORFLOW:-2.21.*}"
# Ranks are started over ssh, so that MPI is not needed.
"$folder/bin/tfpar" install-horovod --no-mpi "$nccl"
