#!/bin/sh
# Schema, rights, queues and the demo's own tables; each of them may be run again.
set -eu
fencepost migrate
fencepost grant relay --as relay --yes --reason "docker-compose.yml"
fencepost grant worker --as worker --yes --reason "docker-compose.yml"
fencepost grant worker --as producer --yes --reason "docker-compose.yml"
fencepost amqp init --queues --yes --reason "docker-compose.yml"
fencepost demo --role stage
