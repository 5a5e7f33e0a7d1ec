//! What the trainer and the data threads share: steps on record, jobs and what has been made of them. The
//! threads' side of it, too.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    panic::AssertUnwindSafe,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use coxswain_proto::ids::Step;
use rayon::ThreadPool;

use coxswain_data::{DataError, SampleOrder, surviving::words};
use coxswain_task::Samples;

use super::rows::{KeptFeatures, RowBatch, SampleRequest, prepare};

/// What this rank consumes in one step.
#[derive(Clone)]
pub struct StepRequest {
    /// The step.
    pub step: Step,
    /// The epoch that its positions are of.
    pub epoch: u64,
    /// Positions of the epoch's order, in the order they are consumed.
    pub positions: Vec<Range<u64>>,
    /// Samples per micro-batch; the last one may be smaller.
    pub micro_batch: usize,
    /// Where features come from, in a step that does not compute its own.
    pub kept: Option<KeptFeatures>,
}

impl StepRequest {
    fn samples(&self) -> u64 {
        self.positions.iter().map(|r| r.end.saturating_sub(r.start)).sum()
    }

    pub(super) fn micro_batches(&self) -> u64 {
        self.samples().div_ceil(self.micro_batch.max(1) as u64)
    }

    /// Positions of micro-batch `number`.
    pub(super) fn part(&self, number: u64) -> impl Iterator<Item = u64> + '_ {
        let size = self.micro_batch.max(1) as u64;
        let (mut skip, mut left) = (number * size, size);
        self.positions.iter().flat_map(move |r| {
            let len = r.end.saturating_sub(r.start);
            let skipped = skip.min(len);
            skip -= skipped;
            let taken = (len - skipped).min(left);
            left -= taken;
            r.start + skipped..r.start + skipped + taken
        })
    }
}

/// What the trainer and the data threads share.
pub(super) struct SharedQueue {
    pub samples: Arc<dyn Samples>,
    /// Reads and decodes.
    pub readers: ThreadPool,
    /// Wait for samples that lie far away; none where they do not.
    pub bringers: Option<ThreadPool>,
    pub order: SampleOrder,
    pub depth: u64,
    pub state: Mutex<State>,
    /// Signalled when a micro-batch is ready.
    pub ready: Condvar,
    /// Signalled when a job may be started.
    pub wanted: Condvar,
}

/// Jobs are numbered through all requests on record. `taken <= started <= taken + depth`, or further where
/// features are kept.
#[derive(Default)]
pub(super) struct State {
    /// Steps not yet finished, with the number of their first job.
    pub requests: VecDeque<(u64, StepRequest)>,
    /// Number of the next job that a new request gets.
    pub planned: u64,
    pub started: u64,
    pub taken: u64,
    pub done: BTreeMap<u64, Result<RowBatch, DataError>>,
    /// Rises with every replan; what older jobs bring is dropped.
    pub plan: u64,
    /// Samples that are kept ready where features may be missing, if that is more than `depth` micro-batches.
    pub kept_ahead: usize,
    pub stop: bool,
}

/// One micro-batch to make.
pub(super) struct Job {
    plan: u64,
    pub number: u64,
    step: Step,
    epoch: u64,
    positions: Vec<u64>,
    kept: Option<KeptFeatures>,
}

impl State {
    /// Micro-batches of a request that may be ready at once for the sake of features that are missing.
    fn ahead_of(&self, request: &StepRequest) -> u64 {
        let size = request.micro_batch.max(1);
        request.kept.as_ref().map_or(0, |_| self.kept_ahead.div_ceil(size) as u64)
    }

    /// Whether the features of this request may be under way: what an epoch computes is found from its end
    /// on, and what is read before that is read in vain.
    fn is_early(&self, request: &StepRequest) -> bool {
        let present = self.requests.front().map(|(_, present)| present);
        present.is_some_and(|present| present.kept.is_some() && present.epoch < request.epoch)
            && request.kept.is_some()
    }
}

impl SharedQueue {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings the samples of a step that was requested. Does not wait, and leaves errors to the threads that
    /// read. Kept features stand for what is large in most of a step's samples; the others are brought when
    /// they are read.
    pub fn bring(self: &Arc<Self>, request: &StepRequest) {
        let Some(bringers) = self.bringers.as_ref().filter(|_| request.kept.is_none()) else { return };
        for position in request.positions.iter().cloned().flatten() {
            let Some(index) = self.order.sample(request.epoch, position) else { continue };
            let shared = self.clone();
            bringers.spawn_fifo(move || {
                if !shared.lock().stop {
                    // A decoder's panic over a file's tables is met again, and named, by the reader.
                    let _ = std::panic::catch_unwind(AssertUnwindSafe(|| shared.samples.bring(index)));
                }
            });
        }
    }

    /// A data thread: makes one micro-batch after the other until it is time to stop.
    pub fn work(&self) {
        while let Some(job) = self.claim() {
            // A decoder's panic names its sample (`reading`); what is left is a defect of ours, and costs
            // this micro-batch.
            let made = std::panic::catch_unwind(AssertUnwindSafe(|| self.make(&job)));
            let result = made.unwrap_or_else(|panic| {
                let what = format!("a data thread panicked in step {}: {}", job.step, words(panic.as_ref()));
                Err(DataError::Pipeline(what))
            });
            let mut state = self.lock();
            if state.plan == job.plan && job.number >= state.taken {
                state.done.insert(job.number, result);
            }
            drop(state);
            self.ready.notify_all();
        }
    }

    /// Waits for a job within the bound; `None` when it is time to stop.
    pub fn claim(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.stop {
                return None;
            }
            while state.done.contains_key(&state.started) {
                // Cut out of what was ready.
                state.started += 1;
            }
            if state.started >= state.planned {
                state = self.wanted.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let number = state.started;
            let holds =
                |(first, r): &&(u64, StepRequest)| (*first..*first + r.micro_batches()).contains(&number);
            let owner = state.requests.iter().find(holds);
            let bound = owner.map_or(self.depth, |(_, request)| self.bound(&state, request));
            if number >= state.taken + bound || owner.is_some_and(|(_, request)| state.is_early(request)) {
                state = self.wanted.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let job = owner.map(|(first, request)| Job {
                plan: state.plan,
                number,
                step: request.step,
                epoch: request.epoch,
                positions: request.part(number - first).collect(),
                kept: request.kept.clone(),
            });
            state.started += 1;
            // Without an owner the step was left early, and the batch is not wanted.
            if job.is_some() {
                return job;
            }
        }
    }

    /// Micro-batches that may wait for the trainer, the next one being of this request.
    pub fn bound(&self, state: &State, request: &StepRequest) -> u64 {
        self.depth.max(state.ahead_of(request))
    }

    /// A micro-batch of a request that is not on record.
    pub fn make_aside(&self, request: &StepRequest, number: u64) -> Result<RowBatch, DataError> {
        let StepRequest { step, epoch, ref kept, .. } = *request;
        let positions = request.part(number).collect();
        self.make(&Job { plan: 0, number, step, epoch, positions, kept: kept.clone() })
    }

    fn make(&self, job: &Job) -> Result<RowBatch, DataError> {
        let sample = |&position: &u64| {
            let found = self.order.sample(job.epoch, position).map(|index| SampleRequest { position, index });
            found.ok_or(DataError::OutOfRange {
                what: "training position",
                index: position,
                len: self.order.len(),
            })
        };
        let wanted = job.positions.iter().map(sample).collect::<Result<Vec<_>, _>>()?;
        let prepared = || prepare(&*self.samples, job.step, job.epoch, &wanted, job.kept.as_ref());
        self.readers.install(prepared).map_err(|(place, source)| {
            let (epoch, SampleRequest { position, index }) = (job.epoch, wanted[place]);
            let row = self.samples.damaged_row(index, &source);
            DataError::AtPosition { epoch, position, row, source: Box::new(source) }
        })
    }
}
