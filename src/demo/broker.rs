//! The broker of a run: a private RabbitMQ, or yours; a run without one does the rest and says so.

use secrecy::SecretString;
use tokio::task::JoinHandle;

use super::embedded::rabbitmq::PrivateRabbitmq;
use super::{Error, Result};

/// Names your own broker.
pub const URL: &str = "AMQP_URL";

/// Which broker a run uses.
pub enum Broker {
    Private(SecretString),
    Yours(SecretString),
    /// Why there is none.
    None(String),
}

/// A private node, restarted once in the middle of the run: every connection is cut, and what was durable is there
/// again. Your own broker is left alone.
pub enum Node {
    Absent,
    Running(PrivateRabbitmq),
    Restarting(JoinHandle<Result<PrivateRabbitmq>>),
    /// Held until the run has ended.
    Restarted {
        _node: PrivateRabbitmq,
    },
}

impl Broker {
    pub async fn find() -> (Self, Node) {
        if let Ok(url) = std::env::var(URL) {
            return (Self::Yours(url.into()), Node::Absent);
        }
        match PrivateRabbitmq::start().await {
            Ok(node) => (Self::Private(node.url().into()), Node::Running(node)),
            Err(error) => (Self::None(format!("{:#}", anyhow::Error::from(error))), Node::Absent),
        }
    }

    pub fn url(&self) -> Option<SecretString> {
        match self {
            Self::Private(url) | Self::Yours(url) => Some(url.clone()),
            Self::None(_) => None,
        }
    }

    /// What a report says of it.
    pub fn told(&self, node: &Node) -> String {
        match (self, node) {
            (Self::Private(_), Node::Restarted { .. }) => "a private RabbitMQ, restarted once in the middle".into(),
            (Self::Private(_), _) => "a private RabbitMQ".into(),
            (Self::Yours(_), _) => "yours, left alone".into(),
            (Self::None(why), _) => format!("none, so nothing was sent over AMQP: {why}"),
        }
    }
}

impl Node {
    /// Begins the restart, if it has not begun.
    pub fn restart(&mut self) {
        *self = match std::mem::replace(self, Self::Absent) {
            Self::Running(mut node) => Self::Restarting(tokio::spawn(async move {
                node.stop().await?;
                node.boot().await?;
                Ok(node)
            })),
            other => other,
        };
    }

    /// An error where the node did not come back.
    pub async fn check(&mut self) -> Result<()> {
        if let Self::Restarting(task) = self
            && task.is_finished()
        {
            let ended = task.await.map_err(|error| Error::io("restarting RabbitMQ")(std::io::Error::other(error)))?;
            *self = Self::Restarted { _node: ended? };
        }
        Ok(())
    }

    /// Whether nothing more will happen to it in this run.
    pub fn is_done(&self) -> bool {
        matches!(self, Self::Absent | Self::Restarted { .. })
    }
}
