//! The process's recorder of metrics: what this relay counted itself. What the database knows is asked for at scrape
//! time instead (`service`).

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

/// Upper bounds of every histogram of seconds.
const SECONDS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// Installs the recorder for the whole process; only the first call in a process counts anything.
pub fn install() -> Result<PrometheusHandle, BuildError> {
    let builder = PrometheusBuilder::new().set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &SECONDS)?;
    let recorder = builder.build_recorder();
    let handle = recorder.handle();
    // An error here means that the process has one already.
    let _ = ::metrics::set_global_recorder(recorder);
    Ok(handle)
}
