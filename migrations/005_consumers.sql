-- Consumers and subscriptions: what `fencepost consumers apply` calls.

-- Refuses what SQL can see is wrong with an entry; the relay checks the rest when it reads it. URLs are never repeated.
create function fencepost.check_spec(name text, spec jsonb) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
    known constant jsonb := '{
        "name": "string", "kind": "string", "url": "string", "exchange": "string", "routing_key": "string", "broker": "string",
        "queue": "string", "ack_timeout": "string", "republishes": "number",
        "ack": "string", "on_ambiguous": "string", "ordering": "string", "topics": "array",
        "secret_file": "string", "secret_env": "string", "previous_secret_file": "string", "previous_secret_env": "string",
        "timeout": "string", "connect_timeout": "string", "concurrency": "number", "rate": "number",
        "pass_headers": "array", "dedup_retain": "string", "definite_statuses": "array"}';
    field record;
    type  text;
    wrong text;
begin
    perform fencepost.check_argument(name ~ '^[A-Za-z0-9_.-]{1,64}$', 'name', 'must be 1 to 64 characters of A-Z a-z 0-9 _ . -');
    perform fencepost.check_argument(jsonb_typeof(spec) = 'object', 'spec', 'must be a JSON object');
    for field in select e.key, e.value from jsonb_each(spec) e loop
        type := jsonb_typeof(field.value);
        wrong := case
            when not known ? field.key then 'unknown field'
            when type <> known ->> field.key then format('must be a JSON %s, not a %s', known ->> field.key, type)
            when field.key = 'name' and field.value #>> '{}' <> name then format('differs from the name given, %s', name)
            when field.key = 'kind' and field.value #>> '{}' not in ('http', 'amqp') then 'write http or amqp'
            when field.key = 'ack' and field.value #>> '{}' not in ('required', 'optional', 'none') then 'write required, optional or none'
            when field.key = 'on_ambiguous' and field.value #>> '{}' not in ('retry', 'hold') then 'write retry or hold'
            when field.key = 'ordering' and field.value #>> '{}' not in ('key', 'none') then 'write key or none'
            when field.key = 'url' and field.value #>> '{}' !~* '^https?://[^/?#]' then 'not an http or https URL with a host'
            when field.key in ('exchange', 'routing_key', 'queue') and octet_length(field.value #>> '{}') > 255 then 'longer than 255 bytes'
            when field.key in ('timeout', 'connect_timeout', 'dedup_retain', 'ack_timeout') and field.value #>> '{}' !~ '^0*[1-9][0-9]* *(ms|s|m|h|d)$'
                then 'not a duration, such as 500ms, 15s, 5m, 2h, 7d'
            when field.key in ('concurrency', 'rate') and (field.value::numeric < 1 or field.value::numeric % 1 <> 0 or field.value::numeric > 4294967295)
                then 'must be a whole number from 1'
            when field.key = 'republishes' and (field.value::numeric < 0 or field.value::numeric % 1 <> 0 or field.value::numeric > 100)
                then 'must be a whole number from 0 to 100'
            when field.key = 'concurrency' and field.value::numeric > 4096 then 'must be at most 4096'
            when field.key in ('topics', 'pass_headers') and field.value @? '$[*] ? (@.type() != "string")' then 'must be an array of strings'
            when field.key = 'definite_statuses' and field.value @? '$[*] ? (@.type() != "number" || @ < 500 || @ > 599)'
                then 'must be statuses from 500 to 599'
        end;
        perform fencepost.check_argument(wrong is null, format('consumer %s, %s', name, left(field.key, 80)), wrong);
    end loop;
    wrong := case
        when not spec ? 'kind' then 'kind: missing; write http or amqp'
        when spec ->> 'kind' = 'http' and not spec ? 'url' then 'url: missing'
        when spec ->> 'kind' = 'http' and spec ?| array['exchange', 'routing_key', 'broker', 'queue', 'ack_timeout', 'republishes']
            then 'exchange, routing_key, broker, queue, ack_timeout and republishes mean nothing for kind http'
        when spec ->> 'kind' = 'amqp' and not spec ?| array['exchange', 'routing_key']
            then 'exchange: missing; or give a routing_key for the default exchange'
        when spec ->> 'kind' = 'amqp' and spec ?| array['url', 'definite_statuses', 'pass_headers', 'secret_file', 'secret_env', 'previous_secret_file', 'previous_secret_env']
            then 'url, definite_statuses, pass_headers and secrets mean nothing for kind amqp'
        when spec ->> 'ack' = 'none' and not spec ? 'on_ambiguous'
            then 'on_ambiguous: with ack none there is no default; write retry (a duplicate is harmless) or hold (an operator decides)'
        when spec ? 'secret_file' and spec ? 'secret_env' then 'give secret_file or secret_env, not both'
        when spec ? 'previous_secret_file' and spec ? 'previous_secret_env' then 'give previous_secret_file or previous_secret_env, not both'
    end;
    perform fencepost.check_argument(wrong is null, format('consumer %s', name), wrong);
end $$;

-- Adds a consumer or changes the one of this name, and subscribes it to the topics its spec lists; topics it no longer
-- lists stay here (`fencepost consumers apply` ends those). Declaring a retired name takes it back into service.
create function fencepost.declare_consumer(name text, spec jsonb) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    entry jsonb;
    id    integer;
    t     text;
begin
    -- An optional field may be sent as null, as clients that serialise a struct do.
    entry := jsonb_strip_nulls(declare_consumer.spec);
    perform fencepost.check_spec(declare_consumer.name, entry);
    entry := entry || jsonb_build_object('name', declare_consumer.name);
    insert into fencepost.consumers as c (name, spec) values (declare_consumer.name, entry)
    on conflict on constraint consumers_name_key do update
    set spec = excluded.spec, retired_at = null, updated_at = clock_timestamp()
    where c.spec <> excluded.spec or c.retired_at is not null
    returning c.consumer_id into id;
    if found then
        perform pg_notify('fencepost_consumers', '');
    else
        select c.consumer_id into strict id from fencepost.consumers c where c.name = declare_consumer.name;
    end if;
    for t in select jsonb_array_elements_text(entry -> 'topics') loop
        perform fencepost.subscribe(t, declare_consumer.name);
    end loop;
    return id;
end $$;

create function fencepost.subscribe(topic text, consumer text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    id integer;
begin
    perform fencepost.check_argument(subscribe.topic <> '' and octet_length(subscribe.topic) <= 256, 'topic', 'must be 1 to 256 bytes');
    select c.consumer_id into id from fencepost.consumers c where c.name = subscribe.consumer and c.retired_at is null;
    if not found then
        raise exception using errcode = 'OB002', message = format('no consumer is named %s', coalesce(quote_literal(left(subscribe.consumer, 80)), 'null'));
    end if;
    insert into fencepost.subscriptions (topic, consumer_id) values (subscribe.topic, id) on conflict do nothing;
    if found then
        perform pg_notify('fencepost_consumers', '');
    end if;
end $$;
