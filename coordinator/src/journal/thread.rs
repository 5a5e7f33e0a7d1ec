//! What every journal can do, and the thread that it does it on.

use coxswain_proto::ids::Step;
use tokio::sync::{mpsc, oneshot};

use super::{entry::LedgerEntry, history::History, identity::JournalError};
use crate::core::action::Record;

/// Where records go.
pub trait Journal: Send {
    /// Makes records durable, all or none.
    fn append(&mut self, records: &[Record]) -> Result<(), JournalError>;

    /// At most `limit` committed steps from `first` on, in order.
    fn ledger(&self, first: Step, limit: usize) -> Result<Vec<LedgerEntry>, JournalError>;

    /// What there is beside the ledger.
    fn history(&self) -> Result<History, JournalError>;

    /// Leaves a copy as it is now, which belongs to the checkpoint of this step, if copies are wanted.
    fn copy_for(&self, _checkpoint: Step) -> Result<(), JournalError> {
        Ok(())
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
    CopyFor(Step, oneshot::Sender<Result<(), JournalError>>),
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
                    Call::CopyFor(step, reply) => drop(reply.send(journal.copy_for(step))),
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

    /// Gives the state directory back, even while others hold a handle. Later calls find the journal gone.
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

    /// Leaves a copy that belongs to the checkpoint of this step, where those are wanted.
    pub async fn copy_for(&self, checkpoint: Step) -> Result<(), JournalError> {
        let (reply, answer) = oneshot::channel();
        self.calls.send(Call::CopyFor(checkpoint, reply)).await.map_err(|_| JournalError::Gone)?;
        answer.await.map_err(|_| JournalError::Gone)?
    }
}
