//! What the cache did, as the run's summary and its log say it.

use coxswain_proto::{cache_plan::CacheUse, human, ids::Step};

use super::{
    account::{CacheSummary, each},
    memo::Memo,
    owner::Features,
};
use coxswain_nn::kernels::Tape;

use crate::link::{CachePhase, StepTimes};

impl<B: Tape<Base = B>> Features<B> {
    /// What the step that is done took from the cache, on this rank; returns it with what was stored since
    /// the step before.
    pub(in crate::train) fn book(&mut self, used: CacheUse, times: &StepTimes) -> CacheUse {
        self.memo.hear();
        let used = CacheUse { kept: self.memo.account.take_kept(), ..used };
        self.memo.account.book(&used);
        if used.hits + used.misses > 0 {
            self.memo.account.cached_steps += 1;
            self.memo.account.cached_time += times.total;
            self.memo.account.cached_waiting += times.data;
        }
        used
    }

    /// This rank's sums for [`Features::summary`].
    pub(in crate::train) fn sums(&self) -> [f64; 4] {
        self.memo.account.sums()
    }

    /// The run's summary; `sums` are those of all ranks together.
    pub(in crate::train) fn summary(&mut self, sums: [f64; 4]) -> CacheSummary {
        let report = self.memo.report().unwrap_or_default();
        let namespace = self.memo.serving.as_ref().and_then(|serving| serving.namespace.as_ref());
        CacheSummary {
            mode: format!("{:?}", self.memo.setup.mode).to_lowercase(),
            tap: self.memo.setup.tap.clone(),
            generations: self.memo.account.generations.iter().copied().collect(),
            hits: sums[0] as u64,
            misses: sums[1] as u64,
            read_seconds: sums[2],
            fill_seconds: sums[3],
            cached_steps: self.memo.account.cached_steps,
            cached_seconds: self.memo.account.cached_time.as_secs_f64(),
            cached_waiting_seconds: self.memo.account.cached_waiting.as_secs_f64(),
            stored: report.stored,
            total: self.memo.account.total,
            bytes: report.bytes.0,
            rounding_error: namespace.map_or(0.0, |namespace| namespace.rounding_error()),
            drift: self.memo.account.drift.clone(),
        }
    }

    /// Where features lie and how, for people.
    pub(in crate::train) fn words_of_store(&self) -> String {
        let namespace = self.memo.serving.as_ref().and_then(|serving| serving.namespace.as_ref());
        let there = namespace.map(|namespace| {
            let stored = self.memo.setup.training.iter().filter(|key| namespace.contains(key)).count();
            format!("; {stored} of {} samples are cached", self.memo.setup.training.len())
        });
        format!(
            "features are cached in {} as {}{}",
            self.memo.setup.store.dir().display(),
            format!("{:?}", self.memo.setup.dtype).to_lowercase(),
            there.unwrap_or_default()
        )
    }
}

impl<B: Tape<Base = B>> Memo<B> {
    /// What happens from this step on, for people.
    pub fn words_of_cache_phase(&mut self, step: Step, cache_phase: &CachePhase) -> String {
        let used = self.words_of_use().map_or(String::new(), |used| format!("; before this step {used}"));
        match cache_phase {
            CachePhase::Live { .. } => {
                format!("from step {step} on, features are computed live and LoRA trains{used}")
            }
            CachePhase::Cached(namespace) => format!(
                "from step {step} on, features are read from cache version {}, made with the adapter before step {}; \
                 LoRA does not train{used}",
                namespace.generation.number, namespace.generation.since
            ),
        }
    }

    /// How the cache did since it was last said, if it was used.
    pub fn words_of_epoch(&mut self) -> Option<String> {
        let complete = self.report().is_some_and(|report| report.stored >= report.total);
        let used = self.words_of_use()?;
        Some(format!("cache: {used}{}", if complete { "; every sample is stored" } else { "" }))
    }

    fn words_of_use(&mut self) -> Option<String> {
        let CacheUse { hits, misses, read, fill, .. } = std::mem::take(&mut self.account.recent);
        let bytes = self
            .serving
            .as_ref()
            .and_then(|serving| serving.namespace.as_ref())
            .map(|namespace| namespace.bytes());
        (hits + misses > 0).then(|| {
            format!(
                "features of {hits} of {} samples were cached ({:.0} \
                 %); reading took {:.2} ms a sample, computing {:.2} ms; {} on disk",
                hits + misses,
                100.0 * hits as f64 / (hits + misses) as f64,
                each(read, hits),
                each(fill, misses),
                human::bytes(bytes.unwrap_or_default())
            )
        })
    }
}
