//! Storing beside training: a thread of its own appends records, publishes shards, and leaves word in
//! namespaces.
//!
//! ```text
//! trainer:  Begin(namespace) ─▶ Keep(records) ─▶ Keep ─▶ Publish ─▶ ..
//!           at most FEATURES_WAITING orders; then the trainer waits
//! thread:   append, publish at 64 MiB, at Publish, at the next Begin, at the end
//! back:     what was written, what went wrong: news, looked at by the trainer between steps
//! ```
//!
//! Encoding, checksums, writes and fsync cost the trainer nothing, but for the memory of the orders that
//! wait. [`StoreWriter::settle`] is the one place that always waits: where others may count on a shard, which
//! is when an epoch, a cache phase, or the run ends, and before a checkpoint. What fails ends storing until
//! then, never training: a disk that was full or away may be well again.
//!
//! A trainer that waits here shows the thread's signs of motion as its own, so that a slow disk is not taken
//! for a rank that stands still.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use coxswain_proto::limits::FEATURES_WAITING;

use super::adapter::AdapterSnapshot;
use super::{account::Complaint, adapter};
use coxswain_feature_store::{Coverage, Namespace, Record, SampleKey, ShardWriter, Store, StoreError};
use coxswain_nn::pulse::{self, Pulse};
use coxswain_task::Inputs;

/// Between two looks at whether there is room for another order; storing one takes as long or longer.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Features of some samples, computed and not rounded, on their way to the store.
#[derive(Debug, Default)]
pub(super) struct ComputedFeatures {
    /// What they belong to.
    pub rows: Vec<MadeRow>,
    /// All values, row after row.
    pub values: Vec<f32>,
}

/// One sample among them.
#[derive(Debug)]
pub(super) struct MadeRow {
    pub key: SampleKey,
    pub inputs: Inputs,
    /// Place among the values.
    pub place: Range<usize>,
}

impl ComputedFeatures {
    /// These after those.
    pub fn append(&mut self, other: Self) {
        let begin = self.values.len();
        self.values.extend(other.values);
        let moved = |row: MadeRow| MadeRow { place: row.place.start + begin..row.place.end + begin, ..row };
        self.rows.extend(other.rows.into_iter().map(moved));
    }
}

/// What the thread has to tell.
#[derive(Debug, Default)]
pub(super) struct News {
    /// Records appended to shards, published or not.
    pub kept: u64,
    /// Records that others can see now.
    pub published: usize,
    /// What went wrong, for people.
    pub complaints: Vec<Complaint>,
}

/// The trainer's end.
pub(super) struct StoreWriter {
    orders: Option<SyncSender<Order>>,
    news: Arc<Mutex<News>>,
    /// Whether the thread gets on.
    pulse: Arc<Pulse>,
    thread: Option<JoinHandle<()>>,
}

enum Order {
    /// What follows belongs to this namespace; nothing is stored if there is none.
    Begin(Option<Namespace>),
    Keep(ComputedFeatures),
    Publish,
    SaveAdapter(Arc<AdapterSnapshot>),
    /// Says in the namespace how many of a run's samples are stored.
    Note {
        run: String,
        samples: Arc<[SampleKey]>,
    },
    Settle(SyncSender<()>),
}

impl StoreWriter {
    /// Starts the thread.
    pub fn start(store: &Store) -> Result<Self, StoreError> {
        let (orders, taken) = sync_channel(FEATURES_WAITING);
        let news = Arc::<Mutex<News>>::default();
        let mut storing = StoreThread { namespace: None, shard: None, full: false, news: news.clone() };
        let pulse = Arc::<Pulse>::default();
        let own = pulse.clone();
        let thread = thread::Builder::new().name("store".into()).spawn(move || {
            own.install();
            storing.work(&taken);
        });
        let thread = thread.map_err(|source| StoreError::Io {
            action: "start a thread for",
            path: store.dir().to_path_buf(),
            source,
        })?;
        Ok(Self { orders: Some(orders), news, pulse, thread: Some(thread) })
    }

    /// What follows belongs to this namespace; what came before is published.
    pub fn begin(&self, namespace: Option<Namespace>) {
        self.order(Order::Begin(namespace));
    }

    /// Stores features in the namespace. Waits only while earlier ones wait.
    pub fn keep(&self, made: ComputedFeatures) {
        if !made.rows.is_empty() {
            self.order(Order::Keep(made));
        }
    }

    /// Makes what was appended so far visible to everybody.
    pub fn publish(&self) {
        self.order(Order::Publish);
    }

    /// Leaves the adapter that the namespace was made with beside its records.
    pub fn save_adapter(&self, adapter: Arc<AdapterSnapshot>) {
        self.order(Order::SaveAdapter(adapter));
    }

    /// Leaves word in the namespace of how many of these samples it has.
    pub fn note(&self, run: &str, samples: &Arc<[SampleKey]>) {
        self.order(Order::Note { run: run.to_owned(), samples: samples.clone() });
    }

    /// Waits until everything that was ordered is done.
    pub fn settle(&self) {
        let (done, wait) = sync_channel(1);
        self.order(Order::Settle(done));
        // Any other error says that the thread is gone; so is what it was to do.
        while let Err(RecvTimeoutError::Timeout) = wait.recv_timeout(pulse::LOOK) {
            pulse::keeps_time_with(&self.pulse);
        }
    }

    /// What has happened since the last call.
    pub fn news(&self) -> News {
        std::mem::take(&mut *self.news.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn order(&self, mut order: Order) {
        while let Some(orders) = &self.orders {
            match orders.try_send(order) {
                Ok(()) => return,
                Err(TrySendError::Disconnected(_)) => break,
                Err(TrySendError::Full(back)) => order = back,
            }
            thread::sleep(LOOK_AGAIN);
            pulse::keeps_time_with(&self.pulse);
        }
        let mut news = self.news.lock().unwrap_or_else(PoisonError::into_inner);
        news.complaints.push("features are no longer stored: the writing thread has ended".into());
    }
}

impl Drop for StoreWriter {
    /// What was computed is kept, however training ended.
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so, and nothing is left to be told.
            let _ = thread.join();
        }
    }
}

/// The thread's end.
struct StoreThread {
    namespace: Option<Namespace>,
    /// Being written.
    shard: Option<ShardWriter>,
    /// Nothing more is written before the next publishing, or to the next namespace.
    full: bool,
    news: Arc<Mutex<News>>,
}

impl StoreThread {
    fn work(&mut self, orders: &Receiver<Order>) {
        while let Ok(order) = orders.recv() {
            pulse::beat();
            let done = match order {
                Order::Begin(namespace) => {
                    let published = self.publish();
                    (self.namespace, self.full) = (namespace, false);
                    published
                }
                Order::Keep(made) => self.keep(&made),
                Order::Publish => {
                    let published = self.publish();
                    self.full = false;
                    published
                }
                Order::SaveAdapter(adapter) => {
                    self.namespace.as_ref().map_or(Ok(()), |s| s.save_adapter(&adapter::tensors(&adapter)))
                }
                Order::Note { run, samples } => {
                    self.namespace.as_ref().map_or(Ok(()), |s| note(s, run, &samples))
                }
                Order::Settle(done) => {
                    // A caller that has stopped waiting needs no answer.
                    let _ = done.send(());
                    Ok(())
                }
            };
            self.tell(done);
        }
        let done = self.publish();
        self.tell(done);
    }

    fn tell(&self, done: Result<(), StoreError>) {
        if let Err(error) = done {
            self.news(|news| news.complaints.push((&error).into()));
        }
    }

    fn news(&self, tell: impl FnOnce(&mut News)) {
        tell(&mut self.news.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn keep(&mut self, made: &ComputedFeatures) -> Result<(), StoreError> {
        for row in &made.rows {
            let (false, Some(namespace)) = (self.full, &self.namespace) else { return Ok(()) };
            // Whatever fails, one attempt is enough until what there is is published.
            let shard = match &mut self.shard {
                Some(shard) => shard,
                None => self.shard.insert(namespace.writer().inspect_err(|_| self.full = true)?),
            };
            let MadeRow { key, inputs: Inputs { ids, shapes }, place } = row;
            let record = Record { ids, shapes, values: &made.values[place.clone()] };
            match shard.append(*key, &record) {
                Ok(new) => self.news(|news| news.kept += u64::from(new)),
                Err(error) => {
                    self.full = true;
                    // Within the budget's error the shard is still sound, and is published in its time.
                    if !matches!(error, StoreError::OverBudget { .. }) {
                        self.shard = None;
                    }
                    return Err(error);
                }
            }
            if self.shard.as_ref().is_some_and(ShardWriter::is_full) {
                self.publish()?;
            }
        }
        Ok(())
    }

    fn publish(&mut self) -> Result<(), StoreError> {
        let Some(shard) = self.shard.take() else { return Ok(()) };
        let published = shard.publish().inspect_err(|_| self.full = true)?;
        self.news(|news| news.published += published);
        Ok(())
    }
}

fn note(namespace: &Namespace, run: String, samples: &[SampleKey]) -> Result<(), StoreError> {
    namespace.refresh()?;
    let stored = samples.iter().filter(|key| namespace.contains(key)).count() as u64;
    let among = namespace.known() as u64;
    namespace.note_coverage(&Coverage { run, total: samples.len() as u64, stored, among })
}

#[cfg(test)]
mod tests;
