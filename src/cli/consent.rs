//! Nothing changes without having been shown first and then asked for with `--yes --reason`.

use super::Usage;
use crate::store::audit::Reason;

#[derive(clap::Args, Debug)]
pub struct Consent {
    /// Do it; without this the command only shows what it would do.
    #[arg(long, requires = "reason")]
    yes: bool,
    /// Why, for the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: Option<Reason>,
}

impl Consent {
    /// The reason, if the change was asked for. Call it after the preview was printed.
    pub fn given(self) -> Result<Reason, Usage> {
        match (self.yes, self.reason) {
            (true, Some(reason)) => Ok(reason),
            _ => Err(Usage("nothing was changed; to do it, add --yes --reason \"why\"".into())),
        }
    }
}
