-- Tasks and their leases: submit, claim, heartbeat, and every way an epoch ends without effects.
--
-- An epoch's word is in its task's row while it is the task's last word (token is set, status completed or failed), and
-- in task_epochs otherwise. Parameters bear the names of the contract, hence use_column and the qualified parameters.

-- The limits as the functions read them, once per call: settings, checked and cast when they are changed.
create table fencepost.limits (
    only_row     boolean primary key default true check (only_row),
    shards       integer not null,
    payload      integer not null,
    headers      integer not null,
    effects      integer not null,
    targets      integer not null,
    task_payload integer not null
);

create function fencepost.limit_of(setting text) returns integer
language plpgsql stable as $$
declare
    given text := (select s.value from fencepost.settings s where s.name = setting);
begin
    if given ~ '^[1-9][0-9]{0,8}$' is not true then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = format('settings.%I: %s is not a whole number from 1 to 999999999', setting, coalesce(quote_literal(given), 'nothing'));
    end if;
    return given::integer;
end $$;

create function fencepost.read_limits() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
    -- Whoever changes another setting meanwhile waits here, and then sees this one.
    perform from fencepost.limits for update;
    insert into fencepost.limits values (
        true, fencepost.limit_of('shards'), fencepost.limit_of('payload_max_bytes'), fencepost.limit_of('headers_max_bytes'),
        fencepost.limit_of('effects_max'), fencepost.limit_of('targets_max'), fencepost.limit_of('task_payload_max_bytes'))
    on conflict (only_row) do update
    set shards = excluded.shards, payload = excluded.payload, headers = excluded.headers,
        effects = excluded.effects, targets = excluded.targets, task_payload = excluded.task_payload;
    return null;
end $$;
create trigger read_limits after update on fencepost.settings for each row
when (new.name in ('shards', 'payload_max_bytes', 'headers_max_bytes', 'effects_max', 'targets_max', 'task_payload_max_bytes'))
execute function fencepost.read_limits();

-- What relays act upon must not be a slip of the hand: a retention of less than nothing deletes everything.
create function fencepost.check_setting() returns trigger
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    span interval;
begin
    if new.name = 'shards' then
        if new.value is distinct from old.value then
            raise exception using
                errcode = 'object_not_in_prerequisite_state',
                message = format('settings.shards: it is %s, and fixed at migrate: where each key belongs follows from it', old.value);
        end if;
        return new;
    end if;
    begin
        span := new.value::interval;
    exception when data_exception then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = format('settings.%I: %L is not a length of time, such as 7 days', new.name, new.value);
    end;
    if not isfinite(span) or span < interval '0' or (span = interval '0' and new.name <> 'segment_span_min') then
        raise exception using errcode = 'invalid_parameter_value', message = format('settings.%I: must be longer than nothing', new.name);
    end if;
    return new;
end $$;
create trigger check_setting before update on fencepost.settings for each row
when (new.name in ('shards', 'retention', 'audit_retention', 'segment_span_min'))
execute function fencepost.check_setting();

-- The first reading.
update fencepost.settings set value = value where name = 'shards';

-- plpgsql, not sql, here and wherever a function is called on the hot path and cannot be inlined: the body of an SQL
-- function is planned anew in every transaction.
--
-- A UUIDv7: ids that grow with time keep the primary key's inserts on one page.
create function fencepost.new_task_id() returns text
language plpgsql volatile as $$
begin
    return encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                    placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
                    from 1 for 6),
            52, 1), 53, 1),
        'hex')::uuid::text;
end $$;

create function fencepost.check_argument(ok boolean, argument text, wanted text) returns void
language plpgsql immutable as $$
begin
    if ok is not true then
        raise exception using errcode = 'invalid_parameter_value', message = format('%s: %s', argument, wanted);
    end if;
end $$;

create function fencepost.check_size(what text, size bigint, most bigint, setting text) returns void
language plpgsql immutable as $$
begin
    if size > most then
        raise exception using
            errcode = 'OB005',
            message = format('%s: %s bytes, the limit is %s', what, size, most),
            hint = format('The limit is %I in fencepost.settings.', setting);
    end if;
end $$;

-- What is kept in a task's row: its payload, its result.
create function fencepost.check_task_size(what text, kept jsonb) returns void
language plpgsql stable as $$
begin
    perform fencepost.check_size(what, octet_length(kept::text), (select l.task_payload from fencepost.limits l), 'task_payload_max_bytes');
end $$;

-- Epochs are never issued below it. Where the history of this database may have been rewound (another server or WAL
-- timeline than recorded), an epoch could be issued twice for different work: then the base rises by 2^20.
create function fencepost.epoch_base() returns bigint
language plpgsql volatile as $$
declare
    server bigint := (select c.system_identifier from pg_control_system() c);
    wal    integer := fencepost.wal_timeline();
    base   bigint;
begin
    select h.epoch_base into base from fencepost.history h where h.system_identifier = server and h.timeline = wal;
    if found then
        return base;
    end if;
    update fencepost.history h
    set system_identifier = server, timeline = wal, epoch_base = h.epoch_base + 1048576
    where (h.system_identifier, h.timeline) <> (server, wal)
    returning h.epoch_base into base;
    if not found then
        select h.epoch_base into strict base from fencepost.history h;
    end if;
    return base;
end $$;

-- Says why a write guarded by (task_id, lease_epoch, owner) found no row: OB006, OB003, OB001, in that order.
-- `same` are the words that mean this very call has happened before.
create function fencepost.refuse(task text, epoch bigint, who text, same text[]) returns void
language plpgsql volatile as $$
declare
    t     record;
    ended record;
begin
    select k.status, k.lease_epoch, k.owner, k.token, k.ended_at into t from fencepost.tasks k where k.task_id = task;
    if not found then
        raise exception using errcode = 'OB006', message = format('task %s is unknown', coalesce(quote_literal(task), 'null'));
    end if;
    select e.token, e.ended_at into ended
    from (select k.token, k.ended_at from fencepost.tasks k where k.task_id = task and k.lease_epoch = epoch
          union all
          select e.token, e.ended_at from fencepost.task_epochs e where e.task_id = task and e.lease_epoch = epoch) e
    where e.token = any (same);
    if found then
        raise exception using
            errcode = 'OB003',
            message = format('epoch %s of task %s has already completed: %s', epoch, quote_literal(task), ended.token),
            detail = format('It ended at %s.', ended.ended_at),
            hint = 'After a COMMIT whose answer was lost this means that it had committed.';
    end if;
    raise exception using
        errcode = 'OB001',
        message = format('lease lost: task %s is not leased to %s under epoch %s',
                         quote_literal(task), coalesce(quote_literal(who), 'null'), coalesce(epoch::text, 'null')),
        detail = format('The task is %s, epoch %s, owner %s%s.', t.status, t.lease_epoch, coalesce(quote_literal(t.owner), 'none'),
                        coalesce(', ended ' || t.token, '')),
        hint = 'Roll back; whoever holds the newer epoch does the work.';
end $$;

create function fencepost.submit_task(
    kind text, payload jsonb default '{}', task_id text default null, run_at timestamptz default null, max_claims integer default 25
) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    id text := coalesce(submit_task.task_id, fencepost.new_task_id());
    same boolean;
begin
    perform fencepost.check_argument(submit_task.kind <> '', 'kind', 'must not be empty');
    perform fencepost.check_argument(submit_task.max_claims > 0, 'max_claims', 'must be at least 1');
    perform fencepost.check_argument(submit_task.payload is not null, 'payload', 'must be JSON, not an SQL null');
    perform fencepost.check_task_size('payload of the task', submit_task.payload);
    insert into fencepost.tasks (task_id, kind, payload, run_at, max_claims, claims_left)
    values (id, submit_task.kind, submit_task.payload, coalesce(submit_task.run_at, clock_timestamp()), submit_task.max_claims, submit_task.max_claims)
    on conflict on constraint tasks_pkey do nothing;
    if not found then
        select t.kind = submit_task.kind and t.payload = submit_task.payload into strict same
        from fencepost.tasks t where t.task_id = id;
        if not same then
            raise exception using
                errcode = 'OB007',
                message = format('task %s exists with another kind or payload', quote_literal(id)),
                hint = 'Nothing was changed. Choose another task_id for other work.';
        end if;
    end if;
    return id;
end $$;

-- A tick at most once a second per owner; never waits for another session of the same name.
create function fencepost.tick(who text, word text) returns void
language plpgsql volatile as $$
begin
    if exists (select from fencepost.workers w where w.owner = who and w.at > clock_timestamp() - interval '1 second')
       or not pg_try_advisory_xact_lock(fencepost.doorbell_class() + 1, hashtext(who)) then
        return;
    end if;
    update fencepost.workers w set tick = w.tick + 1, token = word, at = clock_timestamp()
    where w.owner = who and w.at <= clock_timestamp() - interval '1 second';
    if not found then
        insert into fencepost.workers (owner, tick, token) values (who, 1, word) on conflict do nothing;
    end if;
end $$;

-- A turn of a worker's loop failed; `lease_lost`: its completion was refused (OB001). Written at once: the transaction that
-- failed left nothing.
create function fencepost.worker_failed(owner text, lease_lost boolean default false) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    perform fencepost.check_argument(worker_failed.owner <> '' and octet_length(worker_failed.owner) <= 256, 'owner', 'must be 1 to 256 bytes');
    insert into fencepost.workers as w (owner, tick, token, refused)
    values (worker_failed.owner, 1, 'failed', worker_failed.lease_lost::integer)
    on conflict on constraint workers_pkey do update
    set tick = w.tick + 1, token = 'failed', at = clock_timestamp(), refused = w.refused + excluded.refused;
end $$;

create function fencepost.claim_tasks(
    owner text, kinds text[] default null, max_tasks integer default 1, lease interval default '30 seconds', task_ids text[] default null
) returns table (task_id text, lease_epoch bigint, kind text, payload jsonb, lease_expires_at timestamptz, previous text)
language plpgsql volatile security definer rows 10 set search_path = pg_catalog, pg_temp
-- The plan must not depend on statistics: a queue's are always out of date.
set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    base      bigint := fencepost.epoch_base();
    moment    timestamptz;
    claimed   integer := 0;
    exhausted boolean;
    t         record;
begin
    perform fencepost.check_argument(claim_tasks.owner <> '' and octet_length(claim_tasks.owner) <= 256, 'owner', 'must be 1 to 256 bytes');
    perform fencepost.check_argument(claim_tasks.max_tasks between 1 and 10000, 'max_tasks', 'must be from 1 to 10000');
    perform fencepost.check_argument(claim_tasks.lease > interval '0' and claim_tasks.lease <= interval '30 days', 'lease', 'must be longer than 0 and at most 30 days');
    loop
        moment := clock_timestamp();
        exhausted := false;
        for t in
            with expired as (
                select k.task_id, k.lease_epoch, k.owner, k.status, k.run_at
                from fencepost.tasks k
                where k.status = 'running' and k.lease_expires_at <= moment
                  and (claim_tasks.kinds is null or k.kind = any (claim_tasks.kinds))
                  and (claim_tasks.task_ids is null or k.task_id = any (claim_tasks.task_ids))
                order by k.lease_expires_at
                limit claim_tasks.max_tasks
                for update skip locked
            ), room as (
                select claim_tasks.max_tasks - count(*) as left_over from expired
            ), any_kind as (
                select k.task_id, k.lease_epoch, k.owner, k.status, k.run_at
                from fencepost.tasks k
                where claim_tasks.kinds is null and claim_tasks.task_ids is null
                  and k.status = 'ready' and k.run_at <= moment
                order by k.run_at, k.task_id
                limit (select left_over from room)
                for update skip locked
            ), those_kinds as (
                select r.task_id, r.lease_epoch, r.owner, r.status, r.run_at
                from (select distinct u.kind from unnest(claim_tasks.kinds) u (kind)) u
                cross join lateral (
                    select k.task_id, k.lease_epoch, k.owner, k.status, k.run_at
                    from fencepost.tasks k
                    where k.kind = u.kind and k.status = 'ready' and k.run_at <= moment
                    order by k.run_at, k.task_id
                    limit (select left_over from room)
                    for update skip locked
                ) r
                where claim_tasks.task_ids is null
            ), named as (
                select k.task_id, k.lease_epoch, k.owner, k.status, k.run_at
                from fencepost.tasks k
                where k.task_id = any (claim_tasks.task_ids)
                  and k.status = 'ready' and k.run_at <= moment
                  and (claim_tasks.kinds is null or k.kind = any (claim_tasks.kinds))
                order by k.run_at, k.task_id
                limit (select left_over from room)
                for update skip locked
            ), picked as (
                select p.task_id, p.lease_epoch, p.owner, p.status
                from (select x.task_id, x.lease_epoch, x.owner, x.status, x.run_at from expired x
                      union all select x.task_id, x.lease_epoch, x.owner, x.status, x.run_at from any_kind x
                      union all select x.task_id, x.lease_epoch, x.owner, x.status, x.run_at from those_kinds x
                      union all select x.task_id, x.lease_epoch, x.owner, x.status, x.run_at from named x) p
                order by p.status desc, p.run_at, p.task_id
                limit claim_tasks.max_tasks
            ), lost as (
                insert into fencepost.task_epochs (task_id, lease_epoch, owner, token, ended_at)
                select p.task_id, p.lease_epoch, p.owner, 'lost', moment from picked p where p.status = 'running'
            )
            update fencepost.tasks k
            set lease_epoch = greatest(k.lease_epoch + 1, base),
                status = case when k.claims_left > 0 then 'running' else 'failed' end,
                owner = case when k.claims_left > 0 then claim_tasks.owner end,
                lease_expires_at = case when k.claims_left > 0 then moment + claim_tasks.lease end,
                claims_left = greatest(k.claims_left - 1, 0),
                late = false,
                token = case when k.claims_left > 0 then null else 'failed' end,
                reason = case when k.claims_left > 0 then null else 'claims_exhausted' end,
                ended_at = case when k.claims_left > 0 then null else moment end
            from picked p
            where k.task_id = p.task_id
            returning k.task_id, k.lease_epoch, k.kind, k.payload, k.lease_expires_at, k.status,
                      case when p.status = 'running' then 'lost'
                           when p.lease_epoch > 0 then
                               (select e.token from fencepost.task_epochs e
                                where e.task_id = p.task_id and e.lease_epoch = p.lease_epoch)
                      end as previous
        loop
            if t.status = 'failed' then
                exhausted := true;
                continue;
            end if;
            claimed := claimed + 1;
            claim_tasks.task_id := t.task_id;
            claim_tasks.lease_epoch := t.lease_epoch;
            claim_tasks.kind := t.kind;
            claim_tasks.payload := t.payload;
            claim_tasks.lease_expires_at := t.lease_expires_at;
            claim_tasks.previous := t.previous;
            return next;
        end loop;
        -- Tasks that were ended for want of claims must not hide the ones behind them.
        exit when claimed > 0 or not exhausted;
    end loop;
    perform fencepost.tick(claim_tasks.owner, case when claimed > 0 then 'worked' else 'idle' end);
end $$;

create function fencepost.heartbeat(task_id text, lease_epoch bigint, owner text, extend interval default '30 seconds')
returns timestamptz
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    expiry timestamptz;
begin
    perform fencepost.check_argument(heartbeat.extend > interval '0' and heartbeat.extend <= interval '30 days', 'extend', 'must be longer than 0 and at most 30 days');
    update fencepost.tasks t
    set lease_expires_at = greatest(t.lease_expires_at, clock_timestamp() + heartbeat.extend)
    from (select k.task_id from fencepost.tasks k
          where k.task_id = heartbeat.task_id and k.status = 'running'
            and k.lease_epoch = heartbeat.lease_epoch and k.owner = heartbeat.owner
          for update skip locked) held
    where t.task_id = held.task_id
    returning t.lease_expires_at into expiry;
    if found then
        return expiry;
    end if;
    -- Locked, by the completing transaction as a rule, or no longer ours.
    select t.lease_expires_at into expiry from fencepost.tasks t
    where t.task_id = heartbeat.task_id and t.status = 'running'
      and t.lease_epoch = heartbeat.lease_epoch and t.owner = heartbeat.owner;
    if not found then
        perform fencepost.refuse(heartbeat.task_id, heartbeat.lease_epoch, heartbeat.owner, array['effects', 'no_action']);
    end if;
    return expiry;
end $$;

create function fencepost.complete_task_no_action(task_id text, lease_epoch bigint, owner text, reason text)
returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    perform fencepost.check_argument(complete_task_no_action.reason <> '', 'reason', 'must say why there is nothing to do');
    update fencepost.tasks t
    set status = 'completed', token = 'no_action', reason = left(complete_task_no_action.reason, 4096),
        late = t.lease_expires_at < clock_timestamp(), ended_at = clock_timestamp()
    where t.task_id = complete_task_no_action.task_id and t.status = 'running'
      and t.lease_epoch = complete_task_no_action.lease_epoch and t.owner = complete_task_no_action.owner;
    if not found then
        perform fencepost.refuse(complete_task_no_action.task_id, complete_task_no_action.lease_epoch, complete_task_no_action.owner,
                                 array['effects', 'no_action']);
    end if;
end $$;

-- Ends the epoch and makes the task ready again at `due`.
create function fencepost.give_back(task text, epoch bigint, who text, word text, why text, wait interval) returns void
language plpgsql volatile as $$
declare
    moment   timestamptz := clock_timestamp();
    was_late boolean;
begin
    update fencepost.tasks t
    set status = 'ready', owner = null, lease_expires_at = null, run_at = moment + wait, late = t.lease_expires_at < moment
    where t.task_id = task and t.status = 'running' and t.lease_epoch = epoch and t.owner = who
    returning t.late into was_late;
    if not found then
        perform fencepost.refuse(task, epoch, who, array['effects', 'no_action', word]);
    end if;
    insert into fencepost.task_epochs (task_id, lease_epoch, owner, token, reason, late, ended_at)
    values (task, epoch, who, word, left(why, 4096), was_late, moment);
end $$;

create function fencepost.fail_task(task_id text, lease_epoch bigint, owner text, error text, retry_in interval default null)
returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    if fail_task.retry_in is not null then
        perform fencepost.check_argument(fail_task.retry_in >= interval '0' and fail_task.retry_in <= interval '10 years', 'retry_in', 'must be from 0 to 10 years, or null for no retry');
        perform fencepost.give_back(fail_task.task_id, fail_task.lease_epoch, fail_task.owner, 'failed', fail_task.error, fail_task.retry_in);
        return;
    end if;
    update fencepost.tasks t
    set status = 'failed', token = 'failed', reason = left(fail_task.error, 4096),
        late = t.lease_expires_at < clock_timestamp(), ended_at = clock_timestamp()
    where t.task_id = fail_task.task_id and t.status = 'running'
      and t.lease_epoch = fail_task.lease_epoch and t.owner = fail_task.owner;
    if not found then
        perform fencepost.refuse(fail_task.task_id, fail_task.lease_epoch, fail_task.owner, array['effects', 'no_action', 'failed']);
    end if;
end $$;

create function fencepost.release_task(task_id text, lease_epoch bigint, owner text, reason text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform fencepost.check_argument(release_task.reason <> '', 'reason', 'must say why the lease is given back');
    perform fencepost.give_back(release_task.task_id, release_task.lease_epoch, release_task.owner, 'released', release_task.reason, interval '0');
end $$;

-- A task that ends without having been claimed takes the next epoch for it, so that every epoch has one word.
create function fencepost.cancel_task(task_id text, reason text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    base bigint := fencepost.epoch_base();
begin
    perform fencepost.check_argument(cancel_task.reason <> '', 'reason', 'must say why the task is cancelled');
    update fencepost.tasks t
    set lease_epoch = greatest(t.lease_epoch + 1, base), status = 'failed', token = 'failed', late = false,
        reason = left('cancelled: ' || cancel_task.reason, 4096), ended_at = clock_timestamp()
    where t.task_id = cancel_task.task_id and t.status = 'ready';
    if found then
        return true;
    end if;
    if not exists (select from fencepost.tasks t where t.task_id = cancel_task.task_id) then
        perform fencepost.refuse(cancel_task.task_id, null, null, array[]::text[]);
    end if;
    return false;
end $$;
