#!/bin/sh
# Makes what deploy/compose.yaml and deploy/kubernetes need to know and nobody else may: make-secrets.sh DIRECTORY
#
# What is there already stays, so that it can be run again; nothing is printed.
set -eu

if [ $# -ne 1 ]; then
    echo "usage: make-secrets.sh DIRECTORY" >&2
    exit 2
fi
umask 077
mkdir -p "$1"
cd "$1"

random() {
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n'
}

# Compose shows a file to a container as it is, so the user in there must be able to read it; the directory keeps
# everybody else out.
for name in pool_token cache_salt_secret dashboard_secret; do
    [ -s "$name" ] || random > "$name"
    chmod 644 "$name"
done

if [ ! -s postgres.env ] || [ ! -s gateway.env ]; then
    password=$(random)
    printf 'POSTGRES_PASSWORD=%s\n' "$password" > postgres.env
    printf 'PGPASSWORD=%s\n' "$password" > gateway.env
fi
[ -s grafana.env ] || printf 'GF_SECURITY_ADMIN_PASSWORD=%s\n' "$(random)" > grafana.env
