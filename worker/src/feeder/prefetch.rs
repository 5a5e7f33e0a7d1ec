//! Micro-batches made ahead of the training thread, in order, within a bound.
//!
//! ```text
//! trainer: request(step, positions, ..)  ─►  requests  ─►  jobs, one per micro-batch  ─►  threads
//! trainer: next(step)                    ◄─  ready micro-batches, at most `depth` ahead, in order
//! ```
//!
//! The trainer says which positions it owns, steps ahead of time; threads of this pipeline (a pool of its
//! own: compute threads have theirs) read and decode the samples of a micro-batch side by side, and collate.
//! A step stays on record until the trainer asks for a later one, so after a step that did not fit
//! [`Prefetcher::replan`] starts it again with smaller micro-batches, from the same samples: cut out of what
//! is ready (`recut`), so that no image is decoded twice for it. Failures come through
//! [`Prefetcher::next`] as values. Dropping the prefetcher stops and joins its threads.
//!
//! Samples that lie in a bucket are brought to the local disk from when their step is requested.
//!
//! Where features are kept, rows of micro-batches that wait can be completed before their turn (`upcoming`),
//! and a later epoch is not begun before the trainer begins it: what the present one computes is published at
//! its end.
//!
//! What it does not do: decide which positions a rank owns, or when a step ends.

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::JoinHandle,
};

use coxswain_proto::ids::Step;
use rayon::ThreadPoolBuilder;

use coxswain_data::{DataError, SampleOrder};
use coxswain_task::Samples;

use super::{
    queue::{SharedQueue, StepRequest},
    rows::RowBatch,
};

/// Steps on record at once. Requests are a few words each; more than this means that no batches are taken.
pub const MAX_REQUESTS: usize = 256;

/// Samples that are brought at the same time, where they lie far away. Each takes a few requests, one after
/// the other; so many of them hide 50 ms a request at a hundred samples a second.
const BROUGHT_AT_ONCE: usize = 16;

/// The pipeline. One trainer drives it.
pub struct Prefetcher {
    pub(super) shared: Arc<SharedQueue>,
    /// One for each micro-batch that is made at the same time.
    pub(super) makers: Vec<JoinHandle<()>>,
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
        let pool = |name: &'static str, threads: usize| {
            let builder = ThreadPoolBuilder::new().num_threads(threads);
            let pool = builder.thread_name(move |number| format!("{name}-{number}")).build();
            pool.map_err(|e| cannot_start(&e))
        };
        let readers = pool("data", threads.max(1))?;
        let bringers = samples.is_remote().then(|| pool("bring", BROUGHT_AT_ONCE)).transpose()?;
        let shared = Arc::new(SharedQueue {
            order,
            samples,
            readers,
            bringers,
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
        self.shared.bring(&request);
        let first = state.planned;
        state.planned += request.micro_batches();
        state.requests.push_back((first, request));
        drop(state);
        self.shared.wanted.notify_all();
        Ok(())
    }

    /// The next micro-batch of `step`; `None` after its last. Asking for a later step than before forgets the
    /// earlier ones.
    pub fn next(&mut self, step: Step) -> Result<Option<RowBatch>, DataError> {
        let mut state = self.shared.lock();
        while state.requests.front().is_some_and(|(_, r)| r.step < step) {
            state.requests.pop_front();
            // A later epoch may have begun.
            self.shared.wanted.notify_all();
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

    /// A micro-batch of a step that is not on record, read here and now by the threads that read; none behind
    /// the last. What is on record is not touched.
    pub fn aside(&self, request: &StepRequest, number: u64) -> Result<Option<RowBatch>, DataError> {
        if number >= request.micro_batches() {
            return Ok(None);
        }
        self.shared.make_aside(request, number).map(Some)
    }

    /// Starts `step` again from its first sample, it and all later requests with another micro-batch. What is
    /// ready is not read again, nor is `last`, the micro-batch that was taken last. A step that is not
    /// requested yet (the run is over, or its turn is not known) has nothing to start again; it is cut when
    /// it is requested.
    pub fn replan(
        &mut self,
        step: Step,
        micro_batch: usize,
        last: Option<RowBatch>,
    ) -> Result<(), DataError> {
        let mut state = self.shared.lock();
        state.requests.retain(|(_, r)| r.step >= step);
        if let Some((_, first)) = state.requests.front().filter(|(_, r)| r.step != step) {
            return Err(DataError::Pipeline(format!(
                "step {step} was not requested, but step {} was",
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
