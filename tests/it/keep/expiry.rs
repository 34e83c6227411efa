//! Rows that expire: each table bounded, and nothing gone that is needed.

use fencepost::store::inspect::leases;

use super::{Rounds, emit, ids, keep_for, two_consumers};
use crate::support::db::TestDb;

#[tokio::test]
async fn old_rows_go_and_what_is_needed_stays() {
    let db = TestDb::new().await;
    let c = db.client().await;
    two_consumers(&c).await;
    let waiting = emit(&c, "waiting", ("consumer", "a")).await;
    emit(&c, "logged", ("consumer", "a")).await;
    keep_for(&c, "1 day", "1 day").await;
    c.batch_execute(&format!(
        "insert into fencepost.flights (shard, seq, epoch, base, target, last_id, token, closed_at)
         select 3, n, 0, pg_current_snapshot(), pg_current_snapshot(), 0, case when n <> 2 then 'done' end,
                case when n <> 2 then clock_timestamp() - interval '2 days' end
         from generate_series(1, 9) n;
         insert into fencepost.lags (shard, consumer_id, from_seq, to_seq) values (3, 1, 6, 7);
         update fencepost.flights set closed_at = clock_timestamp() - interval '2 days' where seq = 0;
         insert into fencepost.attempts (effect_id, consumer_id, attempt, ended, at, token)
         select e, 1, 1, true, clock_timestamp() - interval '2 days', 'ambiguous' from unnest(array[{waiting}, -1]) e;
         insert into fencepost.parked (effect_id, consumer_id, shard, state) select id, 1, shard, 'dead' from fencepost.effects where id = {waiting};
         insert into fencepost.tasks (task_id, kind, status, claims_left, token, lease_epoch, ended_at)
         values ('gone', 'k', 'failed', 0, 'failed', 2, clock_timestamp() - interval '2 days'),
                ('recent', 'k', 'failed', 0, 'failed', 2, clock_timestamp());
         insert into fencepost.tasks (task_id, kind, status, claims_left, lease_epoch) values ('ready', 'k', 'ready', 3, 4);
         insert into fencepost.task_epochs (task_id, lease_epoch, token, ended_at)
         select t, e, 'lost', clock_timestamp() - interval '2 days' from unnest(array['gone', 'ready']) t, unnest(array[1, 3, 4]) e where e < 4 or t = 'ready';
         update fencepost.tasks set ended_at = clock_timestamp() - interval '2 days' where task_id in ('waiting', 'logged');
         insert into fencepost.audit_log (at, action, object, reason)
         values (clock_timestamp() - interval '2 days', 'x', 'x', 'x'), (clock_timestamp() - interval '91 days', 'y', 'y', 'y');
         insert into fencepost.alarms (name, object, detail, resolved_at) values
         ('conflict', 'old', 'd', clock_timestamp() - interval '2 days'), ('conflict', 'unresolved', 'd', null);
         insert into fencepost.orphan_acks (at, why, properties) values (clock_timestamp() - interval '2 days', 'w', '{{}}'), (clock_timestamp(), 'w', '{{}}');
         insert into fencepost.relays (relay, name, version, token, at) values
         (gen_random_uuid(), 'old', '0', 'idle', clock_timestamp() - interval '2 days'), (gen_random_uuid(), 'new', '0', 'idle', clock_timestamp());
         insert into fencepost.workers (owner, token, at) values ('old', 'idle', clock_timestamp() - interval '2 days'), ('new', 'idle', clock_timestamp());"
    ))
    .await
    .unwrap();
    Rounds::new(&db).await.round().await;

    let flights = "select seq from fencepost.flights where shard = 3 order by seq";
    assert_eq!(ids(&c, flights).await, [2, 6, 7, 8, 9], "open, in a lag range or after it, and the newest");
    assert_eq!(ids(&c, "select seq from fencepost.flights where shard <> 3").await, [0; 7], "each shard's newest");
    assert_eq!(ids(&c, "select effect_id from fencepost.attempts").await, [waiting]);
    let text =
        async |sql: &str| -> Vec<String> { c.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect() };
    assert_eq!(text("select task_id from fencepost.tasks order by 1").await, ["logged", "ready", "recent", "waiting"]);
    assert_eq!(text("select task_id || lease_epoch from fencepost.task_epochs").await, ["ready4"]);
    assert_eq!(text("select action from fencepost.audit_log where action in ('x', 'y')").await, ["x"]);
    assert_eq!(text("select object from fencepost.alarms").await, ["unresolved"]);
    assert_eq!(text("select name from fencepost.relays").await, ["new"]);
    assert_eq!(text("select owner from fencepost.workers").await, ["new"]);
    assert_eq!(ids(&c, "select id from fencepost.orphan_acks").await, [2]);
}

#[tokio::test]
async fn what_is_counted_for_ever_does_not_fall_when_its_rows_go() {
    let db = TestDb::new().await;
    let mut c = db.client().await;
    keep_for(&c, "1 day", "1 day").await;
    c.batch_execute(
        "insert into fencepost.task_epochs (task_id, lease_epoch, token, ended_at)
         select 't', n, case when n <= 3 then 'lost' else 'released' end, clock_timestamp() - interval '1 day' * (n % 3) * 2
         from generate_series(1, 9) n;
         insert into fencepost.workers (owner, token, refused, at)
         values ('old', 'failed', 4, clock_timestamp() - interval '2 days'), ('new', 'failed', 5, clock_timestamp())",
    )
    .await
    .unwrap();
    let mut rounds = Rounds::new(&db).await;
    for _ in 0..3 {
        let tx = c.build_transaction().read_only(true).start().await.unwrap();
        let leases = leases::load(&tx).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!((leases.lost, leases.refused), (3, 9));
        rounds.round().await;
    }
    let left =
        "select (select count(*) from fencepost.task_epochs) union all select (select count(*) from fencepost.workers)";
    assert_eq!(ids(&c, left).await, [3, 1], "rows did go");
}
