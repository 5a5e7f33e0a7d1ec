//! What every journal can do, and the two threads that it does it on: records are appended on one and read on
//! another, in transactions of their own, so that no reader stands in a record's way.

use std::{io, thread};

use coxswain_proto::{ids::Step, limits::MAX_RECORD_READS};
use tokio::sync::{mpsc, oneshot};

use super::{entry::LedgerEntry, history::History, identity::JournalError};
use crate::{clock, core::action::Record, ration::Ration};

/// Where records go.
pub trait Journal: Send {
    /// Makes records durable, all or none.
    fn append(&mut self, records: &[Record]) -> Result<(), JournalError>;

    /// What reads them while more are appended.
    fn reader(&self) -> Box<dyn JournalReader>;

    /// Leaves a copy as it is now, which belongs to the checkpoint of this step, if copies are wanted.
    fn copy_for(&self, _checkpoint: Step) -> Result<(), JournalError> {
        Ok(())
    }

    /// Lets go of the state directory, though there are readers.
    fn close(&mut self) {}
}

/// Reads what was appended.
pub trait JournalReader: Send {
    /// At most `limit` committed steps from `first` on, in order.
    fn ledger(&self, first: Step, limit: usize) -> Result<Vec<LedgerEntry>, JournalError>;

    /// What there is beside the ledger.
    fn history(&self) -> Result<History, JournalError>;
}

/// The journal's threads, seen from the driver.
#[derive(Clone, Debug)]
pub struct JournalThread {
    calls: mpsc::Sender<Call>,
    reads: mpsc::Sender<RecordRead>,
}

#[derive(Debug)]
enum Call {
    Append(Vec<Record>, oneshot::Sender<Result<(), JournalError>>),
    CopyFor(Step, oneshot::Sender<Result<(), JournalError>>),
    Close(oneshot::Sender<()>),
}

#[derive(Debug)]
enum RecordRead {
    Ledger(Step, usize, oneshot::Sender<Result<Vec<LedgerEntry>, JournalError>>),
    History(oneshot::Sender<Result<History, JournalError>>),
}

impl JournalThread {
    /// Calls that wait for the disk; more of them hold the driver back.
    const QUEUE: usize = 16;

    /// Moves a journal to its threads, which end when the last handle is dropped.
    pub fn spawn(journal: Box<dyn Journal>) -> io::Result<Self> {
        let (calls, inbox) = mpsc::channel(Self::QUEUE);
        let (reads, asked) = mpsc::channel(MAX_RECORD_READS.0);
        let reader = journal.reader();
        thread::Builder::new().name("journal".into()).spawn(move || append_all(journal, inbox))?;
        thread::Builder::new().name("journal-reads".into()).spawn(move || read_all(&*reader, asked))?;
        Ok(Self { calls, reads })
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
        self.reads.send(RecordRead::Ledger(first, limit, reply)).await.map_err(|_| JournalError::Gone)?;
        answer.await.map_err(|_| JournalError::Gone)?
    }

    /// What there is beside the ledger.
    pub async fn history(&self) -> Result<History, JournalError> {
        let (reply, answer) = oneshot::channel();
        self.reads.send(RecordRead::History(reply)).await.map_err(|_| JournalError::Gone)?;
        answer.await.map_err(|_| JournalError::Gone)?
    }

    /// Leaves a copy that belongs to the checkpoint of this step, where those are wanted.
    pub async fn copy_for(&self, checkpoint: Step) -> Result<(), JournalError> {
        let (reply, answer) = oneshot::channel();
        self.calls.send(Call::CopyFor(checkpoint, reply)).await.map_err(|_| JournalError::Gone)?;
        answer.await.map_err(|_| JournalError::Gone)?
    }
}

fn append_all(mut journal: Box<dyn Journal>, mut calls: mpsc::Receiver<Call>) {
    while let Some(call) = calls.blocking_recv() {
        // A caller that has gone does not want the answer.
        match call {
            Call::Append(records, reply) => drop(reply.send(journal.append(&records))),
            Call::CopyFor(step, reply) => drop(reply.send(journal.copy_for(step))),
            Call::Close(closed) => {
                journal.close();
                let _ = closed.send(());
                break;
            }
        }
    }
}

/// Reads no more than its ration of a processor's time: those who ask for page after page wait.
fn read_all(journal: &dyn JournalReader, mut reads: mpsc::Receiver<RecordRead>) {
    let mut ration = Ration::full(clock::monotonic());
    while let Some(read) = reads.blocking_recv() {
        thread::sleep(ration.wait(clock::monotonic()));
        let began = clock::monotonic();
        match read {
            RecordRead::Ledger(first, limit, reply) if !reply.is_closed() => {
                drop(reply.send(journal.ledger(first, limit)));
            }
            RecordRead::History(reply) if !reply.is_closed() => drop(reply.send(journal.history())),
            // The caller has gone.
            RecordRead::Ledger(..) | RecordRead::History(_) => {}
        }
        ration.spend(clock::monotonic(), began.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, Barrier},
        time::Duration,
    };

    use coxswain_proto::limits::{READ_CREDIT, READ_SHARE};

    use super::*;

    /// A journal whose readers stand still until they are let go.
    struct HeldJournal(Arc<Barrier>);

    impl Journal for HeldJournal {
        fn append(&mut self, _: &[Record]) -> Result<(), JournalError> {
            Ok(())
        }

        fn reader(&self) -> Box<dyn JournalReader> {
            Box::new(Self(self.0.clone()))
        }
    }

    impl JournalReader for HeldJournal {
        fn ledger(&self, _: Step, _: usize) -> Result<Vec<LedgerEntry>, JournalError> {
            self.0.wait();
            self.0.wait();
            Ok(Vec::new())
        }

        fn history(&self) -> Result<History, JournalError> {
            Ok(History::default())
        }
    }

    /// A journal of which each page takes a little longer than all readers may at once.
    struct SlowJournal;

    const OVER: Duration = Duration::from_millis(50);

    impl Journal for SlowJournal {
        fn append(&mut self, _: &[Record]) -> Result<(), JournalError> {
            Ok(())
        }

        fn reader(&self) -> Box<dyn JournalReader> {
            Box::new(Self)
        }
    }

    impl JournalReader for SlowJournal {
        fn ledger(&self, _: Step, _: usize) -> Result<Vec<LedgerEntry>, JournalError> {
            thread::sleep(READ_CREDIT + OVER);
            Ok(Vec::new())
        }

        fn history(&self) -> Result<History, JournalError> {
            Ok(History::default())
        }
    }

    #[tokio::test]
    async fn who_asks_for_page_after_page_waits_for_a_share_of_the_processor() {
        let journal = JournalThread::spawn(Box::new(SlowJournal)).expect("threads");
        journal.ledger(Step(0), 1).await.expect("the credit is there");
        let asked = clock::monotonic();
        journal.ledger(Step(0), 1).await.expect("in its turn");
        let waited = asked.elapsed().saturating_sub(READ_CREDIT + OVER);
        assert!(waited >= OVER * READ_SHARE / 2, "{waited:?}");
        journal.close().await;
    }

    #[tokio::test]
    async fn a_reader_of_the_ledger_holds_no_record_up() {
        let gate = Arc::new(Barrier::new(2));
        let journal = JournalThread::spawn(Box::new(HeldJournal(gate.clone()))).expect("threads");
        let reading = tokio::spawn({
            let journal = journal.clone();
            async move { journal.ledger(Step(0), 1).await }
        });
        tokio::task::yield_now().await;
        gate.wait();
        for _ in 0..3 {
            journal.append(Vec::new()).await.expect("it is appended while somebody reads");
        }
        gate.wait();
        assert_eq!(reading.await.expect("it ends").expect("it is read"), Vec::new());
        journal.close().await;
    }
}
