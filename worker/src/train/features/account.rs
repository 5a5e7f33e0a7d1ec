//! What the cache has done so far, and what went wrong and is to be told once.

use std::{collections::BTreeSet, fmt::Display, time::Duration};

use coxswain_proto::cache_plan::{CacheDrift, CacheGeneration, CacheUse, Drift};
use serde::{Deserialize, Serialize};

use coxswain_feature_store::StoreError;

/// Damaged records that are named; a part that is damaged throughout has thousands.
const DAMAGES_NAMED: u64 = 8;
/// Samples of either kind after which reading and computing are compared.
const ENOUGH: u64 = 16;

/// The cache in a run's summary.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CacheSummary {
    /// `exact` or `periodic`.
    pub mode: String,
    /// Where features were taken, in words.
    pub tap: String,
    /// Generations that served in this process's life.
    pub generations: Vec<u64>,
    /// Samples whose features were there, over all ranks.
    pub hits: u64,
    /// Samples whose features were computed, over all ranks.
    pub misses: u64,
    /// Seconds spent on reading, over all ranks, by data threads.
    pub read_seconds: f64,
    /// Seconds spent on computing, and on waiting until what was computed is stored, over all ranks.
    pub fill_seconds: f64,
    /// Steps that took features from the cache, in this process's life.
    pub cached_steps: u64,
    /// Seconds of these steps, on rank 0.
    pub cached_seconds: f64,
    /// Seconds of [`cached_seconds`](Self::cached_seconds) that were spent waiting for data and kept
    /// features.
    pub cached_waiting_seconds: f64,
    /// Samples of the serving generation that are stored.
    pub stored: u64,
    /// Different samples that are trained on.
    pub total: u64,
    /// Bytes of the serving generation.
    pub bytes: u64,
    /// Relative L2 error of storing values as `cache.dtype`.
    pub rounding_error: f64,
    /// What was measured after live phases.
    pub drift: Vec<DriftRecord>,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DriftRecord {
    /// Before which step.
    pub step: u64,
    /// The generation compared with.
    pub generation: u64,
    /// Norm of the difference over the norm of the fresh features.
    pub relative_l2: f64,
    /// Mean cosine.
    pub cosine: f64,
    /// Loss with fresh features.
    pub loss_fresh: f64,
    /// Loss with kept ones.
    pub loss_cached: f64,
    /// Samples compared.
    pub probes: u32,
}

/// Something that went wrong, in words.
#[derive(Debug)]
pub(super) struct Complaint {
    /// What it is about.
    topic: String,
    pub text: String,
}

impl From<String> for Complaint {
    fn from(text: String) -> Self {
        Self { topic: text.clone(), text }
    }
}

impl From<&str> for Complaint {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl From<&StoreError> for Complaint {
    fn from(error: &StoreError) -> Self {
        Self { topic: error.topic(), text: error.to_string() }
    }
}

/// Sums of this process, and what is still to be told.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// Different samples that are trained on.
    pub total: u64,
    whole: CacheUse,
    /// Since the last line about it.
    pub recent: CacheUse,
    pub generations: BTreeSet<u64>,
    pub drift: Vec<DriftRecord>,
    complaints: Vec<String>,
    told: BTreeSet<String>,
    damaged: u64,
    kept: u64,
    news: bool,
    compared: bool,
    pub cached_steps: u64,
    pub cached_time: Duration,
    pub cached_waiting: Duration,
}

impl Account {
    pub fn new(total: u64) -> Self {
        Self { total, ..Self::default() }
    }

    /// Something went wrong that training survives; what is about the same is told once.
    pub fn complain(&mut self, what: impl Into<Complaint>) {
        let Complaint { topic, text } = what.into();
        if self.told.insert(topic) {
            tracing::warn!("{text}");
            self.complaints.push(text);
        }
    }

    /// A record that cannot be used, and is computed again.
    pub fn damage(&mut self, what: impl Display) {
        self.damaged += 1;
        if self.damaged <= DAMAGES_NAMED {
            self.complain(what.to_string());
        } else if self.damaged == DAMAGES_NAMED + 1 {
            self.complain(
                "more records of the cache are damaged and will be computed again; \
                 `cox cache verify` names them all, and removes them with --repair",
            );
        }
    }

    pub fn take_complaints(&mut self) -> Vec<String> {
        std::mem::take(&mut self.complaints)
    }

    pub fn begins(&mut self, generation: CacheGeneration) {
        self.generations.insert(generation.number);
        self.news = true;
    }

    /// Records that were appended to parts, and records that were published.
    pub fn kept(&mut self, appended: u64, published: usize) {
        self.kept += appended;
        self.news |= published > 0;
    }

    /// Records appended since the last call.
    pub fn take_kept(&mut self) -> u64 {
        std::mem::take(&mut self.kept)
    }

    /// Whether the coordinator's picture is out of date.
    pub fn has_news(&mut self) -> bool {
        std::mem::take(&mut self.news)
    }

    pub fn filled(&self) -> bool {
        self.whole.misses > 0
    }

    /// Time of waiting for the store.
    pub fn fill_time(&mut self, took: Duration) {
        self.whole.fill += took;
        self.recent.fill += took;
    }

    /// One step's use.
    pub fn book(&mut self, used: &CacheUse) {
        for sums in [&mut self.whole, &mut self.recent] {
            sums.hits += used.hits;
            sums.misses += used.misses;
            sums.read += used.read;
            sums.fill += used.fill;
        }
        if self.compared || self.whole.hits < ENOUGH || self.whole.misses < ENOUGH {
            return;
        }
        self.compared = true;
        let (read, fill) = (each(self.whole.read, self.whole.hits), each(self.whole.fill, self.whole.misses));
        if read > fill {
            self.complain(format!(
                "reading cached features takes {read:.2} ms a sample, computing them {fill:.2} ms: \
                 without the cache this run would be faster; set cache.mode: off, or put cache.dir on a faster disk"
            ));
        }
    }

    pub fn measured(&mut self, generation: u64, drift: Option<CacheDrift>) {
        let Some(CacheDrift { at, drift, probes }) = drift else { return };
        let Drift { relative_l2, cosine, loss_fresh, loss_cached } = drift;
        let step = at.0;
        self.drift.retain(|record| record.step < step);
        self.drift.push(DriftRecord {
            step,
            generation,
            relative_l2,
            cosine,
            loss_fresh,
            loss_cached,
            probes,
        });
    }

    /// This rank's sums: hits, misses, seconds of reading and of filling.
    pub fn sums(&self) -> [f64; 4] {
        let CacheUse { hits, misses, read, fill, .. } = self.whole;
        [hits as f64, misses as f64, read.as_secs_f64(), fill.as_secs_f64()]
    }
}

/// Milliseconds a sample.
pub(super) fn each(time: Duration, samples: u64) -> f64 {
    1e3 * time.as_secs_f64() / samples.max(1) as f64
}

#[cfg(test)]
mod tests {
    use coxswain_proto::ids::Step;

    use super::*;

    fn used(hits: u64, misses: u64, read_ms: u64, fill_ms: u64) -> CacheUse {
        let ms = Duration::from_millis;
        CacheUse { hits, misses, kept: 0, read: ms(read_ms), fill: ms(fill_ms) }
    }

    #[test]
    fn reading_that_is_slower_than_computing_is_told_once() {
        let mut account = Account::new(100);
        account.book(&used(20, 10, 2000, 100));
        assert!(account.take_complaints().is_empty(), "too early to say");
        account.book(&used(20, 10, 2000, 100));
        let complaints = account.take_complaints();
        assert!(matches!(&complaints[..], [line] if line.contains("cache.mode: off")), "{complaints:?}");
        account.book(&used(20, 10, 2000, 100));
        assert!(account.take_complaints().is_empty());
    }

    #[test]
    fn what_goes_wrong_the_same_way_is_told_once() {
        let mut account = Account::new(1);
        account.complain("disk full");
        account.complain("disk full");
        account.complain("disk gone");
        // Parts have unique names.
        let failed = |name: &str| StoreError::Io {
            action: "write",
            path: format!("cache/namespace/{name}").into(),
            source: std::io::ErrorKind::TimedOut.into(),
        };
        ["open-1.tmp", "open-2.tmp"].iter().for_each(|name| account.complain(&failed(name)));
        let told = account.take_complaints();
        assert_eq!(told[..2], ["disk full", "disk gone"]);
        assert!(told.len() == 3 && told[2].contains("open-1.tmp"), "{told:?}");
        account.complain("disk full");
        assert!(account.take_complaints().is_empty());
    }

    #[test]
    fn of_many_damages_a_few_are_named() {
        let mut account = Account::new(1);
        (0..1000).for_each(|record| account.damage(format!("record {record}")));
        let complaints = account.take_complaints();
        assert_eq!(complaints.len() as u64, DAMAGES_NAMED + 1);
        assert!(complaints[8].contains("cox cache verify"), "{complaints:?}");
    }

    #[test]
    fn a_measurement_that_is_repeated_after_a_rollback_replaces_what_came_after() {
        let mut account = Account::new(1);
        let drift = |at, relative_l2| {
            let drift = Drift { relative_l2, cosine: 1.0, loss_fresh: 1.0, loss_cached: 1.0 };
            Some(CacheDrift { at: Step(at), drift, probes: 4 })
        };
        account.measured(1, drift(10, 0.1));
        account.measured(1, drift(20, 0.2));
        account.measured(1, drift(10, 0.3));
        assert_eq!(account.drift.iter().map(|r| (r.step, r.relative_l2)).collect::<Vec<_>>(), [(10, 0.3)]);
    }
}
