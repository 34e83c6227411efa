-- What the demo's own programs write down, in a schema of the run: {schema}.

-- The producers' word: what they promised to send, committed with the completion that promises it.
create table if not exists {schema}.promised (key text not null, consumer text not null, body_sha256 bytea not null);

-- The consumers' word: each request as it came, before any thought of whether it came before.
create table if not exists {schema}.receipts (
    consumer    text not null,
    key         text not null,
    body_sha256 bytea not null,
    at          timestamptz not null default clock_timestamp()
);

-- The effects of the consumers that dedup. No unique key: only the inbox keeps one from happening twice.
create table if not exists {schema}.applied (consumer text not null, key text not null);

-- The numbers of tasks that are submitted in several goes.
create sequence if not exists {schema}.task_numbers minvalue 0 start 0;
