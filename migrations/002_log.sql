-- What keeps the log honest: segments, their immutability, the shards and flight 0 of each.

create function fencepost.refuse_change() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    raise exception using
        errcode = 'OB008',
        message = format('%s.%s is append-only: %s refused', tg_table_schema, tg_table_name, lower(tg_op)),
        hint = 'A correction is a new effect (amends). Retention drops whole segments.';
end $$;

-- Every segment carries its own triggers: those of the parent do not protect a statement aimed at the segment.
create function fencepost.protect(relation regclass) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    execute format(
        'create trigger append_only before update or delete or truncate on %s for each statement execute function fencepost.refuse_change()',
        relation);
end $$;

-- Creates and attaches the open-ended segment of effects or ledger that starts at `from_id`.
create function fencepost.add_segment(parent text, from_id bigint) returns regclass
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    segment text := format('fencepost.%I', parent || '_' || from_id);
begin
    if parent not in ('effects', 'ledger') then
        raise exception 'fencepost.%: not a segmented table', parent;
    end if;
    execute format('create table %s (like fencepost.%I including defaults including constraints including compression)', segment, parent);
    execute format('alter table fencepost.%I attach partition %s for values from (%s) to (maxvalue)', parent, segment, from_id);
    perform fencepost.protect(segment::regclass);
    return segment::regclass;
end $$;

-- A segment has room for 2^36 ids, more than can be drawn in one: its end is reached by moving the identity on to the
-- next segment when its time is over. So the one in use always has room, and the open-ended one is always empty.
create function fencepost.segment_ids() returns bigint
language sql immutable parallel safe as $$ select 68719476736 $$;

-- Gives the open-ended segment that starts at `from_id`, detached and empty, its end, and attaches a new open-ended one.
create function fencepost.attach_segment(parent text, from_id bigint) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    segment  text := format('fencepost.%I', parent || '_' || from_id);
    end_id   bigint := from_id + fencepost.segment_ids();
    leftover name;
begin
    -- What DETACH CONCURRENTLY leaves behind: the old bounds, as a check of every new row.
    for leftover in
        select c.conname from pg_constraint c
        where c.conrelid = segment::regclass and c.contype = 'c'
          and c.conname not in (select p.conname from pg_constraint p where p.conrelid = ('fencepost.' || parent)::regclass)
    loop
        execute format('alter table %s drop constraint %I', segment, leftover);
    end loop;
    execute format('alter table fencepost.%I attach partition %s for values from (%s) to (%s)', parent, segment, from_id, end_id);
    perform fencepost.add_segment(parent, end_id);
end $$;

select fencepost.protect(r) from unnest(array['fencepost.effects', 'fencepost.ledger']::regclass[]) r;

do $$
declare
    parent text;
begin
    foreach parent in array array['effects', 'ledger'] loop
        perform fencepost.add_segment(parent, 0);
        execute format('alter table fencepost.%I detach partition fencepost.%I', parent, parent || '_0');
        perform fencepost.attach_segment(parent, 0);
    end loop;
end $$;

-- Facts about effects whose segment was dropped while a delivery still waited, and facts that come too late.
create table fencepost.ledger_kept_0 (like fencepost.ledger including defaults including constraints);
alter table fencepost.ledger attach partition fencepost.ledger_kept_0 for values from (minvalue) to (0);
select fencepost.protect('fencepost.ledger_kept_0');

-- The shard of a key: leading bytes of a digest, the same on every platform and version.
create function fencepost.shard_of(key text, shards integer) returns smallint
language sql stable parallel safe as $$
    select ((('x' || encode(substr(sha256(convert_to(key, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint) % shards)::smallint
$$;

create function fencepost.shard_of(key text) returns smallint
language sql stable parallel safe set search_path = pg_catalog, pg_temp as $$
    select fencepost.shard_of(key, (select value::int from fencepost.settings where name = 'shards'))
$$;

-- fencepost.doorbell_class: the first half of the advisory lock a sleeping relay holds for each of its shards.
create function fencepost.doorbell_class() returns integer
language sql immutable parallel safe as $$ select 1717923427 $$;

-- Wakes the holder of a shard if it sleeps. A try-lock that succeeds keeps it awake until this transaction ends.
create function fencepost.ring(shard smallint) returns boolean
language sql volatile as $$
    select case when current_setting('fencepost.doorbell', true) = 'off'
                     or pg_try_advisory_xact_lock_shared(fencepost.doorbell_class(), shard) then false
                else pg_notify('fencepost_doorbell', shard::text) is not null end
$$;

-- The timeline being written now. The control file's is the last checkpoint's, which lags behind a promotion.
create function fencepost.wal_timeline() returns integer
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
    return ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer;
end $$;

insert into fencepost.shards (shard)
select s from generate_series(0, (select value::int from fencepost.settings where name = 'shards') - 1) s;

-- Flight 0 of every shard: where reading starts. A missing flight row is an error, never "now".
insert into fencepost.flights (shard, seq, epoch, base, target, last_id, token, closed_at)
select shard, 0, 0, pg_current_snapshot(), pg_current_snapshot(), 0, 'origin', clock_timestamp()
from fencepost.shards;

-- A key's next delivery is released by whoever removes its head: the relay's facts, an operator's skip or resolve.
create function fencepost.release_next() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    update fencepost.parked p
    set state = 'retry', next_attempt_at = clock_timestamp()
    where p.consumer_id = old.consumer_id
      and p.state = 'blocked'
      and p.effect_id = (
          select q.effect_id from fencepost.parked q
          where q.consumer_id = old.consumer_id and q.ordering_key = old.ordering_key
            and not (q.state = 'scheduled' and q.next_attempt_at > clock_timestamp())
          order by q.effect_id limit 1);
    return null;
end $$;

create trigger release_next after delete on fencepost.parked
for each row when (old.ordering_key is not null) execute function fencepost.release_next();

-- Whose history this is; a claim that finds another server or timeline raises the epoch base.
insert into fencepost.history (system_identifier, timeline, log_system)
select system_identifier, fencepost.wal_timeline(), system_identifier from pg_control_system();
