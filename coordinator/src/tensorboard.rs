//! Scalars of every logged step for TensorBoard: `tensorboard --logdir OUTPUT_DIR/tensorboard`.
//!
//! ```text
//! record   length u64 · masked CRC-32C of it u32 · event · masked CRC-32C of that u32 (TFRecord, all
//!          little-endian)
//! event    tensorflow.Event: first the format's version, then one summary a step
//! ```
//!
//! A reader of the news like any watcher, on a thread of its own: a slow disk costs scalars, never a step.
//! Each life of the coordinator writes a file of its own beside the earlier ones. After a rollback a session
//! mark makes TensorBoard forget the steps that are repeated. Formats: `tensorflow/core/util/event.proto`,
//! `tensorflow/core/lib/io/record_writer.h`.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
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
    driver::Dated,
};

/// What readers of this version of the format look for.
const FILE_VERSION: &str = "brain.Event:2";
const CRC_32C: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISCSI);

/// The handle of a started writer.
pub struct Scalars {
    done: oneshot::Receiver<()>,
}

impl Scalars {
    /// Starts writing below `output_dir`, until the news end. What cannot be written is said once, and no
    /// more is.
    pub fn follow(news: Receiver<Arc<Dated>>, output_dir: &Path, every: u64) -> Self {
        let directory = output_dir.join("tensorboard");
        let (finish, done) = oneshot::channel();
        let told = directory.clone();
        let give_up = move |error| {
            let directory = told.display();
            tracing::warn!(target: "coxswain::run", "no more scalars for TensorBoard: {directory}: {error}");
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

fn write(mut news: Receiver<Arc<Dated>>, directory: &Path, every: u64) -> io::Result<()> {
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

/// TensorBoard reads the files of a directory in the order of their names.
fn path(directory: &Path, unix_ms: u64) -> PathBuf {
    directory.join(format!("events.out.tfevents.{:010}.{:03}.coxswain", unix_ms / 1000, unix_ms % 1000))
}

fn record(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length), event, &masked_crc(event)].concat()
}

/// Rotated and shifted, because a CRC of bytes that hold CRCs is a weak one.
fn masked_crc(bytes: &[u8]) -> [u8; 4] {
    CRC_32C.checksum(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// `tensorflow.Event`, the part we write.
#[derive(Clone, PartialEq, prost::Message)]
struct ScalarEvent {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    session: Option<SessionLog>,
}

/// `tensorflow.Summary`.
#[derive(Clone, PartialEq, prost::Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    values: Vec<Scalar>,
}

/// `tensorflow.Summary.Value` of a scalar.
#[derive(Clone, PartialEq, prost::Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(float, tag = "2")]
    value: f32,
}

/// `tensorflow.SessionLog`.
#[derive(Clone, Copy, PartialEq, prost::Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

impl ScalarEvent {
    /// `SessionLog.START`: events from this step on are of a new session.
    const START: i32 = 1;

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
        Self { step: step as i64, session: Some(SessionLog { status: Self::START }), ..Self::default() }
    }
}

/// Where a metric is shown: times of stages beside those of the engine, a kind with members as a group of
/// charts, others beside the loss.
fn tag(metric: &Metric) -> String {
    match metric.as_stage_time() {
        Some((stage, _)) => format!("seconds/{stage}"),
        None if metric.of().is_empty() => format!("train/{}", metric.name),
        None => metric.name.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As TensorFlow's own writer frames and masks them: `crc32c` of "123456789" is the check value of the
    /// standard.
    #[test]
    fn records_are_framed_as_tfrecord_has_it() {
        assert_eq!(CRC_32C.checksum(b"123456789"), 0xe306_9283);
        let framed = record(b"abc");
        assert_eq!(framed.len(), 8 + 4 + 3 + 4);
        assert_eq!(framed[..8], 3u64.to_le_bytes());
        assert_eq!(&framed[12..15], b"abc");
        let masked = u32::from_le_bytes(framed[15..].try_into().unwrap());
        let unmasked = masked.wrapping_sub(0xa282_ead8).rotate_left(15);
        assert_eq!(unmasked, CRC_32C.checksum(b"abc"));
    }

    #[test]
    fn files_are_named_in_the_order_of_their_beginning() {
        let directory = Path::new("tensorboard");
        assert!(path(directory, 1_000_999) < path(directory, 1_001_000));
        assert!(path(directory, 1_001_000) < path(directory, 1_001_001));
    }
}
