#!/usr/bin/env bash
# A node of a try-out: an sshd by which `tfpar run` starts ranks here. No key is part of an image.
#
#   node.sh         make this container's host keys, and serve
#   node.sh keys    make the key pair that all nodes share in /root/.ssh, unless it is there
set -euo pipefail

if [[ "${1:-}" == keys ]]; then
  install --directory --mode=700 /root/.ssh
  if [[ ! -f /root/.ssh/id_ed25519 ]]; then
    ssh-keygen -q -t ed25519 -N "" -C tfpar -f /root/.ssh/id_ed25519
    install --mode=600 /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys
  fi
  exit
fi

ssh-keygen -A
install --directory --mode=755 /run/sshd
exec /usr/sbin/sshd -D -e
