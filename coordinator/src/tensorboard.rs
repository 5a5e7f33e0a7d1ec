//! Scalars of every logged step for TensorBoard: `tensorboard --logdir OUTPUT_DIR/tensorboard`.
//!
//! A reader of the news like any watcher, on a thread of its own: a slow disk costs scalars, never a step.
//! Each life of the coordinator writes a file of its own beside the earlier ones. After a rollback a session
//! mark makes TensorBoard forget the steps that are repeated. Format: [`event_file`](crate::event_file).

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
    sync::Arc,
    thread,
};

use coxswain_proto::{limits::DRAIN_TIMEOUT, report::Metric};
use tokio::sync::{
    broadcast::{Receiver, error::RecvError},
    oneshot,
};

use crate::{
    core::{news::News, report::CommittedStep},
    driver::DatedNews,
    event_file::{DIRECTORY, FILE_VERSION, Scalar, ScalarEvent, SessionLog, Summary, path, record},
};

/// The handle of a started writer.
pub struct Scalars {
    done: oneshot::Receiver<()>,
}

impl Scalars {
    /// Starts writing below `output_dir`, until the news end. What cannot be written is said once, and no
    /// more is.
    pub fn follow(news: Receiver<Arc<DatedNews>>, output_dir: &Path, every: u64) -> Self {
        let directory = output_dir.join(DIRECTORY);
        let (finish, done) = oneshot::channel();
        let told = directory.clone();
        let give_up = move |error| {
            let directory = told.display();
            tracing::warn!(target: "coxswain::run", "cannot write TensorBoard files any more: {directory}: {error}");
        };
        let unstarted = give_up.clone();
        let thread = thread::Builder::new().name("tensorboard".into()).spawn(move || {
            write(news, &directory, every.max(1)).unwrap_or_else(give_up);
            drop(finish);
        });
        thread.map(drop).unwrap_or_else(unstarted);
        Self { done }
    }

    /// Waits a moment until what happened before the news ended is written.
    pub async fn finished(self) {
        // The other end is dropped, never used: both errors mean that there is nothing more to wait for.
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, self.done).await;
    }
}

fn write(mut news: Receiver<Arc<DatedNews>>, directory: &Path, every: u64) -> io::Result<()> {
    // Opened with the first step: a run that never trains leaves nothing.
    let mut file = None;
    loop {
        let dated = match news.blocking_recv() {
            Ok(dated) => dated,
            Err(RecvError::Lagged(_)) => continue,
            Err(RecvError::Closed) => return Ok(()),
        };
        let event = match &dated.news {
            News::Step(step) if due(step, every) => ScalarEvent::step(step),
            News::RolledBack { to, .. } => ScalarEvent::restart(to.0),
            _ => continue,
        };
        let file = match &mut file {
            Some(file) => file,
            none => none.insert(EventFile::create(directory, dated.unix_ms)?),
        };
        file.append(event, dated.unix_ms)?;
    }
}

fn due(step: &CommittedStep, every: u64) -> bool {
    let committed = step.step.0 + 1;
    // A step that only the later state proves has no totals.
    step.reports > 0 && (committed == 1 || committed.is_multiple_of(every) || committed == step.total_steps)
}

struct EventFile(File);

impl EventFile {
    fn create(directory: &Path, unix_ms: u64) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        let mut file = Self(File::create_new(path(directory, unix_ms))?);
        file.append(
            ScalarEvent { file_version: Some(FILE_VERSION.into()), ..ScalarEvent::default() },
            unix_ms,
        )?;
        Ok(file)
    }

    /// One write a record, so that a reader or a crash meets whole ones.
    fn append(&mut self, event: ScalarEvent, unix_ms: u64) -> io::Result<()> {
        let event = ScalarEvent { wall_time: unix_ms as f64 / 1e3, ..event };
        self.0.write_all(&record(&prost::Message::encode_to_vec(&event)))
    }
}

impl ScalarEvent {
    fn step(step: &CommittedStep) -> Self {
        let seconds = |time: std::time::Duration| time.as_secs_f64();
        let times = &step.times;
        let scalar = |name: &str, value: f64| Scalar { name: name.to_owned(), value: value as f32 };
        if step.skipped.is_some() {
            let metrics = step.metrics.iter().map(|metric| scalar(&tag(metric), metric.value));
            let values = [scalar("run/skipped", 1.0)].into_iter().chain(metrics).collect();
            return Self { step: step.step.0 as i64, summary: Some(Summary { values }), ..Self::default() };
        }
        let known = [
            ("train/loss", step.totals.loss()),
            ("train/grad_norm", step.totals.grad_norm),
            ("train/epoch", step.consumed.epoch as f64),
            ("speed/samples_per_second", step.samples_per_second()),
            ("speed/tokens_per_second", step.tokens_per_second()),
            ("seconds/step", seconds(times.total)),
            ("seconds/data", seconds(times.data)),
            ("seconds/optimizer", seconds(times.optimizer)),
            ("seconds/communication", seconds(times.communication)),
            ("memory/peak_bytes", step.memory_peak.bytes.0 as f64),
            ("run/world_size", f64::from(step.world)),
            ("run/cache_generation", step.cache_generation as f64),
        ];
        let rate = step.learning_rate().map(|rate| scalar("train/learning_rate", rate));
        let metrics = step.metrics.iter().map(|metric| scalar(&tag(metric), metric.value));
        let values =
            known.map(|(name, value)| scalar(name, value)).into_iter().chain(rate).chain(metrics).collect();
        Self { step: step.step.0 as i64, summary: Some(Summary { values }), ..Self::default() }
    }

    fn restart(step: u64) -> Self {
        Self { step: step as i64, session: Some(SessionLog { status: SessionLog::START }), ..Self::default() }
    }
}

/// Where a metric is shown: times of stages beside those of the engine, a kind with members as a group of
/// charts, others beside the loss.
fn tag(metric: &Metric) -> String {
    match metric.as_stage_time() {
        Some((stage, _)) => format!("seconds/{stage}"),
        None if metric.suffix().is_empty() => format!("train/{}", metric.name),
        None => metric.name.to_string(),
    }
}
