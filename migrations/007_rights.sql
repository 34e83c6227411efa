-- Who may do what. Nothing is granted to PUBLIC; a role gets what its part needs, by name.

create function fencepost.grant_to(role name, "as" text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    functions text;
begin
    functions := case grant_to."as"
        when 'producer' then
            'submit_task(text, jsonb, text, timestamptz, integer), cancel_task(text, text), reopen_task(text, text, boolean), '
            'complete_task(text, bigint, text, jsonb, jsonb), complete_task_no_action(text, bigint, text, text), '
            'record_completion(text, bigint, jsonb, jsonb), emit(jsonb, text)'
        when 'worker' then
            'claim_tasks(text, text[], integer, interval, text[]), heartbeat(text, bigint, text, interval), '
            'complete_task(text, bigint, text, jsonb, jsonb), complete_task_no_action(text, bigint, text, text), '
            'fail_task(text, bigint, text, text, interval), release_task(text, bigint, text, text), worker_failed(text, boolean)'
        when 'reader' then
            'effect_id_of(text), deliveries_of(text)'
        when 'relay' then
            'effect_id_of(text), deliveries_of(text), shard_of(text), ring(smallint), doorbell_class(), wal_timeline(), epoch_base(), '
            'declare_consumer(text, jsonb), subscribe(text, text), cancel_task(text, text), reopen_task(text, text, boolean)'
    end;
    if functions is null then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = format('as: %s is not a part; write producer, worker, reader or relay', coalesce(quote_literal(grant_to."as"), 'null'));
    end if;
    execute format('grant usage on schema fencepost to %I', role);
    execute format('grant execute on function %s to %I', regexp_replace(functions, '(^|, )(?=[a-z_]+\()', '\1fencepost.', 'g'), role);
    if grant_to."as" = 'reader' then
        execute format('grant select on fencepost.completions, fencepost.intended, fencepost.deliveries, fencepost.workers to %I', role);
    elsif grant_to."as" = 'relay' then
        execute format('grant select on all tables in schema fencepost to %I', role);
        execute format(
            'grant insert on fencepost.ledger, fencepost.attempts, fencepost.flights, fencepost.parked, fencepost.lags, fencepost.effects_kept, '
            'fencepost.relays, fencepost.workers, fencepost.alarms, fencepost.orphan_acks, fencepost.early_acks, fencepost.audit_log to %I', role);
        execute format(
            'grant update on fencepost.flights, fencepost.parked, fencepost.lags, fencepost.shards, fencepost.relays, fencepost.workers, '
            'fencepost.consumers, fencepost.alarms, fencepost.early_acks, fencepost.settings, fencepost.history, fencepost.tallies to %I', role);
        -- A start that was written, and whose answer was lost, is written again; a word that is no end is added to its attempt.
        execute format('grant update (relay, ack_raw) on fencepost.attempts to %I', role);
        -- Where reading begins anew, and whether the sequence lies behind a restored log.
        execute format('grant select on sequence fencepost.effects_id_seq to %I', role);
        execute format(
            'grant delete on fencepost.flights, fencepost.parked, fencepost.lags, fencepost.attempts, fencepost.effects_kept, fencepost.relays, fencepost.subscriptions, '
            'fencepost.workers, fencepost.alarms, fencepost.orphan_acks, fencepost.early_acks, fencepost.audit_log, fencepost.tasks, fencepost.task_epochs to %I', role);
    end if;
end $$;

revoke all on all tables in schema fencepost from public;
revoke all on all sequences in schema fencepost from public;
revoke all on all functions in schema fencepost from public;
