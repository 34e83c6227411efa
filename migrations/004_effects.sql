-- Effects: read from the producer's JSON, routed, frozen, and stored with the completion they belong to.

create function fencepost.malformed(index integer, field text, wrong text) returns void
language plpgsql immutable as $$
begin
    raise exception using
        errcode = 'OB004',
        message = format('effects[%s].%s: %s', index, field, wrong);
end $$;

create function fencepost.check_length(index integer, field text, value text, most integer) returns void
language plpgsql immutable as $$
begin
    if octet_length(value) > most then
        raise exception using
            errcode = 'OB005',
            message = format('effects[%s].%s: %s bytes, the limit is %s', index, field, octet_length(value), most);
    end if;
end $$;

-- Names that are ours or the protocols': a producer's header never overrides them, whatever its spelling.
create function fencepost.is_reserved_header(name text) returns boolean
language sql immutable parallel safe as $$
    select lower(name) ~ '^(host|content-(length|type|encoding|digest)|transfer-encoding|connection|keep-alive|te|trailer|upgrade|expect|user-agent|accept-encoding|date|via|cookie|authorization|idempotency-key|idempotent-replayed|traceparent|tracestate|cc|bcc|x-delay|x-deduplication-header|x-match|(proxy|webhook|outbox|x-death|x-first-death|x-last-death|x-meta)(-.*)?)$'
$$;

create function fencepost.check_headers(index integer, headers jsonb, most integer) returns void
language plpgsql stable as $$
declare
    h     record;
    bytes integer := 0;
    names text[] := '{}';
begin
    if jsonb_typeof(headers) <> 'object' then
        perform fencepost.malformed(index, 'headers', 'must be an object of strings');
    end if;
    for h in select e.key, jsonb_typeof(e.value) as type, e.value #>> '{}' as value from jsonb_each(headers) e loop
        if h.key !~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$' then
            perform fencepost.malformed(index, format('headers[%s]', to_json(left(h.key, 80))), 'not a header name (RFC 9110 token)');
        elsif octet_length(h.key) > 64 then
            perform fencepost.check_length(index, format('headers[%s]', to_json(left(h.key, 80))), h.key, 64);
        elsif fencepost.is_reserved_header(h.key) then
            perform fencepost.malformed(index, format('headers[%s]', to_json(h.key)), 'this name is reserved');
        elsif h.type <> 'string' then
            perform fencepost.malformed(index, format('headers[%s]', to_json(h.key)), format('must be a string, not a JSON %s', h.type));
        elsif h.value !~ '^[\t -~]*$' then
            perform fencepost.malformed(index, format('headers[%s]', to_json(h.key)), 'must be printable ASCII, without line breaks');
        elsif lower(h.key) = any (names) then
            perform fencepost.malformed(index, format('headers[%s]', to_json(h.key)), 'given twice (case does not distinguish names)');
        end if;
        names := names || lower(h.key);
        bytes := bytes + octet_length(h.key) + octet_length(h.value);
    end loop;
    if cardinality(names) > 64 then
        raise exception using errcode = 'OB005', message = format('effects[%s].headers: %s headers, the limit is 64', index, cardinality(names));
    end if;
    perform fencepost.check_size(format('effects[%s].headers', index), bytes, most, 'headers_max_bytes');
end $$;

-- "<field>_after"/"<field>_at" is a moment with an offset, "<field>_in" an interval from now. Null where neither is given.
create function fencepost.read_moment(index integer, at_field text, at_text text, in_field text, in_text text) returns timestamptz
language plpgsql volatile as $$
declare
    moment timestamptz;
begin
    if at_text is not null and in_text is not null then
        perform fencepost.malformed(index, in_field, format('give %s or %s, not both', at_field, in_field));
    elsif at_text is not null then
        if at_text !~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]{1,9})?)?([Zz]|[+-][0-9]{2}(:?[0-9]{2})?)$' then
            perform fencepost.malformed(index, at_field, format('%s is not a time with offset, such as 2030-01-31T08:00:00Z', quote_literal(left(at_text, 80))));
        end if;
        begin
            return at_text::timestamptz;
        exception when data_exception then
            perform fencepost.malformed(index, at_field, sqlerrm);
        end;
    elsif in_text is not null then
        begin
            if in_text::interval < interval '0' then
                perform fencepost.malformed(index, in_field, 'must not be negative');
            end if;
            moment := clock_timestamp() + in_text::interval;
        exception when data_exception then
            perform fencepost.malformed(index, in_field, sqlerrm);
        end;
        if not isfinite(moment) then
            perform fencepost.malformed(index, in_field, 'must be finite');
        end if;
        return moment;
    end if;
    return null;
end $$;

create function fencepost.read_payload(index integer, effect jsonb, out payload bytea, out content_type text)
language plpgsql stable as $$
declare
    verbatim text := effect ->> 'payload_text';
    encoded  text := effect ->> 'payload_base64';
    given    integer := (verbatim is not null)::int + (encoded is not null)::int + (effect -> 'payload' <> 'null' and effect ? 'payload')::int;
begin
    if given > 1 then
        perform fencepost.malformed(index, 'payload', 'give exactly one of payload, payload_text, payload_base64');
    elsif verbatim is not null then
        payload := convert_to(verbatim, 'UTF8');
        content_type := 'text/plain; charset=utf-8';
    elsif encoded is not null then
        begin
            payload := decode(encoded, 'base64');
        exception when data_exception then
            perform fencepost.malformed(index, 'payload_base64', sqlerrm);
        end;
        content_type := 'application/octet-stream';
    elsif effect ? 'payload' then
        payload := convert_to((effect -> 'payload')::text, 'UTF8');
        content_type := 'application/json';
    else
        perform fencepost.malformed(index, 'payload', 'missing: give exactly one of payload, payload_text, payload_base64');
    end if;
end $$;

-- The consumers of an effect, in order of their ids. A topic nobody subscribes to gives an empty array.
create function fencepost.route(index integer, consumer text, topic text, most integer) returns integer[]
language plpgsql stable as $$
declare
    targets integer[];
begin
    if consumer is not null and topic is null then
        select array[c.consumer_id] into targets from fencepost.consumers c where c.name = consumer and c.retired_at is null;
        if not found then
            raise exception using
                errcode = 'OB002',
                message = format('effects[%s].consumer: no consumer is named %s', index, quote_literal(left(consumer, 80))),
                detail = case when exists (select from fencepost.consumers c where c.name = consumer)
                              then 'It has been retired.' else 'None was ever declared under this name.' end;
        end if;
    elsif topic is not null and consumer is null then
        if topic = '' then
            perform fencepost.malformed(index, 'topic', 'must not be empty');
        end if;
        perform fencepost.check_length(index, 'topic', topic, 256);
        select coalesce(array_agg(c.consumer_id order by c.consumer_id), '{}') into targets
        from fencepost.subscriptions s join fencepost.consumers c on c.consumer_id = s.consumer_id and c.retired_at is null
        where s.topic = route.topic;
        if cardinality(targets) > most then
            raise exception using
                errcode = 'OB005',
                message = format('effects[%s].topic: %s consumers, the limit is %s', index, cardinality(targets), most),
                hint = 'The limit is targets_max in fencepost.settings.';
        end if;
    else
        perform fencepost.malformed(index, 'consumer', 'give exactly one of consumer and topic');
    end if;
    return targets;
end $$;

-- Names the first thing wrong with the fields of an effect as such.
create function fencepost.malformed_fields(index integer, effect jsonb, known text[]) returns void
language plpgsql stable as $$
declare
    field text;
    type  text;
begin
    if jsonb_typeof(effect) <> 'object' then
        raise exception using errcode = 'OB004', message = format('effects[%s]: must be an object, not a JSON %s', index, jsonb_typeof(effect));
    end if;
    select k into field from jsonb_object_keys(effect - known) k limit 1;
    if found then
        perform fencepost.malformed(index, left(field, 80), format('unknown field; known are %s', array_to_string(known, ', ')));
    end if;
    select e.key, jsonb_typeof(e.value) into field, type from jsonb_each(effect) e
    where e.key not in ('payload', 'headers') and jsonb_typeof(e.value) not in ('string', 'null')
    limit 1;
    perform fencepost.malformed(index, field, format('must be a string, not a JSON %s', type));
end $$;

-- A short text that travels in a header: printable ASCII. Inlined where it is called.
create function fencepost.is_label(value text) returns boolean
language sql immutable parallel safe as $$
    select octet_length(value) <= 255 and value ~ '^[!-~]([ -~]*[!-~])?$'
$$;

create function fencepost.read_label(index integer, field text, value text) returns text
language plpgsql immutable as $$
begin
    perform fencepost.check_length(index, field, value, 255);
    if not fencepost.is_label(value) then
        perform fencepost.malformed(index, field, 'must be printable ASCII, not empty, without spaces at its ends');
    end if;
    return value;
end $$;

-- One object of the producer's array as the row it becomes, or an error that names index and field. JSON nulls count
-- as absent, so that clients may send their optional fields as they are; only a lone payload may be null.
-- The first use of an expression in a transaction costs far more than its evaluation: what most effects do not have is
-- skipped in groups.
create type fencepost.effect_draft as (
    deliver_after timestamptz, expires_at timestamptz, size integer, shard smallint, targets integer[],
    topic text, type text, schema_version text, content_type text, ordering_key text,
    traceparent text, amends text, headers jsonb, payload bytea
);

create function fencepost.read_effect(effect jsonb, index integer, task text, lim fencepost.limits) returns fencepost.effect_draft
language plpgsql stable as $$
declare
    known constant text[] := array['consumer', 'topic', 'payload', 'payload_text', 'payload_base64', 'content_type', 'type', 'schema_version',
        'headers', 'ordering_key', 'traceparent', 'amends', 'deliver_after', 'deliver_in', 'expires_at', 'expires_in'];
    body     record;
    verbatim text := effect ->> 'payload_text';
    e        fencepost.effect_draft;
begin
    if jsonb_typeof(effect) <> 'object' or effect - known <> '{}'
       or effect - array['payload', 'headers'] @? 'strict $.* ? (@.type() != "string" && @.type() != "null")' then
        perform fencepost.malformed_fields(index, effect, known);
    end if;

    if not effect ? 'topic' then
        select array[c.consumer_id] into e.targets from fencepost.consumers c where c.name = effect ->> 'consumer' and c.retired_at is null;
    end if;
    if e.targets is null then
        e.topic := effect ->> 'topic';
        e.targets := fencepost.route(index, effect ->> 'consumer', e.topic, lim.targets);
    end if;

    if verbatim is not null and not effect ?| array['payload', 'payload_base64'] then
        e.payload := convert_to(verbatim, 'UTF8');
        e.content_type := 'text/plain; charset=utf-8';
    elsif effect ? 'payload' and not effect ?| array['payload_text', 'payload_base64'] then
        e.payload := convert_to((effect -> 'payload')::text, 'UTF8');
        e.content_type := 'application/json';
    else
        body := fencepost.read_payload(index, effect);
        e.payload := body.payload;
        e.content_type := body.content_type;
    end if;
    e.size := octet_length(e.payload);
    if e.size > lim.payload then
        perform fencepost.check_size(format('effects[%s].payload', index), e.size, lim.payload, 'payload_max_bytes');
    end if;

    e.type := effect ->> 'type';
    if not fencepost.is_label(e.type) then
        perform fencepost.read_label(index, 'type', e.type);
    end if;

    e.ordering_key := task;
    if effect ?| array['content_type', 'schema_version', 'ordering_key', 'traceparent', 'amends', 'headers'] then
        e.schema_version := fencepost.read_label(index, 'schema_version', effect ->> 'schema_version');
        e.content_type := coalesce(effect ->> 'content_type', e.content_type);
        perform fencepost.check_length(index, 'content_type', e.content_type, 255);
        if e.content_type !~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+/[!#$%&''*+.^_`|~0-9A-Za-z-]+( *;[ -~]*)?$' then
            perform fencepost.malformed(index, 'content_type', 'not a media type, such as application/json');
        end if;
        e.ordering_key := coalesce(effect ->> 'ordering_key', task);
        perform fencepost.check_length(index, 'ordering_key', e.ordering_key, 512);
        if e.ordering_key = '' then
            perform fencepost.malformed(index, 'ordering_key', 'must not be empty');
        end if;
        e.traceparent := effect ->> 'traceparent';
        if e.traceparent !~ '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$' or e.traceparent ~ '^(ff|..-0{32}|.{35}-0{16})' then
            perform fencepost.malformed(index, 'traceparent', 'not a W3C traceparent, such as 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01');
        end if;
        e.amends := effect ->> 'amends';
        if e.amends !~ '^[A-Za-z0-9_-]+:[1-9][0-9]{0,18}(:([2-9]|[1-9][0-9]{1,8}))?$' or octet_length(split_part(e.amends, ':', 1)) > 128
           or split_part(e.amends, ':', 2)::numeric > 9223372036854775807 then
            perform fencepost.malformed(index, 'amends', 'not an idempotency key: <task_id>:<lease_epoch> or <task_id>:<lease_epoch>:<n>');
        end if;
        e.headers := nullif(nullif(effect -> 'headers', 'null'), '{}');
        if e.headers is not null then
            perform fencepost.check_headers(index, e.headers, lim.headers);
        end if;
    end if;
    e.shard := fencepost.shard_of(e.ordering_key, lim.shards);

    if effect ?| array['deliver_after', 'deliver_in', 'expires_at', 'expires_in'] then
        e.deliver_after := fencepost.read_moment(index, 'deliver_after', effect ->> 'deliver_after', 'deliver_in', effect ->> 'deliver_in');
        e.expires_at := fencepost.read_moment(index, 'expires_at', effect ->> 'expires_at', 'expires_in', effect ->> 'expires_in');
        if e.expires_at <= e.deliver_after then
            perform fencepost.malformed(index, 'expires_at', 'the effect would expire before it is due');
        end if;
    end if;
    return e;
end $$;

-- Ids for a completion's effects, ascending, or OB004 where there is no array of effects to store.
create function fencepost.draw_ids(effects jsonb) returns bigint[]
language plpgsql volatile as $$
declare
    most integer := (select l.effects from fencepost.limits l);
    n    integer;
begin
    if effects is null or jsonb_typeof(effects) <> 'array' or effects = '[]' then
        raise exception using
            errcode = 'OB004',
            message = 'effects: must be a non-empty JSON array of objects',
            hint = 'A completion with nothing to say says so with complete_task_no_action.';
    end if;
    n := jsonb_array_length(effects);
    if n > most then
        raise exception using
            errcode = 'OB005',
            message = format('effects: %s effects, the limit is %s', n, most),
            hint = 'The limit is effects_max in fencepost.settings.';
    end if;
    return array(select nextval('fencepost.effects_id_seq') from generate_series(1, n));
end $$;

-- The same; inlined where it is called, so that a single effect costs no call.
create function fencepost.effect_ids(effects jsonb) returns bigint[]
language sql volatile as $$
    select case when case jsonb_typeof(effects) when 'array' then jsonb_array_length(effects) end = 1
                then array[nextval('fencepost.effects_id_seq')]
                else fencepost.draw_ids(effects) end
$$;

-- One INSERT for the whole array, and the doorbell once per shard: rung to be heard at commit, hence in any order. Gives the
-- number of effects. (Here and in what it calls, a value is assigned where `perform` would be another query.)
create function fencepost.store_each(task text, epoch bigint, effects jsonb, ids bigint[]) returns integer
language plpgsql volatile as $$
declare
    lim      fencepost.limits;
    draft    fencepost.effect_draft;
    drafts   fencepost.effect_draft[];
    rung     smallint[];
    rang     boolean;
    unrouted bigint[];
begin
    select l.* into lim from fencepost.limits l;
    for i in 1 .. cardinality(ids) loop
        draft := fencepost.read_effect(effects -> (i - 1), i - 1, task, lim);
        drafts[i] := draft;
        if draft.targets = '{}' then
            unrouted := unrouted || ids[i];
        end if;
        if draft.shard = any (rung) then
            continue;
        end if;
        rang := fencepost.ring(draft.shard);
        rung := rung || draft.shard;
    end loop;
    insert into fencepost.effects (
        id, deliver_after, expires_at, lease_epoch, position, size, shard, targets, task_id, topic, type,
        schema_version, content_type, ordering_key, traceparent, amends, headers, sha256, payload)
    overriding system value
    select ids[e.position], e.deliver_after, e.expires_at, epoch, e.position, e.size, e.shard, e.targets, task, e.topic, e.type,
           e.schema_version, e.content_type, e.ordering_key, e.traceparent, e.amends, e.headers, sha256(e.payload), e.payload
    from unnest(drafts) with ordinality e (
        deliver_after, expires_at, size, shard, targets, topic, type, schema_version, content_type, ordering_key,
        traceparent, amends, headers, payload, position);
    if unrouted is not null then
        insert into fencepost.ledger (effect_id, consumer_id, token, attempt)
        select u, 0, 'unrouted', 0 from unnest(unrouted) u;
    end if;
    return cardinality(ids);
end $$;

-- The same, with a short way for what most completions intend: one effect for one consumer, nothing but a payload and
-- perhaps a type. It decides only that nothing is wrong; whatever it is not sure of goes to `store_each`, which names it.
-- (Few expressions and one query less: with many producers' sessions on few cores each costs what it takes to fetch it
-- from memory.)
create function fencepost.store_effects(task text, epoch bigint, effects jsonb, ids bigint[]) returns integer
language plpgsql volatile as $$
declare
    effect  jsonb := case when cardinality(ids) = 1 then effects -> 0 end;
    label   text := effect ->> 'type';
    targets integer[];
    most    integer;
    shards  integer;
    body    bytea;
    shard   smallint;
    rang    boolean;
begin
    if jsonb_typeof(effect) is distinct from 'object' or effect - array['consumer', 'payload', 'payload_text', 'type'] <> '{}'
       or jsonb_typeof(effect -> 'consumer') is distinct from 'string' or effect ? 'payload' = effect ? 'payload_text'
       or jsonb_typeof(effect -> 'payload_text') <> 'string' or jsonb_typeof(effect -> 'type') <> 'string'
       or not fencepost.is_label(label)
    then
        return fencepost.store_each(task, epoch, effects, ids);
    end if;
    select array[c.consumer_id], l.payload, l.shards into targets, most, shards
    from fencepost.limits l, fencepost.consumers c
    where c.name = effect ->> 'consumer' and c.retired_at is null;
    body := convert_to(coalesce(effect ->> 'payload_text', (effect -> 'payload')::text), 'UTF8');
    if octet_length(body) <= most is not true then
        return fencepost.store_each(task, epoch, effects, ids);
    end if;
    shard := fencepost.shard_of(task, shards);
    rang := fencepost.ring(shard);
    insert into fencepost.effects (
        id, lease_epoch, position, size, shard, targets, task_id, type, content_type, ordering_key, sha256, payload)
    overriding system value
    values (ids[1], epoch, 1, octet_length(body), shard, targets, task, label,
            case when effect ? 'payload' then 'application/json' else 'text/plain; charset=utf-8' end, task, sha256(body), body);
    return 1;
end $$;

create function fencepost.complete_task(task_id text, lease_epoch bigint, owner text, effects jsonb, result jsonb default null)
returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    ids bigint[] := fencepost.effect_ids(complete_task.effects);
begin
    if complete_task.result is not null then
        perform fencepost.check_task_size('result', complete_task.result);
    end if;
    update fencepost.tasks t
    set status = 'completed', token = 'effects', late = t.lease_expires_at < clock_timestamp(), ended_at = clock_timestamp(),
        result = complete_task.result,
        first_effect_id = ids[1], last_effect_id = ids[cardinality(ids)], effect_count = cardinality(ids)
    where t.task_id = complete_task.task_id and t.status = 'running'
      and t.lease_epoch = complete_task.lease_epoch and t.owner = complete_task.owner;
    if not found then
        perform fencepost.refuse(complete_task.task_id, complete_task.lease_epoch, complete_task.owner, array['effects', 'no_action']);
    end if;
    return fencepost.store_effects(complete_task.task_id, complete_task.lease_epoch, complete_task.effects, ids);
end $$;

-- A completion of an epoch nobody leased here. 0: the task is known and may not complete so. `emit` takes new ids only.
create function fencepost.store_completion(task text, epoch bigint, kind text, effects jsonb, result jsonb) returns integer
language plpgsql volatile as $$
#variable_conflict use_column
declare
    ids bigint[] := fencepost.effect_ids(store_completion.effects);
begin
    if store_completion.result is not null then
        perform fencepost.check_task_size('result', store_completion.result);
    end if;
    insert into fencepost.tasks as t (
        task_id, kind, status, lease_epoch, claims_left, token, result, first_effect_id, last_effect_id, effect_count, ended_at)
    values (store_completion.task, store_completion.kind, 'completed', store_completion.epoch, 0, 'effects', store_completion.result,
            ids[1], ids[cardinality(ids)], cardinality(ids), clock_timestamp())
    on conflict on constraint tasks_pkey do update
    set status = 'completed', lease_epoch = excluded.lease_epoch, token = 'effects', result = excluded.result, late = false,
        first_effect_id = excluded.first_effect_id, last_effect_id = excluded.last_effect_id,
        effect_count = excluded.effect_count, ended_at = excluded.ended_at
    where t.status = 'ready' and t.lease_epoch < excluded.lease_epoch and excluded.kind <> 'emitted';
    if not found then
        return 0;
    end if;
    return fencepost.store_effects(store_completion.task, store_completion.epoch, store_completion.effects, ids);
end $$;

create function fencepost.record_completion(task_id text, lease_epoch bigint, effects jsonb, result jsonb default null)
returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    stored integer;
    t      record;
begin
    perform fencepost.check_argument(record_completion.task_id is not null, 'task_id', 'must not be null');
    perform fencepost.check_argument(record_completion.lease_epoch between 1 and 1::bigint << 62, 'lease_epoch', 'must be an integer from 1 to 2^62');
    stored := fencepost.store_completion(record_completion.task_id, record_completion.lease_epoch, 'recorded',
                               record_completion.effects, record_completion.result);
    if stored > 0 then
        return stored;
    end if;
    -- Any second completion is OB003, whatever its epoch; a re-opened epoch keeps its word in task_epochs.
    select k.lease_epoch, k.token into t
    from fencepost.tasks k where k.task_id = record_completion.task_id and k.token in ('effects', 'no_action');
    if not found then
        perform fencepost.refuse(record_completion.task_id, record_completion.lease_epoch, null, array['effects', 'no_action']);
    end if;
    raise exception using
        errcode = 'OB003',
        message = format('task %s has already completed under epoch %s: %s', quote_literal(record_completion.task_id), t.lease_epoch, t.token),
        hint = 'After a COMMIT whose answer was lost this means that it had committed, if the epochs are equal.';
end $$;

create function fencepost.emit(effects jsonb, task_id text default null) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    id text := coalesce(emit.task_id, fencepost.new_task_id());
begin
    if fencepost.store_completion(id, 1, 'emitted', emit.effects, null) > 0 then
        return id;
    end if;
    if exists (select from fencepost.tasks t where t.task_id = id and t.lease_epoch = 1 and t.token in ('effects', 'no_action')) then
        perform fencepost.refuse(id, 1, null, array['effects', 'no_action']);
    end if;
    raise exception using
        errcode = 'OB007',
        message = format('task %s exists already', quote_literal(id)),
        hint = 'emit completes a new task id. Leave task_id out, or use record_completion with a higher epoch.';
end $$;

-- Whether a delivery of the task, under whatever epoch, has no terminal fact yet.
create function fencepost.task_waits(task text) returns boolean
language sql stable as $$
    select exists (
        select
        from (select t.first_effect_id, t.last_effect_id from fencepost.tasks t where t.task_id = task
              union all
              select e.first_effect_id, e.last_effect_id from fencepost.task_epochs e where e.task_id = task) c
        cross join lateral (
            select f.id, f.targets from fencepost.effects f
            where f.id between c.first_effect_id and c.last_effect_id and f.task_id = task
            union all
            select f.id, f.targets from fencepost.effects_kept f
            where f.id between c.first_effect_id and c.last_effect_id and f.task_id = task
        ) f
        cross join lateral unnest(f.targets) d (consumer_id)
        where not exists (select from fencepost.ledger l where l.effect_id = f.id and l.consumer_id = d.consumer_id)
    )
$$;

create function fencepost.reopen_task(task_id text, reason text, force boolean default false) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    t     record;
    waits boolean;
begin
    perform fencepost.check_argument(reopen_task.reason <> '', 'reason', 'must say why the task is run again');
    select k.status, k.lease_epoch into t from fencepost.tasks k where k.task_id = reopen_task.task_id for update;
    if not found then
        perform fencepost.refuse(reopen_task.task_id, null, null, array[]::text[]);
    elsif t.status not in ('completed', 'failed') then
        raise exception using
            errcode = 'object_not_in_prerequisite_state',
            message = format('task %s is %s: only a task that has ended can be re-opened', quote_literal(reopen_task.task_id), t.status);
    end if;
    waits := fencepost.task_waits(reopen_task.task_id);
    if waits and reopen_task.force is not true then
        raise exception using
            errcode = 'object_not_in_prerequisite_state',
            message = format('a delivery of task %s still waits', quote_literal(reopen_task.task_id)),
            hint = 'Let it end, or resolve or skip it; force => true runs the task again beside it, and is audited.';
    end if;
    insert into fencepost.task_epochs (task_id, lease_epoch, owner, token, reason, late, first_effect_id, last_effect_id, effect_count, ended_at)
    select k.task_id, k.lease_epoch, k.owner, k.token, k.reason, k.late, k.first_effect_id, k.last_effect_id, k.effect_count, k.ended_at
    from fencepost.tasks k where k.task_id = reopen_task.task_id;
    update fencepost.tasks k
    set status = 'ready', owner = null, lease_expires_at = null, run_at = clock_timestamp(), claims_left = k.max_claims,
        token = null, reason = null, late = false, result = null,
        first_effect_id = null, last_effect_id = null, effect_count = 0, ended_at = null
    where k.task_id = reopen_task.task_id;
    insert into fencepost.audit_log (action, object, reason, detail)
    values ('reopen_task', reopen_task.task_id, reopen_task.reason,
            jsonb_build_object('epoch', t.lease_epoch, 'force', reopen_task.force is true, 'waiting', waits));
end $$;
