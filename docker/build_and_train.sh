#!/usr/bin/env bash
# Builds the images without a container engine, and trains on two containers as compose.yaml does:
# buildah in chroot isolation, on a base that debootstrap makes of the machine's own release. Each
# container is in a network namespace of its own; they reach each other over ssh.
#
#   sudo docker/build_and_train.sh [FOLDER]
#
# It takes apt's and pip's settings from the machine; neither is part of an image. FOLDER gets
# everything, some 15 GB, and its base is used again (default: a temporary one, removed after). Of
# Dockerfile.cuda, whose base is not made here, the first stage is left out for the CPU environment.
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in buildah debootstrap findmnt ip; do
  if ! command -v "$tool" >/dev/null; then
    echo "build_and_train.sh: left out, $tool is not installed"
    exit 0
  fi
done
if ((EUID != 0)) || ! ip netns add "tfpar-probe-$$" 2>/dev/null; then
  echo "build_and_train.sh: left out, it needs root and network namespaces"
  exit 0
fi
ip netns delete "tfpar-probe-$$"

# Seconds: the first build installs TensorFlow and compiles Horovod.
readonly base_limit=900 build_limit=3600 serve_limit=120 train_limit=600
readonly nodes=(node1 node2) subnet=10.231.1

temporary=
folder=${1:-}
if [[ -z $folder ]]; then
  folder=$(mktemp --directory)
  temporary=$folder
fi
mkdir -p "$folder"
folder=$(realpath "$folder")

build=(buildah --root "$folder/storage" --runroot "$folder/run" --storage-driver vfs)
containers() { timeout "$base_limit" "${build[@]}" "$@"; }  # copying an image takes its time

remove_containers() {
  local node
  for node in "${nodes[@]}"; do
    if [[ -e /run/netns/tfpar-$node ]]; then
      ip netns pids "tfpar-$node" | xargs --no-run-if-empty kill -KILL 2>/dev/null || true
      ip netns delete "tfpar-$node" || true
    fi
  done
  ip link delete tfpar-bridge 2>/dev/null || true
  for node in "${nodes[@]}"; do
    containers rm "$node" >/dev/null 2>&1 || true
  done
  # What was mounted belongs to this folder alone.
  findmnt --list --noheadings --output TARGET | grep "^$folder/" | sort --reverse \
    | xargs --no-run-if-empty umount 2>/dev/null || true
  if [[ -n $temporary ]]; then
    rm -rf --one-file-system "$temporary"
  fi
}
trap 'echo "build_and_train.sh: line $LINENO failed" >&2' ERR
trap remove_containers EXIT
trap 'exit 130' INT TERM

# --- images ----------------------------------------------------------------------------------------

# What the images on a registry bring: an interpreter, its headers, and venv.
if ! containers inspect --type image tfpar-base >/dev/null 2>&1; then
  # shellcheck source=/dev/null
  suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
  # shellcheck disable=SC2016  # apt expands it
  mirror=$(apt-get indextargets --format '$(REPO_URI)' "Codename: $suite" | head --lines=1)
  rm -rf --one-file-system "$folder/base"
  timeout "$base_limit" debootstrap --variant=minbase \
    --include=ca-certificates,python3,python3-dev,python3-venv "$suite" "$folder/base" "$mirror" \
    >"$folder/debootstrap.log" || { tail "$folder/debootstrap.log" >&2; exit 1; }
  tar --create --directory="$folder/base" --exclude='./dev/*' --file="$folder/base.tar" .
  printf 'FROM scratch\nADD base.tar /\nENV LANG=C.UTF-8\n' \
    | timeout "$base_limit" "${build[@]}" build --quiet --tag tfpar-base --file - "$folder" >/dev/null
  rm -rf --one-file-system "$folder/base" "$folder/base.tar"
fi

# pip's settings in one file, from wherever they are: files, and variables of the environment; and
# the files and folders that they name, such as a file of constraints. An index in a folder is left
# out: its links may lead anywhere.
python3 - "$folder/pip.conf" >"$folder/pip.paths" <<'PYTHON'
import ast, configparser, os, subprocess, sys

command = [sys.executable, "-m", "pip", "config", "list"]
listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
settings = configparser.RawConfigParser()
settings["global"] = {}
for line in listed.splitlines():
    name, _, value = line.partition("=")
    words = [word for word in ast.literal_eval(value).split() if not word.startswith("file:")]
    if words:
        settings["global"][name.rpartition(".")[2]] = " ".join(words)
with open(sys.argv[1], "w") as file:
    settings.write(file)
words = (word for value in settings["global"].values() for word in value.split())
print(*sorted({w for w in words if w.startswith("/") and os.path.exists(w)}), sep="\n")
PYTHON
pip_volumes=()
while read -r path; do
  [[ -z $path || $path == /etc/ssl/certs/* ]] || pip_volumes+=(--volume "$path:$path:ro")
done <"$folder/pip.paths"

image() {
  local tag=$1 file=$2
  shift 2
  echo "build_and_train.sh: building $tag"
  timeout "$build_limit" "${build[@]}" build --isolation chroot --tag "$tag" --file "$file" \
    --build-arg BASE=localhost/tfpar-base --secret "id=pip.conf,src=$folder/pip.conf" \
    --volume /etc/apt:/etc/apt:ro --volume /etc/ssl/certs:/etc/ssl/certs:ro "${pip_volumes[@]}" \
    "$@" .
}
image tfpar:cpu docker/Dockerfile.cpu
# Their first stage is the environment that is there.
readonly built=build=container-image://localhost/tfpar:cpu
image tfpar:cpu-ssh docker/Dockerfile.cpu --target ssh --build-context "$built"
image tfpar:cuda-ssh docker/Dockerfile.cuda --target ssh --build-context "$built" \
  --build-arg BUILD_BASE=localhost/tfpar-base

# --- two containers, one job ------------------------------------------------------------------------

ip link add tfpar-bridge type bridge
ip link set tfpar-bridge up
hosts=()
for i in "${!nodes[@]}"; do
  hosts+=(--add-host "${nodes[i]}:$subnet.$((i + 1))")
done
for i in "${!nodes[@]}"; do
  space=tfpar-${nodes[i]}
  ip netns add "$space"
  ip link add "tfpar-port$i" type veth peer name eth0 netns "$space"
  ip link set "tfpar-port$i" master tfpar-bridge up
  ip -n "$space" address add "$subnet.$((i + 1))/24" dev eth0
  ip -n "$space" link set eth0 up
  ip -n "$space" link set lo up
  containers from --name "${nodes[i]}" "${hosts[@]}" localhost/tfpar:cpu-ssh >/dev/null
done

install --directory --mode=700 --owner=1000 --group=1000 "$folder/ssh"  # the image's user
inside() {  # SECONDS NODE COMMAND...
  local limit=$1 node=$2
  shift 2
  timeout --kill-after=20 "$limit" ip netns exec "tfpar-$node" "${build[@]}" run \
    --isolation chroot --hostname "$node" --volume "$folder/ssh:/home/tfpar/.ssh" "$node" -- "$@"
}
inside "$serve_limit" node1 node.sh keys
started=$SECONDS
for node in "${nodes[@]}"; do
  inside "$((serve_limit + train_limit))" "$node" node.sh >"$folder/$node.log" 2>&1 &
done
answers() {
  ip netns exec "tfpar-$1" bash -c 'exec 3<>/dev/tcp/127.0.0.1/2222' 2>/dev/null
}
for node in "${nodes[@]}"; do
  until answers "$node"; do
    if ((SECONDS > started + serve_limit)); then
      echo "build_and_train.sh: $node serves no ssh:" >&2
      cat "$folder/$node.log" >&2
      exit 1
    fi
    sleep 1
  done
done

echo "build_and_train.sh: training on ${nodes[*]}"
inside "$train_limit" node1 \
  tfpar run -H node1:1,node2:1 --timeout 300 python train.py >"$folder/train.log"
cat "$folder/train.log"
grep --quiet 'losses \[' "$folder/train.log"
echo "build_and_train.sh: images built, two containers trained as one job"
