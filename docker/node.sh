#!/usr/bin/env bash
# A node of a job: an sshd by which `tfpar run` starts ranks here, as the user of the image.
#
#   node.sh                    serve
#   node.sh keys               make the job's key pair in ~/.ssh, unless it is there
#   node.sh known-hosts HOST   the line by which ssh knows a host of the job (ssh.conf calls it)
#
# A job has one key pair, which its nodes share, made here or by an operator. Who has it may log in,
# and is the host that was meant. No key is part of an image.
set -euo pipefail

key=~/.ssh/id_ed25519
[[ -f $key ]] || key=~/.ssh/id_rsa  # as operators name it, whatever its type

case "${1:-}" in
  keys)
    if [[ ! -f $key ]]; then
      key=~/.ssh/id_ed25519
      ssh-keygen -q -t ed25519 -N "" -C tfpar -f "$key"
      install --mode=600 "$key.pub" ~/.ssh/authorized_keys
    fi
    ;;
  known-hosts)
    read -r type public _ <"$key.pub"
    echo "$2 $type $public"
    ;;
  *)
    exec /usr/sbin/sshd -D -e -h "$key"
    ;;
esac
