//! `fencepost task` and `fencepost effect`: the whole story of one, and why it is not delivered yet.

use anyhow::bail;
use serde::Serialize;

use super::Exit;
use super::consent::Consent;
use super::deliveries::{consumer_id, effect_id};
use super::global::Global;
use super::output::{Table, plain, span};
use crate::model::key::{EffectKey, TaskId};
use crate::store::inspect::effect::{self, DeliveryStory, EffectStory, Event};
use crate::store::inspect::task::{self, TaskStory};
use crate::store::inspect::why::Why;
use crate::store::tasks::{self, TaskChange};

#[derive(clap::Args, Debug)]
pub struct TaskArgs {
    /// The task's id.
    task_id: TaskId,
    /// Run it again under the next epoch; withdraws nothing that committed.
    #[arg(long, conflicts_with = "cancel")]
    reopen: bool,
    /// With --reopen: although a delivery of it still waits.
    #[arg(long, requires = "reopen")]
    force: bool,
    /// End it, if nobody has claimed it yet.
    #[arg(long)]
    cancel: bool,
    #[command(flatten)]
    consent: Consent,
}

impl TaskArgs {
    fn change(&self) -> Option<TaskChange> {
        match (self.cancel, self.reopen, self.force) {
            (true, _, _) => Some(TaskChange::Cancel),
            (_, true, false) => Some(TaskChange::Reopen),
            (_, true, true) => Some(TaskChange::ReopenAnyway),
            (false, false, _) => None,
        }
    }
}

#[derive(clap::Args, Debug)]
pub struct EffectArgs {
    /// The idempotency key: <task_id>:<lease_epoch>, or <task_id>:<lease_epoch>:<n>.
    key: EffectKey,
    /// Only at this consumer.
    #[arg(long, value_name = "NAME")]
    consumer: Option<String>,
}

/// A story with the reasons in words.
#[derive(Serialize)]
struct Told<S: Serialize> {
    #[serde(flatten)]
    story: S,
    /// Deliveries that have not ended, and why.
    waiting: Vec<Waits>,
}

#[derive(Serialize)]
struct Waits {
    key: String,
    consumer: String,
    why: Vec<Why>,
}

pub async fn task(global: &Global, args: TaskArgs) -> anyhow::Result<Exit> {
    let mut client = global.session().await?;
    let Some(story) = task::load(&client, &args.task_id).await? else {
        bail!("there is no task {}", args.task_id);
    };
    let waiting = story.effects.iter().flat_map(waits).collect();
    let told = Told { story, waiting };
    global.output().print(&told, || {
        let mut text = about_task(&told.story);
        told.story.effects.iter().for_each(|effect| text.push_str(&format!("\n{}", about_effect(effect))));
        text
    })?;
    let Some(change) = args.change() else { return Ok(Exit::Done) };
    let reason = args.consent.given()?;
    if !tasks::change(&mut client, &args.task_id, change, &reason).await? {
        bail!("task {} is {}: only one that waits to be claimed can be cancelled", args.task_id, told.story.status);
    }
    Ok(Exit::Done)
}

pub async fn effect(global: &Global, args: EffectArgs) -> anyhow::Result<Exit> {
    let client = global.session().await?;
    let id = effect_id(&client, &args.key).await?;
    let consumer = match &args.consumer {
        Some(name) => Some(consumer_id(&client, name).await?),
        None => None,
    };
    let Some(story) = effect::load(&client, id, consumer).await? else {
        bail!("no effect has the key {}", args.key);
    };
    if let (Some(name), true) = (&args.consumer, story.deliveries.is_empty()) {
        bail!("{} was never meant for {name:?}", args.key);
    }
    let waiting = waits(&story);
    let told = Told { story, waiting };
    global.output().print(&told, || about_effect(&told.story))?;
    Ok(Exit::Done)
}

fn waits(effect: &EffectStory) -> Vec<Waits> {
    let told = |delivery: &DeliveryStory| Waits {
        key: effect.key.clone(),
        consumer: delivery.consumer.clone(),
        why: why(delivery),
    };
    effect.deliveries.iter().filter(|delivery| delivery.circumstances.is_some()).map(told).collect()
}

fn why(delivery: &DeliveryStory) -> Vec<Why> {
    delivery.circumstances.as_ref().map(|c| c.reasons(span)).unwrap_or_default()
}

fn about_task(task: &TaskStory) -> String {
    let lease = match (&task.owner, task.lease_seconds) {
        (Some(owner), Some(seconds)) if seconds < 0.0 => {
            format!("{owner}'s lease expired {} ago: the next claim takes it over", span(-seconds))
        }
        (Some(owner), Some(seconds)) => format!("leased by {owner} for another {}", span(seconds)),
        _ => match (task.status.as_str(), task.ready_in_seconds) {
            ("ready", Some(seconds)) => format!("may be claimed in {}", span(seconds)),
            ("ready", None) => "waits for a worker to claim it".into(),
            _ => task.token.clone().unwrap_or_default(),
        },
    };
    let head = format!(
        "task {}  {}  {}, epoch {}, {} claims left: {lease}",
        task.task_id, task.kind, task.status, task.lease_epoch, task.claims_left
    );
    format!("{}\n{}", plain(&head), timeline(&task.events))
}

fn about_effect(effect: &EffectStory) -> String {
    let mut head = format!(
        "effect {}  {}  {} bytes of {}, shard {}, ordering key {}",
        effect.key,
        effect.kind.as_deref().unwrap_or("-"),
        effect.size,
        effect.content_type,
        effect.shard,
        effect.ordering_key
    );
    let extras = [
        ("topic", &effect.topic),
        ("amends", &effect.amends),
        ("deliver after", &effect.deliver_after),
        ("expires at", &effect.expires_at),
    ];
    for (name, value) in extras {
        if let Some(value) = value {
            head.push_str(&format!(", {name} {value}"));
        }
    }
    let mut text = format!("{}\n  {}  committed, sha256 {}\n", plain(&head), effect.committed_at, effect.sha256);
    for delivery in &effect.deliveries {
        let token = delivery.token.as_deref().unwrap_or("did not finish yet");
        let line = format!("to {}: {token}, {} attempts", delivery.consumer, delivery.attempts);
        text.push_str(&format!("  {}\n{}", plain(&line), timeline(&delivery.events)));
        for Why { text: reason, .. } in why(delivery) {
            text.push_str(&format!("    -> {}\n", plain(&reason)));
        }
    }
    text
}

fn timeline(events: &[Event]) -> String {
    let mut table = Table::new(&["    at", "what", "detail"]);
    for event in events {
        table.row([format!("    {}", event.at), event.what.clone(), event.detail.clone()]);
    }
    table.render("")
}
