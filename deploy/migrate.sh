#!/bin/sh
# Schema, consumers, rights, queues and the demo's own tables; each of them may be run again.
set -eu
fencepost migrate
# Not left to the relays, which start beside the workers: an effect goes to those who subscribe when it is committed.
fencepost consumers apply --yes --reason "docker-compose.yml"
fencepost grant relay --as relay --yes --reason "docker-compose.yml"
fencepost grant worker --as worker --yes --reason "docker-compose.yml"
fencepost grant worker --as producer --yes --reason "docker-compose.yml"
fencepost amqp init --queues --yes --reason "docker-compose.yml"
fencepost demo --role stage
