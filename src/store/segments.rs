//! The segments of effects and ledger: what there is, room ahead, and moving on to the next.
//!
//! The newest segment is open-ended and empty, the one before it has room for more ids than will ever be drawn in its
//! time. When its time is over the identity is moved on to the next, which was split off the open end before. All of
//! this needs the tables' owner, and takes no lock that an INSERT could wait for: DETACH CONCURRENTLY and ATTACH share
//! the parent with writers.

use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use super::{Error, Result};

/// A table that is kept in segments by effect id.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Parent {
    Effects,
    Ledger,
}

impl Parent {
    pub const ALL: [Self; 2] = [Self::Effects, Self::Ledger];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Effects => "effects",
            Self::Ledger => "ledger",
        }
    }
}

/// One segment: ids from `from` up to, not including, `to`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    pub parent: Parent,
    pub from: i64,
    pub link: Link,
}

/// How a segment hangs on its parent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Link {
    /// The newest: its end is open.
    Open,
    Bounded {
        to: i64,
    },
    /// Its detaching was begun and not finished: it is seen no more, but still hangs there.
    Pending,
    /// A table by itself.
    Detached,
}

impl Segment {
    pub fn table(&self) -> String {
        format!("fencepost.{}_{}", self.parent.as_str(), self.from)
    }
}

/// Whether something was done, or somebody stands in the way; then it is tried again later.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    Done,
    Waits(String),
}

impl Step {
    /// A lock that could not be had in time is a reason to wait, not a failure.
    pub(super) fn of<T>(result: std::result::Result<T, Error>, what: &str) -> Result<Self> {
        match result {
            Ok(_) => Ok(Self::Done),
            Err(error) if error.sqlstate() == Some(&SqlState::LOCK_NOT_AVAILABLE) => {
                Ok(Self::Waits(format!("{what} waits for other transactions")))
            }
            Err(error) => Err(error),
        }
    }
}

/// Whose rights a session has from now on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Acting {
    AsOwner,
    /// This role is no member of the one that owns the tables. Both names are quoted as SQL wants them.
    AsItself {
        role: String,
        owner: String,
    },
}

/// Acts as the owner of the tables, as ALTER TABLE demands, where this role may.
pub async fn become_owner(client: &Client) -> Result<Acting> {
    let row = client
        .query_one(
            "-- store::table_owner
             select quote_ident(session_user), quote_ident(pg_get_userbyid(c.relowner)), pg_has_role(session_user, c.relowner, 'member')
             from pg_class c where c.oid = 'fencepost.effects'::regclass",
            &[],
        )
        .await?;
    let (role, owner): (String, String) = (row.get(0), row.get(1));
    if !row.get::<_, bool>(2) {
        return Ok(Acting::AsItself { role, owner });
    }
    client.batch_execute(&format!("-- store::become_owner\nset role {owner}")).await?;
    Ok(Acting::AsOwner)
}

/// All segments of a table, lowest first, those included that are detached and not yet dropped or attached again.
pub async fn list(client: &Client, parent: Parent) -> Result<Vec<Segment>> {
    let rows = client
        .query(
            "-- store::segments
             select substring(c.relname from '[0-9]+$')::bigint, i.inhparent is not null, coalesce(i.inhdetachpending, false),
                    (regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \\(''?(-?[0-9]+)''?\\)'))[1]::bigint
             from pg_class c left join pg_inherits i on i.inhrelid = c.oid
             where c.relnamespace = 'fencepost'::regnamespace and c.relkind = 'r' and c.relname ~ ('^' || $1 || '_[0-9]+$')
             order by 1",
            &[&parent.as_str()],
        )
        .await?;
    let link = |attached, pending, to: Option<i64>| match (attached, pending, to) {
        (false, ..) => Link::Detached,
        (true, true, _) => Link::Pending,
        (true, false, Some(to)) => Link::Bounded { to },
        (true, false, None) => Link::Open,
    };
    Ok(rows
        .iter()
        .map(|row| Segment { parent, from: row.get(0), link: link(row.get(1), row.get(2), row.get(3)) })
        .collect())
}

/// Where the identity stands: the last id that was drawn, or the one before the next.
pub async fn last_id(client: &Client) -> Result<i64> {
    let sql = "-- store::last_effect_id
        select case when is_called then last_value else last_value - 1 end from fencepost.effects_id_seq";
    Ok(client.query_one(sql, &[]).await?.get(0))
}

/// Sees to it that a bounded segment lies ahead of the one in use, and an open end behind it; finishes what a crash
/// interrupted.
pub async fn make_room(client: &Client, parent: Parent) -> Result<Step> {
    let segments = list(client, parent).await?;
    let end = segments.iter().filter_map(|s| if let Link::Bounded { to } = s.link { Some(to) } else { None }).max();
    let end = end.ok_or_else(|| Error::Corrupt(format!("fencepost.{} has no bounded segment", parent.as_str())))?;
    let Some(tail) = segments.iter().rfind(|s| s.from >= end) else {
        // Neither attached nor detached: a new one.
        add_open_end(client, parent, end).await?;
        return Ok(Step::Done);
    };
    match tail.link {
        Link::Bounded { .. } => {}
        Link::Detached => attach(client, tail).await?,
        Link::Pending => match finalize(client, tail).await? {
            Step::Done => attach(client, tail).await?,
            waits => return Ok(waits),
        },
        Link::Open if last_id(client).await? < in_use_before(&segments, end) => {}
        Link::Open => {
            if !is_empty(client, tail).await? {
                return Ok(Step::Waits(format!("{} holds rows already and cannot be split", tail.table())));
            }
            // A table has room for one pending segment: there is time, and the identity stays where it is.
            if let Some(other) = segments.iter().find(|s| s.link == Link::Pending) {
                return Ok(Step::Waits(format!("{} is still being detached", other.table())));
            }
            match detach(client, tail).await? {
                Step::Done => attach(client, tail).await?,
                waits => return Ok(waits),
            }
        }
    }
    Ok(Step::Done)
}

/// The start of the last bounded segment: while the identity is below it, there is room ahead.
fn in_use_before(segments: &[Segment], end: i64) -> i64 {
    let last = segments.iter().rfind(|s| matches!(s.link, Link::Bounded { to } if to == end));
    last.map_or(end, |segment| segment.from)
}

/// Moves the identity on to the next segment, where an empty bounded one lies ahead. Returns its start if it did.
pub async fn move_on(client: &Client) -> Result<Option<i64>> {
    let last = last_id(client).await?;
    let ahead = |parent| async move {
        let segments = list(client, parent).await?;
        Ok::<_, Error>(
            segments.iter().find(|s| matches!(s.link, Link::Bounded { .. }) && s.from > last).map(|s| s.from),
        )
    };
    let (effects, ledger) = (ahead(Parent::Effects).await?, ahead(Parent::Ledger).await?);
    let Some(next) = effects.filter(|_| effects == ledger) else { return Ok(None) };
    let moved = client
        .execute(
            "-- store::move_on
             select setval('fencepost.effects_id_seq', $1, false) from fencepost.effects_id_seq where last_value < $1",
            &[&next],
        )
        .await?;
    Ok((moved > 0).then_some(next))
}

/// Takes a segment off its parent without a lock that writers feel. Interrupted, it is left [`Link::Pending`].
pub async fn detach(client: &Client, segment: &Segment) -> Result<Step> {
    let sql = format!(
        "-- store::detach_segment\nalter table fencepost.{} detach partition {} concurrently",
        segment.parent.as_str(),
        segment.table()
    );
    Step::of(client.batch_execute(&sql).await.map_err(Error::from), &format!("detaching {}", segment.table()))
}

/// Ends a detaching that was interrupted.
pub async fn finalize(client: &Client, segment: &Segment) -> Result<Step> {
    let sql = format!(
        "-- store::finalize_detach\nalter table fencepost.{} detach partition {} finalize",
        segment.parent.as_str(),
        segment.table()
    );
    Step::of(client.batch_execute(&sql).await.map_err(Error::from), &format!("detaching {}", segment.table()))
}

async fn attach(client: &Client, tail: &Segment) -> Result<()> {
    let sql = "-- store::attach_segment\nselect fencepost.attach_segment($1, $2)";
    client.execute(sql, &[&tail.parent.as_str(), &tail.from]).await?;
    Ok(())
}

async fn add_open_end(client: &Client, parent: Parent, from: i64) -> Result<()> {
    client.execute("-- store::add_segment\nselect fencepost.add_segment($1, $2)", &[&parent.as_str(), &from]).await?;
    Ok(())
}

async fn is_empty(client: &Client, segment: &Segment) -> Result<bool> {
    let sql = format!("-- store::segment_is_empty\nselect not exists (select from {})", segment.table());
    Ok(client.query_one(&sql, &[]).await?.get(0))
}
