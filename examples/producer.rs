//! A worker in Rust: the order, the task's end and the effect commit together, or not at all.
//!
//!     DATABASE_URL=postgresql://... cargo run --example producer

use fencepost::producer::{self, Effect, ErrorKind, NewTask, Payload, Worker};
use serde_json::json;
use tokio_postgres::NoTls;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (mut client, connection) = tokio_postgres::connect(&std::env::var("DATABASE_URL")?, NoTls).await?;
    tokio::spawn(connection);

    // With an id of ours: submitting it again changes nothing.
    let task = NewTask::new("charge", json!({"order": 1003})).id("order-1003".parse()?);
    producer::submit(&client, &task).await?;

    let worker = Worker::new(format!("rust-{}", std::process::id())).kinds(&["charge"]);
    for lease in worker.claim(&client, 10).await? {
        let order = &lease.payload["order"];
        let tx = client.transaction().await?;
        tx.execute("update orders set status = 'paid' where id = ($1::jsonb)::int", &[order]).await?;
        let paid = Effect::on("order.paid", Payload::Json(json!({"order": order}))).kind("order.paid");
        match lease.complete(&tx, &[paid], None).await {
            Ok(_) => tx.commit().await?,
            // Somebody else has the task now, and does the work: ours goes with the transaction.
            Err(error) if error.kind() == ErrorKind::LeaseLost => tx.rollback().await?,
            Err(error) => return Err(error.into()),
        }
        println!("{} has ended", lease.task_id);
    }
    Ok(())
}
