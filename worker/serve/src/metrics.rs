//! What the server tells of itself on `/metrics`, in Prometheus's text format.

use std::{
    fmt::Write,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Answers over which percentiles of the latency are taken.
const WINDOW: usize = 4096;
/// As Prometheus has them.
const QUANTILES: [f64; 4] = [0.5, 0.9, 0.99, 1.0];

/// Counts since the server was started, and its latest latencies.
#[derive(Debug, Default)]
pub struct Metrics {
    clients: AtomicU64,
    errors: AtomicU64,
    batches: AtomicU64,
    batched: AtomicU64,
    latencies: Mutex<Latencies>,
}

/// From an observation's last byte read to its answer, which is then sent.
#[derive(Debug, Default)]
struct Latencies {
    /// A ring of the latest.
    latest: Vec<Duration>,
    count: u64,
    sum: Duration,
}

impl Metrics {
    /// A client has come.
    pub fn came(&self) {
        self.clients.fetch_add(1, Ordering::Relaxed);
    }

    /// A client has gone.
    pub fn went(&self) {
        self.clients.fetch_sub(1, Ordering::Relaxed);
    }

    /// An observation was refused, or could not be answered.
    pub fn failed(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    /// One forward pass has answered so many.
    pub fn batch(&self, size: usize) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.batched.fetch_add(size as u64, Ordering::Relaxed);
    }

    /// An observation was answered.
    pub fn answered(&self, latency: Duration) {
        let mut latencies = self.latencies.lock().unwrap_or_else(PoisonError::into_inner);
        let at = (latencies.count % WINDOW as u64) as usize;
        match latencies.latest.get_mut(at) {
            Some(oldest) => *oldest = latency,
            None => latencies.latest.push(latency),
        }
        latencies.count += 1;
        latencies.sum += latency;
    }

    /// All of it.
    pub fn render(&self) -> String {
        let (mut sorted, count, sum) = {
            let latencies = self.latencies.lock().unwrap_or_else(PoisonError::into_inner);
            (latencies.latest.clone(), latencies.count, latencies.sum)
        };
        sorted.sort_unstable();
        let mut text = String::new();
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut tell = |name: &str, kind: &str, help: &str, value: u64| {
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n");
        };
        tell("cox_serve_clients", "gauge", "Clients that are connected.", read(&self.clients));
        tell("cox_serve_errors_total", "counter", "Observations refused or failed.", read(&self.errors));
        tell("cox_serve_batches_total", "counter", "Forward passes.", read(&self.batches));
        tell("cox_serve_batched_total", "counter", "Observations in forward passes.", read(&self.batched));
        let name = "cox_serve_latency_seconds";
        let help = format!(
            "Time from receipt of an observation until its answer is ready to be sent; quantiles of the \
             latest {WINDOW}."
        );
        let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} summary\n");
        for quantile in QUANTILES {
            let value = at_quantile(&sorted, quantile).map_or(f64::NAN, |latency| latency.as_secs_f64());
            let _ = writeln!(text, "{name}{{quantile=\"{quantile}\"}} {value}");
        }
        let _ = write!(text, "{name}_sum {}\n{name}_count {count}\n", sum.as_secs_f64());
        text
    }
}

/// The smallest value that so much of all values does not exceed.
fn at_quantile(sorted: &[Duration], quantile: f64) -> Option<Duration> {
    let rank = (quantile * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_latest_answers() {
        let metrics = Metrics::default();
        assert!(metrics.render().contains("quantile=\"0.5\"} NaN"));
        (0..WINDOW).for_each(|_| metrics.answered(Duration::from_secs(9)));
        (1..=WINDOW as u64).for_each(|at| metrics.answered(Duration::from_millis(at)));
        let text = metrics.render();
        for line in [
            "cox_serve_latency_seconds{quantile=\"0.5\"} 2.048\n",
            "cox_serve_latency_seconds{quantile=\"0.99\"} 4.056\n",
            "cox_serve_latency_seconds{quantile=\"1\"} 4.096\n",
            "cox_serve_latency_seconds_count 8192\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
    }
}
