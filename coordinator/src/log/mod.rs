//! The coordinator's log, the primary monitor of a run: news become one line each, with fields for machines.
//!
//! Every event has a target `coxswain::TAG`, a message that is a finished, aligned line, and the same facts
//! as fields. [`Human`] prints time, tag and line, and the date once a day; a JSON subscriber keeps the
//! fields, and [`WithMetrics`] makes the metrics among them JSON, too.

mod cache_lines;
mod human_format;
mod json_format;
mod lines;
mod memory;
mod spans;

pub(crate) use cache_lines::{line as cache_line, why};
use coxswain_proto::{human, ids::Step, report::CheckpointState};
pub use human_format::{Human, time_of_day};
pub use json_format::WithMetrics;
pub(crate) use lines::{cordoned, rolled_back, sample, set_aside, slow};
pub use memory::tables as memory_tables;
use spans::Spans;
use tracing::{debug, error, info, warn};

use crate::core::{
    action::SpentBudgets,
    checkpoints::CheckpointEntry,
    failure::Failure,
    memory::RankMemory,
    news::{MemberChange, News},
    reason::{Reason, RunPhase},
    report::CommittedStep,
    stragglers::Slowness,
};

/// Ranks beyond which single workers' comings and memory rows are left out of the log at its usual level.
const CROWD: u32 = 64;

/// Writes news to the log.
#[derive(Clone, Debug)]
pub struct Log {
    every: u64,
    written: Option<Step>,
    /// A fault is being dealt with: its two lines say what people need to know.
    recovering: bool,
    /// Training has begun: later generations are told by the lines of their faults.
    trained: bool,
    spans: Spans,
}

impl Log {
    /// A log of the run `run_id` with a line every `every` steps.
    pub fn new(run_id: &str, every: u64) -> Self {
        let spans = Spans::for_run(run_id);
        Self { every: every.max(1), written: None, recovering: false, trained: false, spans }
    }

    /// Writes one piece of news.
    pub fn write(&mut self, news: &News) {
        let _entered = self.spans.follow(news).entered();
        match news {
            News::Step(step) => self.step(step),
            // Told by the membership lines.
            News::Phase(_, Reason::Incomplete { .. }) => {}
            // The failure has its own line.
            News::Phase(_, Reason::Failed(_)) => {}
            News::Phase(phase, reason) => self.phase(*phase, reason),
            News::Member { generation, present, world, change } => {
                let generation = generation.0;
                let line = format!("{change} ({present} of {world} workers)");
                let detail =
                    matches!(change, MemberChange::LineClosed { .. } | MemberChange::LineOpened { .. });
                let stands_in = matches!(change, MemberChange::StandsIn { .. });
                if !stands_in && (*world > CROWD || self.recovering || detail) {
                    debug!(target: "coxswain::workers", generation, present, world, "{line}");
                } else {
                    info!(target: "coxswain::workers", generation, present, world, "{line}");
                }
            }
            News::Recovered(recovery) => {
                self.recovering = false;
                info!(
                    target: "coxswain::workers",
                    generation = recovery.generation.0,
                    first_step = recovery.first_step.0,
                    source = %recovery.source,
                    took_ms = recovery.took.as_secs_f64() * 1e3,
                    restarts = recovery.spent.restarts,
                    rescales = recovery.spent.rescales,
                    "{recovery}"
                );
            }
            News::RolledBack { from, to } => {
                let (from_step, to_step) = (from.0, to.0);
                warn!(target: "coxswain::run", from_step, to_step, "{}", lines::rolled_back(*from, *to));
            }
            News::Checkpoint(entry) => checkpoint(entry),
            News::Failure(failure, spent) => {
                self.recovering = !failure.fatal;
                first_cause(failure, spent);
            }
            News::LostOutside(failure, spent) => first_cause(failure, spent),
            News::Sample(at, verdict, failure) => {
                let (epoch, position, row) = (at.epoch, at.position, at.row.row);
                let line = lines::sample(at, *verdict, failure);
                warn!(target: "coxswain::sample", epoch, position, row, "{line}");
            }
            News::Consequence(failure) => {
                debug!(target: "coxswain::fail", rank = failure.slot.map(|slot| slot.0), "then {failure}");
            }
            News::Cache(news) => cache_lines::write(news),
            News::Note(slot, text) => {
                let rank = slot.0;
                info!(target: "coxswain::note", rank, "rank {rank}: {text}");
            }
            News::Standstill(slot, text) => {
                let rank = slot.0;
                warn!(target: "coxswain::workers", rank, "rank {rank} {text}");
            }
            News::Cordoned(slot, health) => {
                let (rank, faults, line) = (slot.0, health.faults, lines::cordoned(health));
                warn!(target: "coxswain::workers", rank, faults, "rank {rank} {line}");
            }
            News::Slow(slot, slow) => {
                let (rank, line) = (slot.0, lines::slow(slow.as_ref()));
                match slow {
                    Some(Slowness { part, factor, .. }) => {
                        warn!(target: "coxswain::workers", rank, %part, factor, "rank {rank} {line}");
                    }
                    None => info!(target: "coxswain::workers", rank, "rank {rank} {line}"),
                }
            }
            News::SetAside(slot, slow) => {
                let (rank, line) = (slot.0, lines::set_aside(slow));
                warn!(target: "coxswain::workers", rank, factor = slow.factor, "rank {rank} {line}");
            }
            News::Memory(table) => memory(table),
            News::Refused(refusal) => warn!(target: "coxswain::refuse", "{refusal}"),
        }
    }

    fn phase(&mut self, phase: RunPhase, reason: &Reason) {
        let routine = match reason {
            Reason::Committing => std::mem::replace(&mut self.trained, true),
            Reason::Formed { at_home, .. } => *at_home == 0,
            Reason::Regathering { .. } => true,
            Reason::Started { .. } => self.trained || self.recovering,
            _ => false,
        };
        if routine {
            debug!(target: "coxswain::run", phase = %phase, "{phase}: {reason}");
        } else {
            info!(target: "coxswain::run", phase = %phase, "{phase}: {reason}");
        }
    }

    fn step(&mut self, step: &CommittedStep) {
        if let Some(skipped) = &step.skipped {
            let (number, samples) = (step.step.0, &skipped.samples);
            warn!(target: "coxswain::step", step = number, ?samples, "{}", lines::skipped(step, skipped));
            return;
        }
        let committed = step.step.0 + 1;
        let due =
            self.written.is_none() || committed.is_multiple_of(self.every) || committed == step.total_steps;
        if !due {
            return;
        }
        self.written = Some(step.step);
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        let times = &step.times;
        info!(
            target: "coxswain::step",
            step = step.step.0,
            committed,
            total = step.total_steps,
            epoch = step.consumed.epoch,
            loss = step.totals.loss(),
            grad_norm = step.totals.grad_norm,
            learning_rate = step.learning_rate(),
            samples_per_second = step.samples_per_second(),
            tokens_per_second = step.tokens_per_second(),
            total_ms = ms(times.total),
            data_ms = ms(times.data),
            optimizer_ms = ms(times.optimizer),
            communication_ms = ms(times.communication),
            cache_generation = step.cache_generation,
            cache_hits = step.cache.hits,
            cache_misses = step.cache.misses,
            memory_peak = step.memory_peak.bytes.0,
            memory_peak_rank = step.memory_peak.slot.0,
            metrics = json_format::packed(&step.metrics),
            "{}", lines::step(step)
        );
    }
}

fn checkpoint(entry: &CheckpointEntry) {
    let CheckpointEntry { step, path, bytes, state } = entry;
    let size = human::bytes(bytes.0);
    let (step, bytes) = (step.0, bytes.0);
    match state {
        CheckpointState::Complete => {
            info!(target: "coxswain::save", step, bytes, path, "checkpoint at step {step}: {path}, {size}");
        }
        CheckpointState::Failed => {
            warn!(target: "coxswain::save", step, path, "checkpoint at step {step} was not written; training continues");
        }
    }
}

fn first_cause(failure: &Failure, spent: &SpentBudgets) {
    let text = lines::one_line(&failure.to_string());
    let victims: Vec<_> = failure.victims.iter().map(|slot| slot.0).collect();
    macro_rules! told {
        ($level:ident, $($line:tt)+) => {
            $level!(
                target: "coxswain::fail",
                rank = failure.slot.map(|slot| slot.0),
                host = failure.host,
                kind = ?failure.kind,
                generation = failure.generation.0,
                phase = %failure.phase,
                step = failure.step.0,
                collective = failure.collective,
                positions = ?failure.positions,
                memory_in_use = failure.memory_in_use.0,
                victims = ?victims,
                restarts = spent.restarts,
                $($line)+
            )
        };
    }
    match failure.fatal {
        true if victims.is_empty() => told!(error, "first cause: {text}"),
        true => told!(error, "first cause: {text} (victims: {})", lines::ranks(&victims)),
        false => told!(warn, "lost: {text}"),
    }
}

fn memory(table: &[RankMemory]) {
    info!(target: "coxswain::memory", "{}", memory::rank_head());
    for row in memory::largest(table, CROWD as usize) {
        let (rank, host) = (row.slot.0, row.host.as_str());
        let (peak, comparison) = (row.peak(), row.comparison.as_ref());
        info!(
            target: "coxswain::memory",
            rank,
            host,
            peak_in_use = peak.map(|peak| peak.in_use.0),
            peak_phase = peak.map(|peak| peak.phase.name()),
            predicted = comparison.map(|comparison| comparison.predicted),
            measured = comparison.map(|comparison| comparison.measured),
            "{}", memory::rank(row)
        );
    }
    for line in memory::phases(table).into_iter().chain(memory::prediction(table)) {
        info!(target: "coxswain::memory", "{line}");
    }
}
