# Read by the image's entrypoint once, on an empty data directory: the roles of the services, with their passwords.
psql -v ON_ERROR_STOP=1 -U "$POSTGRES_USER" -d "$POSTGRES_DB" -f /run/secrets/roles.sql
