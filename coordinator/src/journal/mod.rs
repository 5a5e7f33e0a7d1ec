//! What outlives a coordinator: the run's identity, its memberships, committed steps and checkpoints.
//!
//! The driver appends the records of a batch in one durable transaction before it answers anybody, so whatever a worker or a
//! person was told is on disk. [`Durable`] keeps them in an embedded store; [`Forgetful`] is the null object of a run without a
//! state directory. The store lives on a thread of its own: waiting for a disk never holds up the runtime.

mod chronicle;
mod durable;
mod forgetful;
mod history;
mod reading;
mod rows;

use std::{ops::Range, path::PathBuf};

pub use chronicle::{Chronicle, read};
use coxswain_proto::{
    ids::{Generation, Rank, Step},
    run_spec::RunSpec,
};
pub use durable::{Durable, Life, Memory};
pub use forgetful::Forgetful;
pub use history::{Fate, History, Membership};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use crate::core::{action::Record, report::CommittedStep};

/// Whose journal it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Names the run among runs.
    pub run_id: String,
    /// `run.name`.
    pub run_name: String,
    /// Names what is learned.
    pub spec_digest: String,
    /// The specification as JSON, to say what differs.
    pub spec: String,
}

impl Identity {
    /// The identity of a run of this specification.
    pub fn new(spec: &RunSpec, run_id: String) -> Self {
        let document = coxswain_proto::v1::RunSpecDocument::from(spec);
        Self { run_id, run_name: spec.run.name.clone(), spec_digest: document.digest, spec: document.json }
    }
}

/// One committed step as the ledger shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LedgerEntry {
    /// Which step.
    pub step: Step,
    /// Which epoch its samples belong to.
    pub epoch: u64,
    /// The membership that did it.
    pub generation: Generation,
    /// Ranks in that membership.
    pub world: u32,
    /// Positions of the epoch's order, over all ranks.
    pub positions: Range<u64>,
    /// Mean loss of a valid element; 0 when nobody's report of it was left.
    pub loss: f64,
    /// Times the step was voted down before it was committed.
    #[serde(default)]
    pub retries: u32,
    /// The generation of the feature cache that it took its features from; 0 for none.
    #[serde(default)]
    pub cache_generation: u64,
    /// Samples whose features were there, over all ranks.
    #[serde(default)]
    pub cache_hits: u64,
    /// Samples whose features were computed.
    #[serde(default)]
    pub cache_misses: u64,
    /// Ranks whose reports were there when it was committed.
    #[serde(default)]
    pub reports: u32,
    /// Positions among them that nobody consumed: their samples failed on several workers.
    #[serde(default)]
    pub left_out: Vec<Range<u64>>,
}

impl LedgerEntry {
    /// The positions that a rank consumed.
    pub fn of_rank(&self, rank: Rank) -> Range<u64> {
        let batch = coxswain_proto::plan::Batch { epoch: self.epoch, positions: self.positions.clone() };
        batch.of_rank(rank, self.world)
    }
}

impl From<&CommittedStep> for LedgerEntry {
    fn from(step: &CommittedStep) -> Self {
        Self {
            step: step.step,
            epoch: step.epoch,
            generation: step.generation,
            world: step.world,
            positions: step.positions.clone(),
            loss: step.totals.loss(),
            retries: step.retries,
            cache_generation: step.cache_generation,
            cache_hits: step.cache.hits,
            cache_misses: step.cache.misses,
            reports: step.reports,
            left_out: step.left_out.clone(),
        }
    }
}

/// Where records go.
pub trait Journal: Send {
    /// Makes records durable, all or none.
    fn append(&mut self, records: &[Record]) -> Result<(), JournalError>;

    /// At most `limit` committed steps from `first` on, in order.
    fn ledger(&self, first: Step, limit: usize) -> Result<Vec<LedgerEntry>, JournalError>;

    /// What there is beside the ledger.
    fn history(&self) -> Result<History, JournalError>;
}

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// It belongs to another run.
    #[error(
        "state directory {} {}: {difference}. Give this run another run.output_dir, or remove that directory to begin anew",
        directory.display(), whose(theirs, ours)
    )]
    OtherRun {
        /// Where it lies.
        directory: PathBuf,
        /// Whose it is.
        theirs: Box<Identity>,
        /// Who asked.
        ours: Box<Identity>,
        /// What differs.
        difference: String,
    },
    /// Another coordinator has it open.
    #[error("state directory {} is in use: another coordinator runs this very run; stop it first", directory.display())]
    InUse {
        /// Where it lies.
        directory: PathBuf,
    },
    /// It cannot be read or written.
    #[error("cannot {action} the journal in {}: {reason}", directory.display())]
    Store {
        /// `open`, `read`, `write`.
        action: &'static str,
        /// Where it lies.
        directory: PathBuf,
        /// What the store or the operating system said.
        reason: String,
    },
    /// A row cannot be what was written.
    #[error(
        "the journal in {} is damaged: row {row} of table {table}: {reason}. Restore the file from a copy, or give the run another \
         run.output_dir to begin anew",
        directory.display()
    )]
    Damaged {
        /// Where it lies.
        directory: PathBuf,
        /// Which table.
        table: &'static str,
        /// Which row.
        row: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The journal's thread has ended.
    #[error("the journal's thread has ended")]
    Gone,
}

/// Which run's a state directory is that is not ours.
fn whose(theirs: &Identity, ours: &Identity) -> String {
    match theirs.run_id == ours.run_id {
        true => "was begun by this run with another configuration".to_owned(),
        false => format!("belongs to run {}, but this is run {}", theirs.run_id, ours.run_id),
    }
}

/// The journal's thread, seen from the driver.
#[derive(Clone, Debug)]
pub struct JournalThread {
    calls: mpsc::Sender<Call>,
}

#[derive(Debug)]
enum Call {
    Append(Vec<Record>, oneshot::Sender<Result<(), JournalError>>),
    Ledger(Step, usize, oneshot::Sender<Result<Vec<LedgerEntry>, JournalError>>),
    History(oneshot::Sender<Result<History, JournalError>>),
    Close(oneshot::Sender<()>),
}

impl JournalThread {
    /// Calls that wait for the disk; more of them hold the driver back.
    const QUEUE: usize = 16;

    /// Moves a journal to its thread, which ends when it is closed or the last handle is dropped.
    pub fn spawn(mut journal: Box<dyn Journal>) -> std::io::Result<Self> {
        let (calls, mut inbox) = mpsc::channel(Self::QUEUE);
        std::thread::Builder::new().name("journal".into()).spawn(move || {
            while let Some(call) = inbox.blocking_recv() {
                // A caller that has gone does not want the answer.
                match call {
                    Call::Append(records, reply) => drop(reply.send(journal.append(&records))),
                    Call::Ledger(first, limit, reply) => drop(reply.send(journal.ledger(first, limit))),
                    Call::History(reply) => drop(reply.send(journal.history())),
                    Call::Close(closed) => {
                        drop(journal);
                        let _ = closed.send(());
                        break;
                    }
                }
            }
        })?;
        Ok(Self { calls })
    }

    /// Makes records durable.
    pub async fn append(&self, records: Vec<Record>) -> Result<(), JournalError> {
        let (reply, answer) = oneshot::channel();
        self.calls.send(Call::Append(records, reply)).await.map_err(|_| JournalError::Gone)?;
        answer.await.map_err(|_| JournalError::Gone)?
    }

    /// Gives the state directory back, whoever still holds a handle. Later calls find the journal gone.
    pub async fn close(&self) {
        let (closed, done) = oneshot::channel();
        if self.calls.send(Call::Close(closed)).await.is_ok() {
            // A thread that has ended has closed it, too.
            drop(done.await);
        }
    }

    /// At most `limit` committed steps from `first` on, in order.
    pub async fn ledger(&self, first: Step, limit: usize) -> Result<Vec<LedgerEntry>, JournalError> {
        let (reply, answer) = oneshot::channel();
        self.calls.send(Call::Ledger(first, limit, reply)).await.map_err(|_| JournalError::Gone)?;
        answer.await.map_err(|_| JournalError::Gone)?
    }

    /// What there is beside the ledger.
    pub async fn history(&self) -> Result<History, JournalError> {
        let (reply, answer) = oneshot::channel();
        self.calls.send(Call::History(reply)).await.map_err(|_| JournalError::Gone)?;
        answer.await.map_err(|_| JournalError::Gone)?
    }
}
