#!/bin/sh
# As much of the official image's entrypoint as the compose files use: POSTGRES_USER, POSTGRES_DB, POSTGRES_PASSWORD or
# POSTGRES_PASSWORD_FILE, and the scripts of /docker-entrypoint-initdb.d, once, on an empty data directory.
set -eu
: "${POSTGRES_USER:=postgres}" "${POSTGRES_DB:=$POSTGRES_USER}"
export POSTGRES_USER POSTGRES_DB
if [ "$(id -u)" = 0 ]; then
    chown -R postgres:postgres "$PGDATA"
    exec setpriv --reuid postgres --regid postgres --init-groups "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    chmod 700 "$PGDATA"
    if [ -z "${POSTGRES_PASSWORD_FILE:-}" ]; then
        POSTGRES_PASSWORD_FILE=$(mktemp)
        printf '%s\n' "$POSTGRES_PASSWORD" >"$POSTGRES_PASSWORD_FILE"
    fi
    initdb -D "$PGDATA" -U "$POSTGRES_USER" --pwfile "$POSTGRES_PASSWORD_FILE" --auth-host scram-sha-256 --auth-local trust \
        -E UTF8 --locale C.UTF-8
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    echo "listen_addresses = '*'" >>"$PGDATA/postgresql.conf"
    pg_ctl -D "$PGDATA" -w -o "-c listen_addresses=''" start
    [ "$POSTGRES_DB" = postgres ] || createdb -U "$POSTGRES_USER" "$POSTGRES_DB"
    for script in /docker-entrypoint-initdb.d/*; do
        case "$script" in
        *.sh) . "$script" ;;
        *.sql) psql -v ON_ERROR_STOP=1 -U "$POSTGRES_USER" -d "$POSTGRES_DB" -f "$script" ;;
        esac
    done
    pg_ctl -D "$PGDATA" -m fast -w stop
fi
exec "$@"
