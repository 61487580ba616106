#!/usr/bin/env bash
# Checks this folder without a container engine: linters where they are installed, then the images'
# install steps in a bare virtual environment, then two ranks of train.py there.
#
#   docker/check.sh [FOLDER]
#
# FOLDER gets the environment, some 3 GB with TensorFlow (default: a temporary one, removed after).
set -euo pipefail
cd "$(dirname "$0")/.."

lint() {
  local tool=$1
  if command -v "$tool" >/dev/null; then
    "$@"
    echo "check.sh: $tool has no complaint"
  else
    echo "check.sh: $tool is not installed, left out"
  fi
}
lint shellcheck docker/*.sh
lint hadolint docker/Dockerfile.cpu docker/Dockerfile.cuda
lint yamllint --strict --config-data '{extends: default, rules: {line-length: {max: 100}}}' \
  docker/*.yaml

folder=${1:-}
if [[ -z "$folder" ]]; then
  folder=$(mktemp --directory)
  trap 'rm -rf "$folder"' EXIT
fi
# A copy of what the Dockerfiles copy: the build leaves files beside the sources.
mkdir -p "$folder/source"
cp -r pyproject.toml setup.py README.md LICENSE tfpar "$folder/source"
docker/install.sh "$folder/source" "$folder/environment"

export PATH="$folder/environment/bin:$PATH"
cd /
tfpar run -np 2 --timeout 120 python "$OLDPWD/docker/train.py"
