-- What a consumer remembers, in its own database, beside its own data. Written for PostgreSQL 14 and later.
-- {schema} is the schema the consumer chose.
select pg_advisory_xact_lock(hashtextextended('fencepost inbox install', 0));

create schema if not exists {schema};

-- Every key that was applied. A scope is one service: the keys of one fencepost database, however many edges lead here.
create table if not exists {schema}.keys (
    scope       text not null,
    key         text not null,
    body_sha256 bytea not null check (octet_length(body_sha256) = 32),
    applied_at  timestamptz not null default clock_timestamp(),
    primary key (scope, key)
);
create index if not exists keys_by_age on {schema}.keys (applied_at);

-- The newest epoch of each task of which anything was applied.
create table if not exists {schema}.epochs (
    scope      text not null,
    task_id    text not null,
    epoch      bigint not null,
    applied_at timestamptz not null default clock_timestamp(),
    primary key (scope, task_id)
);
create index if not exists epochs_by_age on {schema}.epochs (applied_at);

-- Decides about one delivery inside the caller's transaction: the key first, then the epoch.
--   applied      first time: make the effect now, in this transaction
--   duplicate    it was applied before, with the same body: make nothing
--   conflict     it was applied before, with another body
--   stale        a newer epoch of the task was applied before: current
--   in-progress  another transaction is deciding about this very key: nobody waits for it
create or replace function {schema}.apply(
    p_scope text, p_key text, p_body_sha256 bytea, out verdict text, out current bigint
) language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    v_task  text := split_part(p_key, ':', 1);
    v_epoch bigint := split_part(p_key, ':', 2)::bigint;
    v_known bytea;
begin
    if not pg_try_advisory_xact_lock(hashtextextended(p_scope || ' ' || p_key, 6652746)) then
        verdict := 'in-progress';
        return;
    end if;
    select k.body_sha256 into v_known from {schema}.keys k where k.scope = p_scope and k.key = p_key;
    if found then
        verdict := case when v_known = p_body_sha256 then 'duplicate' else 'conflict' end;
        return;
    end if;
    -- Waits for another effect of the same task to commit: only then is it known which epoch is the newest.
    insert into {schema}.epochs as e (scope, task_id, epoch) values (p_scope, v_task, v_epoch)
    on conflict (scope, task_id) do update
        set epoch = greatest(e.epoch, excluded.epoch),
            applied_at = case when excluded.epoch >= e.epoch then excluded.applied_at else e.applied_at end
    returning e.epoch into current;
    if current > v_epoch then
        verdict := 'stale';
        return;
    end if;
    insert into {schema}.keys (scope, key, body_sha256) values (p_scope, p_key, p_body_sha256);
    verdict := 'applied';
    current := null;
end $$;

-- Forgets what was applied longer ago than `retain`; returns how many keys. Run it from time to time.
create or replace function {schema}.prune(p_retain interval) returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    v_forgotten bigint;
begin
    delete from {schema}.keys where applied_at < clock_timestamp() - p_retain;
    get diagnostics v_forgotten = row_count;
    delete from {schema}.epochs where applied_at < clock_timestamp() - p_retain;
    return v_forgotten;
end $$;
