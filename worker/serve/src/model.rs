//! The thread that computes: observations that wait together are answered by one forward pass.
//!
//! A pass takes what has arrived while the one before it ran, and never waits for more. Under load batches
//! grow by themselves, and a client that is alone waits for its own pass only.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
};

use coxswain_task::{NamedValues, RequestReader, Responder, Sample};

use crate::{clock::Stopwatch, error::ServeError, limits::MAX_CLIENTS, metrics::Metrics};

/// Passes before the port opens, for each size of batch: the first compiles and measures, the second shows
/// what there is left to do.
const WARM_UPS: usize = 2;

/// An answer, or why there is none.
pub(crate) type Answer = Result<NamedValues, String>;

/// Why there will be no answer any more.
pub(crate) const GONE: &str = "the policy's thread has ended; restart the server";

/// An observation on its way to the model.
struct Request {
    sample: Box<dyn Sample>,
    answer: SyncSender<Answer>,
}

/// A model that answers on a thread of its own. Ends when its last clone is dropped.
#[derive(Clone)]
pub struct Model {
    reader: Arc<dyn RequestReader>,
    queue: SyncSender<Request>,
    metrics: Arc<Metrics>,
}

impl Model {
    /// Makes a responder on its thread, warms it up, and returns when it is ready for passes of up to
    /// `max_batch` observations.
    pub fn start<E>(
        max_batch: usize,
        make: impl FnOnce() -> Result<Box<dyn Responder>, E> + Send + 'static,
    ) -> Result<Self, E>
    where
        E: From<ServeError> + Send + 'static,
    {
        let (ready, is_ready) = sync_channel(1);
        // A client has one observation under way at most.
        let (queue, waiting) = sync_channel(MAX_CLIENTS);
        let metrics = Arc::new(Metrics::default());
        let counted = metrics.clone();
        let body = move || {
            let made = make().and_then(|responder| {
                warm_up(&*responder, max_batch).map_err(ServeError::WarmUp)?;
                Ok(responder)
            });
            match made {
                Ok(responder) => {
                    // The receiver is gone if starting was given up.
                    let _ = ready.send(Ok(responder.reader()));
                    answer_all(&*responder, &waiting, max_batch, &counted);
                }
                Err(error) => drop(ready.send(Err(error))),
            }
        };
        thread::Builder::new().name("model".into()).spawn(body).map_err(ServeError::Thread)?;
        let reader = is_ready.recv().unwrap_or_else(|_| {
            Err(ServeError::WarmUp("its thread has ended; see the messages above".into()).into())
        })?;
        Ok(Self { reader, queue, metrics })
    }

    pub(crate) fn reader(&self) -> &dyn RequestReader {
        &*self.reader
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Asks for the answer to one observation, which comes to what is returned.
    pub(crate) fn ask(&self, sample: Box<dyn Sample>) -> Result<Receiver<Answer>, String> {
        let (answer, answered) = sync_channel(1);
        self.queue.send(Request { sample, answer }).map_err(|_| GONE)?;
        Ok(answered)
    }
}

/// Answers the model's own example, alone and in the largest batch.
fn warm_up(responder: &dyn Responder, max_batch: usize) -> Result<(), String> {
    let reader = responder.reader();
    let example = reader.read(&reader.example()).map_err(|refused| refused.to_string())?;
    for size in [1, max_batch] {
        let batch = vec![example.clone(); size];
        let stopwatch = Stopwatch::start();
        (0..WARM_UPS).try_for_each(|_| survived(responder, &batch).map(drop))?;
        let milliseconds = stopwatch.milliseconds() / WARM_UPS as f64;
        tracing::info!("warm-up: {milliseconds:.1} ms for a batch of {size}");
    }
    Ok(())
}

/// Answers until the last client and the server are gone.
fn answer_all(responder: &dyn Responder, waiting: &Receiver<Request>, max_batch: usize, metrics: &Metrics) {
    while let Ok(first) = waiting.recv() {
        let (mut samples, mut answers) = (vec![first.sample], vec![first.answer]);
        for Request { sample, answer } in waiting.try_iter().take(max_batch - 1) {
            samples.push(sample);
            answers.push(answer);
        }
        metrics.batch(samples.len());
        for (answer, to) in each(responder, &samples).into_iter().zip(answers) {
            // A client that has gone needs none.
            let _ = to.send(answer);
        }
    }
}

/// The answers to these samples. If they cannot be answered together, one of them may be to blame: then each
/// is answered alone.
fn each(responder: &dyn Responder, samples: &[Box<dyn Sample>]) -> Vec<Answer> {
    match survived(responder, samples) {
        Ok(named) => named.into_iter().map(Ok).collect(),
        Err(problem) if samples.len() == 1 => vec![Err(problem)],
        Err(_) => samples.chunks(1).flat_map(|alone| each(responder, alone)).collect(),
    }
}

/// A panic below is the fault of one observation, or of many; the server stays.
fn survived(responder: &dyn Responder, samples: &[Box<dyn Sample>]) -> Result<Vec<NamedValues>, String> {
    let named = catch_unwind(AssertUnwindSafe(|| responder.answer(samples)))
        .map_err(|_| "the policy failed; see the server's log".to_owned())?
        .map_err(|error| error.to_string())?;
    match named.len() == samples.len() {
        true => Ok(named),
        false => Err(format!("the policy gave {} answers to {} observations", named.len(), samples.len())),
    }
}
