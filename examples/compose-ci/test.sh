#!/bin/sh
# The end-to-end test of the shop. Needs the image `fencepost:local` (docker build -t fencepost:local .) or another in
# FENCEPOST_IMAGE.
set -eu
cd "$(dirname "$0")"
compose="${COMPOSE:-docker compose} -p fencepost-compose-ci -f docker-compose.yml ${E2E_STAND_INS:+-f stand-ins.yml}"
trap '$compose down -v --remove-orphans -t 1 >/dev/null 2>&1' EXIT

fail() {
    echo "compose-ci: FAILED: $1"
    $compose logs --tail 30
    exit 1
}

$compose up -d --no-build
# Done when the schema is there, whatever is still starting.
$compose run --rm -T fencepost wait --until-drained --timeout 60s || fail "fencepost did not come up"

$compose run --rm -T shop || fail "the scenario"

# Every effect has ended, or this says what waits.
$compose run --rm -T fencepost wait --until-drained --timeout 60s || fail "something still waits"

# What the test is about: both new orders got their mail, the cancelled one did not.
mails=$($compose exec -T mailer python3 -c 'import urllib.request as u; print(u.urlopen("http://127.0.0.1:8080/").read().decode())')
[ "$mails" = "[1001, 1002]" ] || fail "mails were sent for $mails"

# The consumer's own words: one answer was lost, and the retry was recognised.
words=$($compose exec -T postgres psql -U postgres -d shop -XAtqc \
    "select string_agg(token, ' ' order by token) from fencepost.deliveries where consumer = 'mailer'")
[ "$words" = "applied duplicate" ] || fail "the consumer said: $words"

# And nothing else happened: no effect without an end, no attempt without a token.
$compose run --rm -T fencepost audit || fail "the audit found a hole"
echo "compose-ci: PASSED"
