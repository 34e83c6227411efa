-- The tables of fencepost. Written for PostgreSQL 14 and later.
--
-- Append-only: effects, ledger, attempts, task_epochs, audit_log. The relay's own log is flights. Rows that change in
-- place are few and small: tasks, consumers, shards, relays, workers, and parked, where only deliveries in trouble live.

-- Strongest first: where a delivery has several facts, the least value decides it.
create type fencepost.fact as enum (
    'applied', 'duplicate', 'conflict', 'rejected', 'stale', 'accepted', 'confirmed',
    'operator:applied', 'operator:not_applied', 'skipped', 'expired', 'unrouted'
);

-- What a column may hold stands in its domain wherever rows are written often: a domain is looked at where a value is
-- assigned, while the checks of a table are read, planned and evaluated anew by each statement that writes a row of it.
create domain fencepost.task_id as text
    constraint task_id_form check (value !~ '[^A-Za-z0-9_-]' and octet_length(value) between 1 and 128);
create domain fencepost.task_kind as text constraint kind_form check (value <> '' and octet_length(value) <= 128);
create domain fencepost.task_owner as text constraint owner_form check (value <> '' and octet_length(value) <= 256);
create domain fencepost.task_status as text constraint status_known check (value in ('ready', 'running', 'completed', 'failed'));
create domain fencepost.epoch_token as text
    constraint token_known check (value in ('effects', 'no_action', 'failed', 'released', 'lost'));
create domain fencepost.max_claims as integer constraint max_claims_form check (value > 0);
create domain fencepost.ordering_key as text constraint ordering_key_limit check (octet_length(value) <= 512);
create domain fencepost.payload as bytea constraint payload_limit check (octet_length(value) <= 16777216);
create domain fencepost.sha256 as bytea constraint sha256_form check (octet_length(value) = 32);
create domain fencepost.flight_token as text
    constraint flight_token_known check (value in ('origin', 'fence', 'done', 'lost', 'rebase'));
create domain fencepost.parked_state as text constraint parked_state_known check (
    value in ('retry', 'blocked', 'backlog', 'scheduled', 'unacked', 'in_doubt', 'dead'));
create domain fencepost.attempt_token as text constraint attempt_token_known check (value in (
    'applied', 'duplicate', 'accepted', 'confirmed', 'stale', 'conflict', 'rejected', 'not_delivered', 'unroutable',
    'throttled', 'refused', 'not_applied', 'in_progress', 'ambiguous', 'lost'));

-- Limits and identity of this installation. `value` is text; the functions cast it.
create table fencepost.settings (
    name  text primary key,
    value text not null,
    note  text not null
);

insert into fencepost.settings (name, value, note) values
    ('deployment', substr(replace(gen_random_uuid()::text, '-', ''), 1, 8), 'name of this installation in AMQP queue names; fixed after the first run'),
    ('ack_secret', replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'key of the ack tokens over AMQP; with a new one, replies to older messages are not believed'),
    ('shards', '8', 'units of ordering, leasing and failover; fixed at migrate'),
    ('payload_max_bytes', '1048576', 'largest payload of one effect, in bytes; at most 16777216'),
    ('headers_max_bytes', '16384', 'largest headers object of one effect, in bytes'),
    ('effects_max', '1000', 'most effects of one completion'),
    ('targets_max', '64', 'most consumers one effect may reach'),
    ('task_payload_max_bytes', '1048576', 'largest payload or result of one task, in bytes'),
    ('retention', '7 days', 'how long log, ledger and ended tasks are kept'),
    ('segment_span_min', '4 hours', 'the least time one segment of the log covers; a sixth of the retention where that is longer'),
    ('audit_retention', '90 days', 'how long the audit log is kept'),
    ('consumers_revision', '0', 'revision of the configuration file last applied');

-- Where history may have rewound, an epoch must not be issued twice: claims start above epoch_base.
create table fencepost.history (
    only_row          boolean primary key default true check (only_row),
    system_identifier bigint not null,
    timeline          integer not null,
    epoch_base        bigint not null default 0,
    -- The server whose transaction ids the flights speak of. Only a rebase changes it.
    log_system        bigint not null,
    -- Effects up to this id were accounted for by a rebase: their transaction ids may be another server's.
    log_floor         bigint not null default 0
);

create table fencepost.tasks (
    task_id          fencepost.task_id primary key,
    kind             fencepost.task_kind not null,
    payload          jsonb not null default '{}',
    status           fencepost.task_status not null default 'ready',
    owner            fencepost.task_owner,
    lease_epoch      bigint not null default 0,
    lease_expires_at timestamptz,
    run_at           timestamptz not null default clock_timestamp(),
    max_claims       fencepost.max_claims not null default 25,
    claims_left      integer not null,
    token            fencepost.epoch_token,
    reason           text,
    late             boolean not null default false,
    result           jsonb,
    first_effect_id  bigint,
    last_effect_id   bigint,
    effect_count     integer not null default 0,
    created_at       timestamptz not null default clock_timestamp(),
    ended_at         timestamptz,
    constraint running_has_lease check (status <> 'running' or (owner is not null and lease_expires_at is not null))
) with (fillfactor = 70);
create index tasks_ready on fencepost.tasks (run_at, task_id) where status = 'ready';
create index tasks_ready_kind on fencepost.tasks (kind, run_at, task_id) where status = 'ready';
create index tasks_leased on fencepost.tasks (lease_expires_at) where status = 'running';
create index tasks_ended on fencepost.tasks (ended_at) where status in ('completed', 'failed');

-- How each epoch ended that is not the task's last word: failed, released, lost, or a completion that was re-opened.
create table fencepost.task_epochs (
    task_id         text not null,
    lease_epoch     bigint not null,
    owner           text,
    token           fencepost.epoch_token not null,
    reason          text,
    late            boolean not null default false,
    first_effect_id bigint,
    last_effect_id  bigint,
    effect_count    integer not null default 0,
    ended_at        timestamptz not null default clock_timestamp(),
    primary key (task_id, lease_epoch)
);
create index task_epochs_ended on fencepost.task_epochs using brin (ended_at) with (pages_per_range = 32, autosummarize = on);
-- Lost leases are counted whenever somebody looks.
create index task_epochs_lost on fencepost.task_epochs (ended_at) where token = 'lost';

create table fencepost.workers (
    owner text primary key,
    tick  bigint not null default 0,
    token text not null check (token in ('worked', 'idle', 'failed')),
    at    timestamptz not null default clock_timestamp(),
    -- Completions refused because the lease was lost, as the worker said after its transaction was rolled back.
    refused bigint not null default 0
) with (fillfactor = 50);

-- What retention has deleted of things that are counted for ever: a counter must not fall.
create table fencepost.tallies (
    name text primary key,
    gone bigint not null default 0
);
insert into fencepost.tallies (name) values ('leases_lost'), ('completions_refused');

create table fencepost.consumers (
    consumer_id   integer generated always as identity primary key,
    name          text not null unique constraint consumer_name_form check (name ~ '^[A-Za-z0-9_.-]{1,64}$'),
    spec          jsonb not null,
    paused        boolean not null default false,
    paused_reason text,
    not_before    timestamptz,
    retired_at    timestamptz,
    created_at    timestamptz not null default clock_timestamp(),
    updated_at    timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

create table fencepost.subscriptions (
    topic       text not null constraint topic_form check (topic <> '' and octet_length(topic) <= 256),
    consumer_id integer not null references fencepost.consumers,
    primary key (topic, consumer_id)
);

-- The log. Never updated, never deleted from; retention drops whole segments.
create table fencepost.effects (
    id             bigint generated always as identity (cache 1),
    xid            xid8 not null default pg_current_xact_id(),
    committed_at   timestamptz not null default clock_timestamp(),
    deliver_after  timestamptz,
    expires_at     timestamptz,
    lease_epoch    bigint not null,
    position       integer not null,
    size           integer not null,
    shard          smallint not null,
    targets        integer[] not null,
    task_id        text not null,
    topic          text,
    type           text,
    schema_version text,
    content_type   text not null,
    ordering_key   fencepost.ordering_key not null,
    traceparent    text,
    amends         text,
    headers        jsonb,
    sha256         fencepost.sha256 not null,
    payload        fencepost.payload not null,
    primary key (id),
    constraint payload_size check (octet_length(payload) = size)
) partition by range (id);
create index effects_log on fencepost.effects (shard, xid) include (id);
-- The relay unpacks every body it sends, and lz4 does so several times faster. A server built without it keeps its own.
do $$ begin
    alter table fencepost.effects alter payload set compression lz4;
exception when feature_not_supported then null;
end $$;

-- What became of deliveries: at most one row per (effect, consumer, fact). consumer_id 0: an effect nobody subscribed to.
create table fencepost.ledger (
    effect_id   bigint not null,
    at          timestamptz not null default clock_timestamp(),
    consumer_id integer not null,
    token       fencepost.fact not null,
    attempt     integer not null,
    status      smallint,
    doubt       boolean,
    ack_raw     text,
    note        text,
    primary key (effect_id, consumer_id, token)
) partition by range (effect_id);
-- For the rate and for following what is settled; next to nothing to keep on a table that only grows.
create index ledger_at on fencepost.ledger using brin (at) with (pages_per_range = 32, autosummarize = on);

-- The relay's own log and its only checkpoint. Not partitioned: a partition key would have to join the primary key,
-- and (shard, seq) alone is the compare-and-set that fences a stale relay.
create table fencepost.flights (
    shard      smallint not null,
    seq        bigint not null,
    epoch      bigint not null,
    relay      uuid,
    nonce      uuid,
    base       pg_snapshot not null,
    target     pg_snapshot not null,
    first_id   bigint,
    last_id    bigint not null,
    partial    boolean not null default false,
    deliveries integer not null default 0,
    -- Its relay may send what it reads next, up to this id, before that has a flight.
    ahead_to   bigint,
    token      fencepost.flight_token,
    opened_at  timestamptz not null default clock_timestamp(),
    closed_at  timestamptz,
    primary key (shard, seq)
) with (fillfactor = 50);
-- No index on the token: closing a flight stays a heap-only update.

-- One row per delivery in trouble.
create table fencepost.parked (
    effect_id         bigint not null,
    consumer_id       integer not null,
    shard             smallint not null,
    ordering_key      text,
    state             fencepost.parked_state not null,
    attempts          integer not null default 0,
    -- Attempts that may have left this machine: what Outbox-Attempt counts.
    sent              integer not null default 0,
    next_attempt_at   timestamptz,
    reason            text,
    refusals          integer not null default 0,
    deaths            integer not null default 0,
    republished       integer not null default 0,
    first_failed_at   timestamptz,
    first_doubt_at    timestamptz,
    in_progress_since timestamptz,
    retain_seconds    bigint,
    -- An operator sends a terminal delivery again: its facts do not end this row.
    replay            boolean not null default false,
    parked_at         timestamptz not null default clock_timestamp(),
    -- What its lane has still to read up to this flight comes first: it was lost with its relay while the lane lagged.
    behind            bigint,
    primary key (effect_id, consumer_id)
) with (fillfactor = 70);
create index parked_due on fencepost.parked (shard, consumer_id, next_attempt_at);
create index parked_keys on fencepost.parked (consumer_id, ordering_key, effect_id) where ordering_key is not null;

-- Append-only: the start of an attempt where it needs a marker of its own, and the end of each that was not a
-- first-try success. A start without an end: nobody knows. A word that is no end and comes later is added (`ack_raw`).
create table fencepost.attempts (
    effect_id   bigint not null,
    consumer_id integer not null,
    attempt     integer not null,
    ended       boolean not null,
    at          timestamptz not null default clock_timestamp(),
    relay       uuid,
    token       fencepost.attempt_token,
    status      smallint,
    phase       text,
    bytes_left  boolean,
    took_ms     integer,
    ack_raw     text,
    error       text,
    primary key (effect_id, consumer_id, attempt, ended),
    constraint end_has_token check (ended = (token is not null))
);
create index attempts_at on fencepost.attempts using brin (at) with (pages_per_range = 32, autosummarize = on);

-- Flights that a slow lane still has to read: one range per lane, whatever waits. `draining_to` marks the page in hand.
create table fencepost.lags (
    shard       smallint not null,
    consumer_id integer not null,
    from_seq    bigint not null,
    to_seq      bigint not null,
    draining_to bigint,
    primary key (shard, consumer_id)
) with (fillfactor = 50);

-- Effects whose segment was dropped while a delivery still waited: byte for byte, with their ids.
create table fencepost.effects_kept (like fencepost.effects including defaults including constraints including compression, primary key (id));

create table fencepost.orphan_acks (
    id             bigint generated always as identity primary key,
    at             timestamptz not null default clock_timestamp(),
    shard          smallint,
    correlation_id text,
    why            text not null,
    properties     jsonb not null
);

-- Consumers' words over AMQP that are no end and came before their message's confirm: they act when the attempt has ended.
create table fencepost.early_acks (
    effect_id   bigint not null,
    consumer_id integer not null,
    word        text not null check (word in ('in_progress', 'not_applied')),
    at          timestamptz not null default clock_timestamp(),
    primary key (effect_id, consumer_id)
);

create table fencepost.audit_log (
    id     bigint generated always as identity primary key,
    at     timestamptz not null default clock_timestamp(),
    actor  text not null default session_user,
    action text not null,
    object text not null,
    reason text not null,
    detail jsonb not null default '{}'
);

-- Alarms stay until they are resolved: an ERROR line, a counter and a row of `fencepost status`.
create table fencepost.alarms (
    name        text not null,
    object      text not null,
    detail      text not null,
    count       bigint not null default 1,
    raised_at   timestamptz not null default clock_timestamp(),
    last_at     timestamptz not null default clock_timestamp(),
    resolved_at timestamptz,
    primary key (name, object)
);

create table fencepost.shards (
    shard            smallint primary key,
    epoch            bigint not null default 0,
    relay            uuid,
    lease_expires_at timestamptz,
    -- Since then nobody has begun an attempt that its holders may have left open. Null once these are ended.
    left_at          timestamptz
) with (fillfactor = 25);

create table fencepost.relays (
    relay      uuid primary key,
    name       text not null,
    version    text not null,
    tick       bigint not null default 0,
    token      text not null check (token in ('worked', 'idle', 'failed')),
    started_at timestamptz not null default clock_timestamp(),
    at         timestamptz not null default clock_timestamp(),
    stopped_at timestamptz,
    -- Edges whose way is shut for it now: consumer and reason.
    shut_edges jsonb not null default '{}'
) with (fillfactor = 50);
