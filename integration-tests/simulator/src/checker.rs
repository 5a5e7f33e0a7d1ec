//! What must be true of a simulated run at any moment, and of its end.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use coxswain_coordinator::{
    Outcome,
    core::{
        action::{Lease, LeaseCachePhase, Record},
        machine::Machine,
        news::News,
        past::Past,
        report::CommittedStep,
        stragglers::Slowness,
    },
};
use coxswain_proto::{
    ids::{Generation, Slot, Step},
    plan::Plan,
};

use crate::{
    report::Report,
    script::{Fault, Kind, Script},
};

/// Violations that are kept; the first one says it all.
const KEPT: usize = 8;

/// The records of a run.
#[derive(Clone, Debug)]
pub struct Checker {
    pub plan: Plan,
    /// Steps whose every gradient reached its replica, by generation: they were executed, even if no rank
    /// could say so.
    executed: BTreeSet<(Generation, u64)>,
    /// The last generations of runs that have failed.
    closing: BTreeSet<Generation>,
    steps: BTreeMap<u64, CommittedStep>,
    /// The generation of the feature cache that each step was leased with first, by whichever coordinator; 0
    /// for none.
    cache_phases: BTreeMap<u64, u64>,
    newest: Generation,
    committed: u64,
    /// The newest complete checkpoint there ever was.
    saved: u64,
    rollback_told: Option<(Step, Step)>,
    /// Steps below this one have a checkpoint and no records: the disk has lost those.
    proven: u64,
    lines: Vec<(Duration, String)>,
    recoveries: Vec<Duration>,
    repeated: u64,
    restarts: u32,
    faults: usize,
    /// Slots whose worker was ever slowed down.
    slowed: BTreeSet<Slot>,
    verbose: bool,
    pub violations: Vec<String>,
}

impl Checker {
    pub fn new(script: &Script) -> Self {
        let train = coxswain_proto::run_spec::Train {
            steps: Some(script.steps),
            epochs: None,
            global_batch: usize::try_from(script.global_batch).unwrap_or(usize::MAX),
            micro_batch: 1,
            auto_micro_batch: false,
            recompute: coxswain_proto::run_spec::Recompute::None,
            checkpoint_every: 0,
            keep_checkpoints: 1,
            log_every: 1,
            max_skipped: 10,
            max_left_out: 0.05,
            spike: Default::default(),
            spike_factor: 20.0,
            skip_steps: Vec::new(),
            resume: true,
            init_from: None,
            init_digest: None,
            base_digest: None,
        };
        Self {
            plan: Plan::new(&train, script.samples)
                .expect("scripts are checked: steps, samples and batch are there"),
            executed: BTreeSet::new(),
            closing: BTreeSet::new(),
            steps: BTreeMap::new(),
            cache_phases: BTreeMap::new(),
            newest: Generation(0),
            committed: 0,
            saved: 0,
            rollback_told: None,
            proven: 0,
            lines: Vec::new(),
            recoveries: Vec::new(),
            repeated: 0,
            restarts: 0,
            faults: 0,
            slowed: BTreeSet::new(),
            verbose: script.verbose,
            violations: Vec::new(),
        }
    }

    pub fn violated(&mut self, now: Duration, what: String) {
        if self.violations.len() < KEPT {
            self.violations.push(format!("{:.3} s: {what}", now.as_secs_f64()));
        }
    }

    pub fn fault(&mut self, now: Duration, fault: &Fault) {
        self.faults += 1;
        if fault.what == Kind::Slow {
            self.slowed.insert(Slot(fault.rank));
        }
        self.lines.push((now, format!("fault: {fault}")));
    }

    /// Somebody has launched the run again, which may go on though it had failed.
    pub fn launched_again(&mut self) {
        self.closing.clear();
    }

    /// A step was done by every rank of a generation.
    pub fn executed(&mut self, now: Duration, generation: Generation, step: u64) {
        self.executed.insert((generation, step));
        if self.closing.contains(&generation) {
            self.violated(now, format!("generation {generation} was only to save, and has done step {step}"));
        }
    }

    /// There is a complete checkpoint of so many steps.
    pub fn saved(&mut self, steps: u64) {
        self.saved = self.saved.max(steps);
    }

    /// This generation is to write a checkpoint, and nothing else.
    pub fn closes(&mut self, generation: Generation) {
        self.closing.insert(generation);
    }

    /// A rank may run these steps: one that repeats a step takes the cache phase that it had then.
    pub fn leased(&mut self, now: Duration, lease: &Lease) {
        let cache_phase = match &lease.cache_phase {
            LeaseCachePhase::Live { .. } => 0,
            LeaseCachePhase::Cached(key) => key.generation.number,
        };
        for step in lease.first.0..lease.end.0 {
            let first = *self.cache_phases.entry(step).or_insert(cache_phase);
            if first != cache_phase {
                let what = format!(
                    "step {step} is leased with features of {cache_phase}, and was with those of {first}"
                );
                return self.violated(now, what);
            }
        }
    }

    pub fn record(&mut self, now: Duration, record: &Record) {
        match record {
            Record::Step(step) => self.step(now, step),
            Record::Generation { generation, .. } => {
                if *generation <= self.newest {
                    self.violated(now, format!("generation {generation} is formed after {}", self.newest));
                }
                self.newest = *generation;
            }
            Record::Started { generation, first_step, .. } => {
                if *generation != self.newest {
                    self.violated(now, format!("generation {generation} starts, but {} lives", self.newest));
                }
                if first_step.0 > self.committed {
                    self.violated(
                        now,
                        format!("start at {first_step}, but {} steps are committed", self.committed),
                    );
                }
                if first_step.0 < self.committed {
                    self.rollback_told = Some((Step(self.committed), *first_step));
                    self.repeated += self.committed - first_step.0;
                    self.steps.retain(|step, _| *step < first_step.0);
                    self.committed = first_step.0;
                }
            }
            Record::Spent(spent) => self.restarts = spent.restarts,
            _ => {}
        }
    }

    fn step(&mut self, now: Duration, step: &CommittedStep) {
        let number = step.step.0;
        if number != self.committed {
            self.violated(now, format!("step {number} is committed after {} steps", self.committed));
        }
        let due = self.plan.batch(step.step);
        if (step.consumed.epoch, step.consumed.positions.clone()) != (due.epoch, due.positions) {
            self.violated(now, format!("step {number} is committed with other samples than its own"));
        }
        // A complete checkpoint proves the steps before it, even if the ranks that did them are gone with
        // their reports. Their generation is not known then: the record names the one that goes on from
        // there.
        let is_proven = step.reports == 0
            && number < self.saved
            && self.executed.iter().any(|(_, executed)| *executed == number);
        if !is_proven && !self.executed.contains(&(step.generation, number)) {
            let generation = step.generation;
            self.violated(
                now,
                format!("step {number} is committed, but not all of generation {generation} did it"),
            );
        }
        self.steps.insert(number, step.clone());
        self.committed = number + 1;
    }

    pub fn news(&mut self, now: Duration, news: &News) {
        match news {
            News::Failure(failure, _) if failure.fatal => {
                self.lines.push((now, format!("the end: {failure}")))
            }
            News::Failure(failure, _) | News::LostOutside(failure, _) => {
                self.lines.push((now, format!("lost: {failure}")))
            }
            News::Recovered(recovery) => {
                self.recoveries.push(recovery.took);
                self.lines.push((now, recovery.to_string()));
            }
            News::RolledBack { from, to } => {
                if self.rollback_told.take() != Some((*from, *to)) {
                    self.violated(
                        now,
                        format!("a rollback from {from} to {to} is told, but another happened"),
                    );
                }
                let lost = from.0 - to.0;
                self.lines
                    .push((now, format!("rolled back from step {from} to {to}: {lost} steps are repeated")));
            }
            News::Standstill(slot, text) => self.lines.push((now, format!("rank {slot} {text}"))),
            News::Cordoned(slot, health) => {
                self.lines.push((now, format!("rank {slot} is cordoned after {} faults", health.faults)));
            }
            News::Slow(slot, slow) => self.slow(now, *slot, slow.as_ref()),
            News::Member { change, .. } if self.verbose => self.lines.push((now, change.to_string())),
            News::Phase(phase, reason) if self.verbose => {
                self.lines.push((now, format!("{phase}: {reason}")))
            }
            _ => {}
        }
    }

    /// A rank is called slow, or well again: no other than one that was slowed down.
    fn slow(&mut self, now: Duration, slot: Slot, slow: Option<&Slowness>) {
        match slow {
            Some(_) if !self.slowed.contains(&slot) => {
                self.violated(now, format!("rank {slot} is called slow, and computes as fast as the others"));
            }
            Some(slow) => self.lines.push((now, format!("rank {slot} is slow: {slow}"))),
            None => self.lines.push((now, format!("rank {slot} is no longer slow"))),
        }
    }

    pub fn says(&mut self, now: Duration, line: String) {
        self.lines.push((now, line));
    }

    /// The disk has forgotten what it said it had. Where nothing at all is left of the journal, the newest
    /// checkpoint proves the steps before it.
    pub fn forgets(&mut self, now: Duration, past: &Past, checkpoint: Option<u64>) {
        let proven = checkpoint.filter(|_| past.committed.is_none()).unwrap_or_default();
        self.proven = self.proven.max(proven);
        let committed = past.committed.map_or(proven, |committed| committed.0);
        self.lines
            .push((now, format!("the journal has lost its end: {committed} steps of {}", self.committed)));
        self.steps.retain(|step, _| *step < committed);
        self.committed = committed;
        self.newest = past.newest().map(|(generation, _)| generation).unwrap_or_default();
        self.rollback_told = None;
    }

    /// A coordinator that was restarted must know what the one before had decided.
    pub fn recalled(&mut self, machine: &Machine) {
        let now = Duration::ZERO;
        // The one before may have been killed before it could tell.
        self.rollback_told = None;
        if machine.committed().0 != self.committed {
            let (found, due) = (machine.committed(), self.committed);
            self.violated(
                now,
                format!("a coordinator came back with {found} committed steps instead of {due}"),
            );
        }
    }

    pub fn agrees_with(&mut self, now: Duration, machine: &Machine) {
        if machine.committed().0 != self.committed {
            let shown = machine.committed();
            self.violated(now, format!("{shown} steps are shown, but {} are recorded", self.committed));
        }
        if let Some((from, to)) = self.rollback_told {
            self.violated(now, format!("a rollback from {from} to {to} was not told"));
        }
    }

    /// The end of a run that ended.
    pub fn close(mut self, now: Duration, outcome: Outcome, script: &Script) -> Report {
        if !self.closing.is_empty() && !matches!(outcome, Outcome::Failed(_)) {
            self.violated(now, "a run that had failed has ended in another way".into());
        }
        if let Outcome::Finished { steps } = &outcome
            && (steps.0 != script.steps || self.committed != script.steps)
        {
            self.violated(now, format!("finished after {steps} of {} steps", script.steps));
        }
        self.report(now, Some(outcome), script)
    }

    /// The end of a run whose coordinator cannot be started any more.
    pub fn refuses(self, now: Duration, why: String, script: &Script) -> Report {
        Report { refused: Some(why), ..self.report(now, None, script) }
    }

    /// The end of a run in which nothing happens any more.
    pub fn hung(mut self, now: Duration, state: &str, script: &Script) -> Report {
        if self.violations.is_empty() {
            self.violated(now, format!("the run hangs: {state}"));
        }
        self.report(now, None, script)
    }

    fn report(self, now: Duration, outcome: Option<Outcome>, script: &Script) -> Report {
        let (missing, duplicate) = self.audit();
        let mut violations = self.violations;
        if missing + duplicate > 0 {
            violations.push(format!("audit: {missing} samples are missing, {duplicate} are there twice"));
        }
        Report {
            outcome,
            took: now,
            steps: script.steps,
            committed: self.committed,
            repeated: self.repeated,
            recoveries: self.recoveries,
            restarts: self.restarts,
            faults: self.faults,
            missing,
            duplicate,
            refused: None,
            lines: self.lines,
            violations,
            undisturbed: Duration::from_secs_f64(
                (script.load_ms + self.committed as f64 * script.step_ms) / 1e3,
            ),
        }
    }

    /// Lays the committed steps' positions side by side, epoch by epoch: samples that are missing, and there
    /// more than once.
    fn audit(&self) -> (u64, u64) {
        let mut epochs: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        let samples = self.plan.samples() as usize;
        let proven = (0..self.proven).filter(|step| !self.steps.contains_key(step));
        let proven = proven.map(|step| self.plan.batch(Step(step))).map(|due| (due.epoch, due.positions));
        let recorded = self.steps.values().map(|step| (step.consumed.epoch, step.consumed.positions.clone()));
        let mut newest = 0;
        for (epoch, positions) in proven.chain(recorded) {
            newest = positions.end as usize;
            let seen = epochs.entry(epoch).or_insert_with(|| vec![0; samples]);
            for position in positions {
                if let Some(count) = seen.get_mut(position as usize) {
                    *count += 1;
                }
            }
        }
        let last = epochs.keys().next_back().copied();
        let (mut missing, mut duplicate) = (0, 0);
        for (epoch, seen) in epochs {
            // Of the begun epoch, what lies behind the last committed step.
            let end = if Some(epoch) == last { newest } else { samples };
            missing += seen[..end].iter().filter(|count| **count == 0).count() as u64;
            duplicate += seen.iter().map(|count| u64::from(count.saturating_sub(1))).sum::<u64>();
        }
        (missing, duplicate)
    }
}
