//! `docs/producers.md`: its SQL is run in order, as one reader would.

use super::rows;
use crate::support::db::TestDb;

const GUIDE: &str = include_str!("../../../docs/producers.md");

#[tokio::test]
async fn the_guide_runs_as_written() {
    let db = TestDb::new().await;
    let c = db.client().await;
    let mut blocks = 0;
    for (n, text) in GUIDE.split("```").enumerate().filter(|(n, _)| n % 2 == 1) {
        let Some(sql) = text.strip_prefix("sql\n") else { continue };
        // Roles belong to the whole server: the reader's are renamed.
        let sql = sql.replace("shop_", &format!("{}_", db.name()));
        if let Err(error) = c.batch_execute(&sql).await {
            panic!("block {n}: {}\n{sql}", super::describe(&error));
        }
        blocks += 1;
    }
    assert!(blocks >= 10, "{blocks} blocks were found");
    let roles = rows(&c, &format!("select rolname from pg_roles where rolname like '{}\\_%'", db.name())).await;
    assert!(!roles.is_empty());
    for role in roles {
        c.batch_execute(&format!("drop owned by {role}; drop role {role}")).await.unwrap();
    }
}
