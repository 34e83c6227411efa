#!/bin/sh
# Makes every password of this installation, once, and lays each where only those containers see it that need it: one
# volume per service, mounted there as /run/secrets. Delete the volumes (`docker compose down -v`) for new ones.
set -eu
cd /secrets
if [ -e postgres/done ]; then
    echo "the secrets are there already"
    exit 0
fi

random() {
    od -An -N24 -tx1 /dev/urandom | tr -d ' \n'
}
# A database URL of a role; the network between the containers is private, hence no TLS.
database() {
    printf 'postgresql://%s:%s@postgres:5432/app?sslmode=disable\n' "$1" "$2"
}

owner=$(random)
echo "$owner" >postgres/password
database postgres "$owner" >owner/database-url
: >postgres/roles.sql
for role in relay worker consumer; do
    password=$(random)
    echo "create role $role login password '$password';" >>postgres/roles.sql
    database "$role" "$password" >"$role/database-url"
done

broker=$(random)
# Each health check is a connection that the log need not tell of.
printf 'default_user = fencepost\ndefault_pass = %s\nlog.connection.level = error\n' "$broker" >rabbitmq/fencepost.conf
for service in owner relay worker consumer; do
    printf 'amqp://fencepost:%s@rabbitmq:5672/%%2f\n' "$broker" >"$service/broker-url"
done
random >grafana/admin-password

# The images run as users of their own, whose numbers differ: the volumes are what keeps the files apart.
chmod 444 */*
touch postgres/done
echo "made the secrets"
