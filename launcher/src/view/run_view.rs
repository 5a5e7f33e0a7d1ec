//! What is known of one run: a value that updates go into.

use std::collections::{BTreeMap, VecDeque};

use coxswain_coordinator::log::time_of_day;
use coxswain_proto::{
    replicas::Placement,
    v1::{
        GetMemoryResponse, GetStatusResponse, RankStatus, RunPhase, StepCommitted, WatchEvent, WorkerPhase,
        watch_event::Kind,
    },
};

use super::series::Series;
use crate::render::{events, log_line::LogLine, names};

/// Lines of a run's log, and checkpoints, that are kept.
const LINES: usize = 256;

/// Where a run is read from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// Not known yet.
    #[default]
    Unknown,
    /// Coordinator.
    Coordinator,
    /// Files, and why.
    Files(String),
    /// Nowhere, and why.
    Nothing(String),
}

/// Something that was learned of a run.
#[derive(Debug)]
pub enum Update {
    /// It is read from there from here on; all before is read again.
    Source(Source),
    /// How it stands.
    Status(Box<GetStatusResponse>),
    /// It has committed a step, or something else happened.
    Event(Box<WatchEvent>),
    /// Lines of its coordinator's log.
    Logged(Vec<String>),
    /// Losses by committed steps, from its ledger.
    Losses(Vec<(u64, f64)>),
    /// Ranks' memory.
    Memory(Box<GetMemoryResponse>),
    /// What has become of an order.
    Message(String),
}

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Time of day.
    pub time: String,
    /// What is told.
    pub text: String,
    /// Something is wrong.
    pub warns: bool,
}

/// One run.
#[derive(Debug, Default)]
pub struct RunView {
    /// As the user named it.
    pub label: String,
    /// Where it is read from.
    pub source: Source,
    /// How it stands.
    pub status: GetStatusResponse,
    /// The newest step.
    pub step: Option<StepCommitted>,
    /// Losses by step.
    pub loss: Series,
    /// Samples a second by step.
    pub speed: Series,
    /// Measured and predicted peak of each rank in bytes, where they are compared.
    pub memory: BTreeMap<u32, (u64, u64)>,
    /// The log, without steps.
    pub log: VecDeque<LogEntry>,
    /// What has become of the last order.
    pub message: String,
}

impl RunView {
    /// A run of which nothing is known yet.
    pub fn new(label: String) -> Self {
        Self { label, ..Self::default() }
    }

    /// Name.
    pub fn name(&self) -> &str {
        if self.status.run_name.is_empty() { &self.label } else { &self.status.run_name }
    }

    /// Phase in plain words.
    pub fn phase(&self) -> String {
        match (&self.source, self.status.phase) {
            (Source::Unknown, _) => "looking for it".to_owned(),
            (_, 0) => "not running".to_owned(),
            (_, phase) => names::plain(&names::run_phase(phase)),
        }
    }

    /// Whether it will commit no more steps.
    pub fn is_over(&self) -> bool {
        matches!(self.status.phase(), RunPhase::Finished | RunPhase::Failed)
    }

    /// Whether there is a coordinator that takes orders for it.
    pub fn takes_orders(&self) -> bool {
        self.source == Source::Coordinator && !self.is_over()
    }

    /// Takes in what was learned.
    pub fn apply(&mut self, update: Update) {
        match update {
            Update::Source(source) => {
                let label = std::mem::take(&mut self.label);
                *self = Self { label, source, ..Self::default() };
            }
            Update::Status(status) => self.status = *status,
            Update::Event(event) => self.hear(&event),
            Update::Logged(lines) => lines.iter().for_each(|line| self.logged(line)),
            Update::Losses(losses) => losses.into_iter().for_each(|(step, loss)| self.loss.push(step, loss)),
            Update::Memory(memory) => {
                let compared =
                    memory.ranks.iter().filter_map(|rank| Some((rank.rank, rank.comparison.as_ref()?)));
                self.memory = compared.map(|(rank, of)| (rank, (of.measured, of.predicted))).collect();
            }
            Update::Message(text) => self.message = text,
        }
    }

    /// Takes in an event.
    pub fn hear(&mut self, event: &WatchEvent) {
        match &event.kind {
            Some(Kind::Status(status)) => self.status = status.clone(),
            Some(Kind::Step(step)) => {
                self.status.committed_steps = step.step + 1;
                self.status.total_steps = step.total_steps;
                self.status.epoch = step.epoch;
                if step.skipped.is_none() {
                    self.status.loss = step.loss;
                    self.loss.push(step.step + 1, step.loss);
                    self.speed.push(step.step + 1, step.samples_per_second);
                }
                self.step = Some(step.clone());
            }
            Some(kind) => {
                match kind {
                    Kind::Phase(changed) => {
                        self.status.phase = changed.phase;
                        self.status.reason.clone_from(&changed.reason);
                    }
                    Kind::Checkpoint(record) => {
                        self.status.checkpoints.push(record.clone());
                        let old = self.status.checkpoints.len().saturating_sub(LINES);
                        self.status.checkpoints.drain(..old);
                    }
                    _ => {}
                }
                let warns = matches!(kind, Kind::Failure(_));
                let (time, text) = (time_of_day(event.unix_ms), events::line(event));
                self.enter(LogEntry { time, text, warns });
            }
            None => {}
        }
    }

    fn logged(&mut self, line: &str) {
        let Some(line) = LogLine::parse(line) else { return };
        if let Some(step) = line.step() {
            // The log of a run that is over may be cut, and its journal knows better.
            let known = if self.is_over() { self.status.committed_steps } else { 0 };
            self.status.committed_steps = step.committed.max(known);
            self.status.total_steps = step.total;
            self.status.epoch = step.epoch;
            self.status.samples_per_second = step.samples_per_second;
            self.status.tokens_per_second = step.tokens_per_second;
            if let Some(loss) = step.loss {
                self.status.loss = loss;
                // The ledger knows it better, where there is one.
                self.loss.extend(step.committed, loss);
                self.speed.push(step.committed, step.samples_per_second);
                self.step = Some(StepCommitted {
                    step: step.committed.saturating_sub(1),
                    total_steps: step.total,
                    loss,
                    grad_norm: step.grad_norm,
                    learning_rate: step.learning_rate,
                    samples_per_second: step.samples_per_second,
                    tokens_per_second: step.tokens_per_second,
                    ..StepCommitted::default()
                });
                return;
            }
        }
        if !matches!(line.tag, "memory" | "day") {
            self.enter(LogEntry {
                time: line.time.to_owned(),
                text: line.text.to_owned(),
                warns: line.warns(),
            });
        }
    }

    fn enter(&mut self, entry: LogEntry) {
        self.log.push_back(entry);
        if self.log.len() > LINES {
            self.log.pop_front();
        }
    }

    /// Where the copy of a rank's optimizer state is: with a rank of another node where there is one, if that
    /// lives.
    pub fn replica(&self, rank: &RankStatus) -> String {
        let members: Vec<_> = self.status.ranks.iter().filter(|rank| !rank.spare).collect();
        let nodes: Vec<_> = members.iter().map(|rank| rank.node_rank).collect();
        let place = members.iter().position(|member| member.rank == rank.rank);
        let distance = Placement::of(&nodes).distance as usize;
        let holder = place.and_then(|place| members.get((place + distance) % members.len().max(1)));
        match holder.filter(|holder| holder.rank != rank.rank) {
            Some(holder) if holder.phase == i32::from(WorkerPhase::Done) => "-".to_owned(),
            Some(holder) if !holder.gone => format!("on {}", holder.rank),
            Some(_) => "lost".to_owned(),
            None => "-".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use coxswain_proto::v1::{Failure, PhaseChanged};

    use super::*;

    fn event(kind: Kind) -> Update {
        Update::Event(Box::new(WatchEvent { unix_ms: 0, kind: Some(kind) }))
    }

    #[test]
    fn a_run_is_told_by_its_log_as_by_its_events() {
        let mut told = RunView::new("runs/a".into());
        let log = "14:03:44  run     starting: generation 1 is complete\n14:03:45  step      1/400  epoch 0  loss 0.81230  grad 1.2500  lr 1.00e-4  16.7 samples/s  4267 tokens/s\n14:03:46  fail    warning: lost: rank 1\n14:03:46  memory  rank  host\nnot a line\n14:03:47  step      2/4";
        told.apply(Update::Logged(log.lines().map(str::to_owned).collect()));
        assert_eq!((told.status.committed_steps, told.status.total_steps), (1, 400));
        assert_eq!(told.loss.drawn(9), [(1.0, 0.8123)]);
        assert_eq!(told.log.iter().map(|entry| entry.warns).collect::<Vec<_>>(), [false, true, false]);
        let mut watched = RunView::new("runs/a".into());
        watched.apply(event(Kind::Step(StepCommitted {
            total_steps: 400,
            loss: 0.8123,
            ..Default::default()
        })));
        watched.apply(event(Kind::Failure(Failure::default())));
        let phase = RunPhase::Training.into();
        watched.apply(event(Kind::Phase(PhaseChanged { phase, reason: "why".into() })));
        assert_eq!(watched.loss.drawn(9), told.loss.drawn(9));
        assert_eq!(
            (watched.phase(), watched.log.len(), watched.name()),
            ("looking for it".into(), 2, "runs/a")
        );
        watched.apply(Update::Source(Source::Coordinator));
        assert!(watched.log.is_empty() && watched.loss.drawn(9).is_empty(), "all of it is read again");
    }

    #[test]
    fn a_log_that_is_cut_takes_no_step_from_a_run_that_is_over() {
        let (phase, committed_steps) = (RunPhase::Finished.into(), 25);
        let status = GetStatusResponse { phase, committed_steps, ..GetStatusResponse::default() };
        let mut view = RunView { status, ..RunView::default() };
        let line =
            "11:43:34  step     14/25  epoch 0  loss 1.8  grad 4.5  lr 5e-4  101 samples/s  2363 tokens/s";
        view.apply(Update::Logged(vec![line.to_owned()]));
        assert_eq!((view.status.committed_steps, view.status.total_steps), (25, 25));
    }

    #[test]
    fn the_replica_of_a_rank_is_with_the_next_one_or_on_another_node() {
        let rank = |rank, gone| RankStatus { rank, gone, ..RankStatus::default() };
        let ranks = vec![rank(0, false), rank(1, true), rank(2, false)];
        let status = GetStatusResponse { world_size: 3, ranks, ..GetStatusResponse::default() };
        let mut view = RunView { status, ..RunView::default() };
        let told: Vec<_> = view.status.ranks.iter().map(|rank| view.replica(rank)).collect();
        assert_eq!(told, ["lost", "on 2", "on 0"]);
        view.status = GetStatusResponse { world_size: 1, ranks: vec![rank(0, false)], ..Default::default() };
        assert_eq!(view.replica(&view.status.ranks[0]), "-");
        let on_nodes = |number| RankStatus { node_rank: number / 2, ..rank(number, false) };
        let ranks = (0..4).map(on_nodes).collect();
        view.status = GetStatusResponse { world_size: 4, ranks, ..GetStatusResponse::default() };
        let told: Vec<_> = view.status.ranks.iter().map(|rank| view.replica(rank)).collect();
        assert_eq!(told, ["on 2", "on 3", "on 0", "on 1"]);
    }
}
