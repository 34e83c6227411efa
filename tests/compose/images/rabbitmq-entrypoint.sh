#!/bin/sh
# As the official image: as root make the data directory ours, then go on without privileges.
set -eu
if [ "$(id -u)" = 0 ]; then
    chown -R rabbitmq:rabbitmq /var/lib/rabbitmq
    exec setpriv --reuid rabbitmq --regid rabbitmq --init-groups "$0" "$@"
fi
# Debian's wrapper would want to be root again.
[ "$1" = rabbitmq-server ] && shift && set -- /usr/lib/rabbitmq/bin/rabbitmq-server "$@"
exec "$@"
