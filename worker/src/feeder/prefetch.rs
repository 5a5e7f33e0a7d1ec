//! Micro-batches made ahead of the training thread, in order, within a bound.
//!
//! ```text
//! trainer: request(step, positions, ..)  ─►  requests  ─►  jobs, one per micro-batch  ─►  threads
//! trainer: next(step)                    ◄─  ready micro-batches, at most `depth` ahead, in order
//! ```
//!
//! The trainer says which positions it owns, steps ahead of time; threads of this pipeline (a pool of its own: compute threads have
//! theirs) read and decode the samples of a micro-batch side by side, and collate. A step stays on record until the trainer asks for a later one, so after a step that
//! did not fit [`Prefetcher::replan`] starts it again with smaller micro-batches, from the same samples: cut out of what is ready (`recut`), so that nobody waits
//! for images that were decoded before. Failures come through
//! [`Prefetcher::next`] as values. Dropping the prefetcher stops and joins its threads.
//!
//! Where features are kept, rows of micro-batches that wait can be completed before their turn (`upcoming`).
//!
//! What it does not do: decide which positions a rank owns, or when a step ends.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    panic::AssertUnwindSafe,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};

use coxswain_proto::ids::Step;
use rayon::{ThreadPool, ThreadPoolBuilder};

use coxswain_data::{DataError, SampleOrder, surviving::words};
use coxswain_task::Samples;

use super::rows::{KeptFeatures, Prepared, prepare};

mod recut;
mod upcoming;

pub use upcoming::Upcoming;

/// Steps on record at once. Requests are a few words each; more than this means that nobody takes batches.
pub const MAX_REQUESTS: usize = 256;

/// What this rank consumes in one step.
#[derive(Clone, Debug)]
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

    fn micro_batches(&self) -> u64 {
        self.samples().div_ceil(self.micro_batch.max(1) as u64)
    }

    /// Positions of micro-batch `number`.
    fn part(&self, number: u64) -> impl Iterator<Item = u64> + '_ {
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

/// The pipeline. One trainer drives it.
pub struct Prefetcher {
    shared: Arc<Shared>,
    /// One for each micro-batch that is made at the same time.
    makers: Vec<JoinHandle<()>>,
}

struct Shared {
    samples: Arc<dyn Samples>,
    /// Reads and decodes.
    readers: ThreadPool,
    order: SampleOrder,
    depth: u64,
    state: Mutex<State>,
    /// Signalled when a micro-batch is ready.
    ready: Condvar,
    /// Signalled when a job may be started.
    wanted: Condvar,
}

/// Jobs are numbered through all requests on record. `taken <= started <= taken + depth`, or further where features are kept.
#[derive(Default)]
struct State {
    /// Steps not yet finished, with the number of their first job.
    requests: VecDeque<(u64, StepRequest)>,
    /// Number of the next job that a new request gets.
    planned: u64,
    started: u64,
    taken: u64,
    done: BTreeMap<u64, Result<Prepared, DataError>>,
    /// Rises with every replan; what older jobs bring is dropped.
    plan: u64,
    /// Samples that are kept ready where features may be missing, if that is more than `depth` micro-batches.
    kept_ahead: usize,
    stop: bool,
}

impl Prefetcher {
    /// Starts a pipeline that keeps up to `depth` micro-batches ready, with `threads` threads that read.
    ///
    /// `order` is that of the run's samples.
    pub fn start(
        samples: Arc<dyn Samples>,
        order: SampleOrder,
        depth: usize,
        threads: usize,
    ) -> Result<Self, DataError> {
        let cannot_start =
            |e: &dyn std::fmt::Display| DataError::Pipeline(format!("cannot start a thread: {e}"));
        let readers = ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(|number| format!("data-{number}"))
            .build()
            .map_err(|e| cannot_start(&e))?;
        let shared = Arc::new(Shared {
            order,
            samples,
            readers,
            depth: depth.max(1) as u64,
            state: Mutex::default(),
            ready: Condvar::new(),
            wanted: Condvar::new(),
        });
        let mut prefetcher = Self { shared, makers: Vec::new() };
        for number in 0..threads.min(depth).max(1) {
            let shared = prefetcher.shared.clone();
            let thread = std::thread::Builder::new()
                .name(format!("batch-{number}"))
                .spawn(move || shared.work())
                .map_err(|e| cannot_start(&e))?;
            prefetcher.makers.push(thread);
        }
        Ok(prefetcher)
    }

    /// Puts a step on record. Steps are requested in order, each once; any step may be the first.
    pub fn request(&mut self, request: StepRequest) -> Result<(), DataError> {
        let mut state = self.shared.lock();
        if state.requests.len() >= MAX_REQUESTS {
            return Err(DataError::Pipeline(format!("{MAX_REQUESTS} steps are requested already")));
        }
        if let Some((_, last)) = state.requests.back().filter(|(_, last)| last.step >= request.step) {
            return Err(DataError::Pipeline(format!(
                "step {} requested after step {}",
                request.step, last.step
            )));
        }
        let first = state.planned;
        state.planned += request.micro_batches();
        state.requests.push_back((first, request));
        drop(state);
        self.shared.wanted.notify_all();
        Ok(())
    }

    /// The next micro-batch of `step`; `None` after its last. Asking for a later step than before forgets the earlier ones.
    pub fn next(&mut self, step: Step) -> Result<Option<Prepared>, DataError> {
        let mut state = self.shared.lock();
        while state.requests.front().is_some_and(|(_, r)| r.step < step) {
            state.requests.pop_front();
        }
        let Some((first, request)) = state.requests.front().filter(|(_, r)| r.step == step) else {
            return Err(DataError::Pipeline(format!("step {step} was not requested")));
        };
        let (first, end) = (*first, *first + request.micro_batches());
        if state.taken < first {
            // The trainer left a step early: its remaining batches are not wanted any more.
            state.taken = first;
            state.started = state.started.max(first);
            state.done = state.done.split_off(&first);
            self.shared.wanted.notify_all();
        }
        if state.taken >= end {
            return Ok(None);
        }
        loop {
            let number = state.taken;
            if let Some(result) = state.done.remove(&number) {
                state.taken += 1;
                // What was cut out of others was never started.
                state.started = state.started.max(state.taken);
                drop(state);
                self.shared.wanted.notify_all();
                return result.map(Some);
            }
            state = self.shared.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Starts `step` again from its first sample, it and all later requests with another micro-batch. What is ready is not read again, nor is
    /// `last`, the micro-batch that was taken last. A step that is not requested yet (the run is over, or its turn is not known) has nothing
    /// to start again; it is cut by whoever requests it.
    pub fn replan(
        &mut self,
        step: Step,
        micro_batch: usize,
        last: Option<Prepared>,
    ) -> Result<(), DataError> {
        let mut state = self.shared.lock();
        state.requests.retain(|(_, r)| r.step >= step);
        if let Some((_, first)) = state.requests.front().filter(|(_, r)| r.step != step) {
            return Err(DataError::Pipeline(format!(
                "step {step} is not on record, and step {} is",
                first.step
            )));
        }
        state.plan += 1;
        let ready = last.into_iter().chain(std::mem::take(&mut state.done).into_values().flatten());
        let rows = state.take_apart(&*self.shared.samples, ready);
        let start = state.started;
        let mut planned = start;
        for (first, request) in &mut state.requests {
            request.micro_batch = micro_batch;
            *first = planned;
            planned += request.micro_batches();
        }
        state.taken = start;
        state.planned = planned;
        state.done = self.shared.recut(&state, rows);
        drop(state);
        self.shared.wanted.notify_all();
        Ok(())
    }

    /// Forgets every request, to continue at another step.
    pub fn clear(&mut self) {
        let mut state = self.shared.lock();
        state.plan += 1;
        state.requests.clear();
        state.done.clear();
        state.taken = state.started;
        state.planned = state.started;
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.wanted.notify_all();
        for thread in self.makers.drain(..) {
            // Panics are caught and told as errors.
            let _ = thread.join();
        }
    }
}

/// One micro-batch to make.
struct Job {
    plan: u64,
    number: u64,
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
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        while let Some(job) = self.claim() {
            // A decoder's panic names its sample (`reading`); what is left is a defect of ours, and costs this micro-batch.
            let made = std::panic::catch_unwind(AssertUnwindSafe(|| self.make(&job)));
            let result = made.unwrap_or_else(|panic| {
                let what = format!("a thread panicked over step {}: {}", job.step, words(panic.as_ref()));
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
    fn claim(&self) -> Option<Job> {
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
            if number >= state.taken + bound {
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
            // Without an owner the step was left early, and nobody wants the batch.
            if job.is_some() {
                return job;
            }
        }
    }

    /// Micro-batches that may wait for the trainer, the next one being of this request.
    fn bound(&self, state: &State, request: &StepRequest) -> u64 {
        self.depth.max(state.ahead_of(request))
    }

    fn make(&self, job: &Job) -> Result<Prepared, DataError> {
        let sample = |&position: &u64| {
            let found = self.order.sample(job.epoch, position);
            found.ok_or(DataError::OutOfRange {
                what: "training position",
                index: position,
                len: self.order.len(),
            })
        };
        let indices = job.positions.iter().map(sample).collect::<Result<Vec<_>, _>>()?;
        let prepared = || prepare(&*self.samples, job.step, &indices, job.kept.as_ref());
        self.readers.install(prepared).map_err(|(place, source)| {
            let (epoch, position) = (job.epoch, job.positions[place]);
            let row = self.samples.damaged_row(indices[place], &source);
            DataError::AtPosition { epoch, position, row, source: Box::new(source) }
        })
    }
}
