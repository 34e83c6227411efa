//! Where history may have been rewound, an epoch is never issued twice.

use super::{billing, one, rows};

const BASE: i64 = 1 << 20;

/// Another timeline or another server than recorded: what a failover, a restore or a copy leaves behind.
#[tokio::test(flavor = "multi_thread")]
async fn another_history_raises_the_base_once_for_all() {
    let (db, c) = billing().await;
    c.batch_execute("select fencepost.submit_task('k') from generate_series(1, 40)").await.unwrap();
    assert_eq!(rows(&c, "select lease_epoch from fencepost.claim_tasks('w', max_tasks => 2)").await, ["1", "1"]);

    c.batch_execute("update fencepost.history set timeline = timeline + 1").await.unwrap();
    let mut racing = Vec::new();
    for _ in 0..8 {
        let client = db.client().await;
        racing.push(tokio::spawn(
            async move { rows(&client, "select lease_epoch from fencepost.claim_tasks('w')").await },
        ));
    }
    for claim in racing {
        assert_eq!(claim.await.unwrap(), [BASE.to_string()]);
    }
    assert_eq!(
        one(&c, "select epoch_base, timeline = fencepost.wal_timeline() from fencepost.history").await,
        format!("{BASE}|t")
    );

    c.batch_execute("update fencepost.history set system_identifier = system_identifier - 1").await.unwrap();
    let id = one(&c, "select fencepost.submit_task('k')").await;
    one(&c, &format!("select fencepost.cancel_task('{id}', 'r')")).await;
    assert_eq!(
        one(&c, &format!("select lease_epoch from fencepost.completions where task_id = '{id}'")).await,
        (2 * BASE).to_string()
    );
}

/// A task whose epoch is above the base goes on counting by one.
#[tokio::test]
async fn epochs_above_the_base_go_on() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 't'); update fencepost.history set epoch_base = 5")
        .await
        .unwrap();
    let next = "select lease_epoch from fencepost.claim_tasks('w', lease => '1 microsecond')";
    for epoch in ["5", "6", "7"] {
        assert_eq!(one(&c, next).await, epoch);
    }
}

#[tokio::test]
async fn a_claim_that_rolls_back_leaves_the_base_to_the_next() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.submit_task('k'); update fencepost.history set timeline = timeline + 1")
        .await
        .unwrap();
    c.batch_execute("begin; select fencepost.claim_tasks('w'); rollback").await.unwrap();
    assert_eq!(one(&c, "select epoch_base from fencepost.history").await, "0");
    assert_eq!(rows(&c, "select lease_epoch from fencepost.claim_tasks('w')").await, [BASE.to_string()]);
}
