//! Where features come from: what the tests of cache phases, drift, requests and reports share.

mod cache_phases;
mod drift;
mod reports;
mod requests;

use coxswain_proto::{
    cache_plan::{CacheDecision, CacheDrift, CacheGeneration, CacheReport, Cause, Drift},
    run_spec::{Cache, CacheMode, Span},
};

use super::{mortal::Mortal, *};
use crate::core::{
    action::{CacheKey, Lease, LeaseCachePhase, Record},
    cache::GenerationState,
    failure::Failure,
    news::CacheNews,
};

/// A periodic cache in steps.
pub(super) fn periodic(live: u64, interval: u64, rebuild_above: Option<f64>) -> Cache {
    let steps = |steps| Span { epochs: None, steps: Some(steps) };
    let (interval, live) = (steps(interval), steps(live));
    Cache { mode: CacheMode::Periodic, interval, live, rebuild_above, ..Cache::default() }
}

fn cached(world: u32, cache: Cache) -> Config {
    Config { cache, ..config(world) }
}

impl Mortal {
    /// Two workers that train from step 0 on.
    fn started(cache: Cache) -> Self {
        Self::started_with(cached(2, cache)).0
    }

    fn started_with(config: Config) -> (Self, Vec<Action>) {
        let mut kept = Self::new(config);
        kept.run.gather(2);
        // How workers come is not what these tests are about: they are recorded as a restarted coordinator
        // would find them.
        for rank in 0..2 {
            kept.past.add_record(&Record::Worker(id(rank), Box::new(claim(rank))));
        }
        kept.past.add_record(&Record::DataSet(dataset()));
        let (node_id, host, version) = (NODE.into(), "node-a".into(), VERSION.into());
        kept.past.add_record(&Record::Node { place: 0, node_id, host, version });
        for rank in 0..2 {
            kept.keep(|run| run.get_ready(rank, 0, ""));
        }
        let actions = kept.keep(|run| run.start_all(2, 0, StateSource::Fresh));
        (kept, actions)
    }

    /// Both ranks do the steps of a range, one after the other.
    fn train(&mut self, steps: std::ops::Range<u64>) -> Vec<Action> {
        let mut all = Vec::new();
        for step in steps {
            all.extend(self.keep(|run| run.steps(0, step..step + 1)));
            all.extend(self.keep(|run| run.steps(1, step..step + 1)));
        }
        all
    }

    /// Seconds pass in which both ranks do nothing but this.
    fn live(&mut self, seconds: u64, phase: WorkerPhase) -> Vec<Action> {
        let mut all = Vec::new();
        for _ in 0..seconds {
            all.extend(self.keep(|run| run.beat(0, phase)));
            all.extend(self.keep(|run| run.beat(1, phase)));
            all.extend(self.keep(|run| run.wait(Duration::from_secs(1))));
        }
        all
    }

    fn report(&mut self, report: CacheReport) -> Vec<Action> {
        let worker = self.run.worker(0);
        self.keep(|run| run.tell(Ask::Cache(worker, report)))
    }

    fn rebuild(&mut self) -> (Result<Reply, Refusal>, Vec<Action>) {
        let mut reply = Ok(Reply::Done);
        let actions = self.keep(|run| {
            let (answer, actions) = run.ask(Ask::RebuildCache);
            reply = answer;
            actions
        });
        (reply, actions)
    }

    /// Another coordinator, whom both workers have found.
    fn restart_coordinator(&mut self) {
        self.kill_coordinator();
        for rank in 0..2 {
            self.reopen(rank);
        }
    }

    /// Generations that the steps of a range take their features from.
    fn cache_phases(&self, steps: std::ops::Range<u64>) -> Vec<u64> {
        let cache_phases = self.run.machine.run.progress.cache.book.cache_phases();
        steps.map(|step| cache_phases.cache_phase(Step(step)).expect("it is decided").number()).collect()
    }
}

fn report_of(generation: u64) -> CacheReport {
    CacheReport { generation, total: 30, fill_batch: 4, ..CacheReport::default() }
}

fn drift_of(generation: u64, at: u64, relative_l2: f64) -> CacheReport {
    let drift = Drift { relative_l2, cosine: 0.9, loss_fresh: 1.0, loss_cached: 1.1 };
    let drift = Some(CacheDrift { at: Step(at), drift, probes: 8 });
    CacheReport { drift, ..report_of(generation) }
}

/// The leases that were told to anybody: steps, and the generation that serves.
fn leases(actions: &[Action]) -> Vec<(u32, std::ops::Range<u64>, u64)> {
    let leases = actions.iter().filter_map(|action| match action {
        Action::Tell(_, Directive::Lease(lease)) => Some(lease),
        _ => None,
    });
    leases.map(|lease| (lease.slice.0, lease.first.0..lease.end.0, number(lease))).collect()
}

/// The generation that a lease names; 0 for none.
pub(super) fn number(lease: &Lease) -> u64 {
    match &lease.cache_phase {
        LeaseCachePhase::Live { .. } => 0,
        LeaseCachePhase::Cached(key) => key.generation.number,
    }
}

fn decided(actions: &[Action]) -> Vec<CacheDecision> {
    let cache_phases = actions.iter().filter_map(|action| match action {
        Action::Record(Record::CachePhase(decided)) => Some(*decided),
        _ => None,
    });
    cache_phases.collect()
}
