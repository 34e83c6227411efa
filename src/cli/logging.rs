//! Log lines and error texts.

use std::error::Error;
use std::fmt::Write;

use tracing_subscriber::EnvFilter;

use super::output::plain;
use crate::config::LogFormat;

/// Libraries that log what is told elsewhere: lapin logs returned messages whole, payload and ack token included; the
/// platform's verifier calls every bad certificate an ERROR, which is kept for alarms.
const QUIET: &str = "lapin=off,rustls_platform_verifier=off";

/// Starts logging to stderr; a second call changes nothing. The level was checked with the configuration.
pub fn init(format: LogFormat, level: &str) {
    let level = if level.contains("lapin") { level.to_string() } else { format!("{level},{QUIET}") };
    let filter = EnvFilter::try_new(level).unwrap_or_else(|_| EnvFilter::new(format!("info,{QUIET}")));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // An error here means that logging has been started already.
    let _ = match format {
        LogFormat::Text => builder.with_ansi(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
}

/// An error with its causes in one line; a cause that the text before it already tells is left out.
pub fn report(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let said = cause.to_string();
        if !text.contains(&said) && said != "db error" {
            let _ = write!(text, ": {said}");
        }
        source = cause.source();
    }
    text.split('\n').map(plain).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_tells_its_causes_once() {
        let error = anyhow::anyhow!("disk full").context("cannot write").context("cannot write: at all");
        assert_eq!(report(error.as_ref()), "cannot write: at all: disk full");
    }
}
