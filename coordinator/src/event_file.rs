//! TensorBoard's files of scalars: how they are framed, and what is in those of a run.
//!
//! ```text
//! record   length u64 · masked CRC-32C of it u32 · event · masked CRC-32C of that u32 (TFRecord, all
//!          little-endian)
//! event    tensorflow.Event: first the format's version, then one summary a step
//! ```
//!
//! Formats: `tensorflow/core/util/event.proto`, `tensorflow/core/lib/io/record_writer.h`.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use prost::Message;

/// Below a run's output directory.
pub(crate) const DIRECTORY: &str = "tensorboard";
/// What readers of this version of the format look for.
pub(crate) const FILE_VERSION: &str = "brain.Event:2";
const CRC_32C: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISCSI);

/// The scalars of a run's logged steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScalarLog {
    /// By tag (`train/loss`, `seconds/data`), each in the order of steps; a step that was repeated has its
    /// last value.
    pub series: BTreeMap<String, Vec<ScalarPoint>>,
    /// What could not be read, a line each.
    pub problems: Vec<String>,
}

/// A scalar of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalarPoint {
    /// Numbered from 0.
    pub step: u64,
    /// When it was committed, in seconds since 1970 (UTC).
    pub unix_seconds: f64,
    /// In the unit of its tag; it may be no number.
    pub value: f64,
}

impl ScalarLog {
    /// Reads what the run in `output_dir` has written so far: all files, each to its end or to the first
    /// record that is cut or damaged, which is a problem. A run without scalars has none.
    pub fn read(output_dir: &Path) -> Self {
        let entries = fs::read_dir(output_dir.join(DIRECTORY)).into_iter().flatten().flatten();
        let is_ours = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("events.out.tfevents."))
        };
        let mut files: Vec<_> = entries.map(|entry| entry.path()).filter(is_ours).collect();
        files.sort();
        let mut log = Self::default();
        for file in files {
            let problem = match fs::read(&file) {
                Ok(bytes) => log.enter_records(&bytes),
                Err(error) => Some(error.to_string()),
            };
            log.problems.extend(problem.map(|why| format!("{}: {why}", file.display())));
        }
        log
    }

    /// What is wrong with the first record that cannot be read.
    fn enter_records(&mut self, mut bytes: &[u8]) -> Option<String> {
        let whole = bytes.len();
        while !bytes.is_empty() {
            let at = whole - bytes.len();
            let Some((event, rest)) = first_record(bytes) else {
                return Some(format!("truncated or damaged at byte {at} of {whole}; the rest is left out"));
            };
            match ScalarEvent::decode(event) {
                Ok(event) => self.enter_event(event),
                Err(error) => return Some(format!("not a TensorBoard event at byte {at}: {error}")),
            }
            bytes = rest;
        }
        None
    }

    fn enter_event(&mut self, event: ScalarEvent) {
        let step = u64::try_from(event.step).unwrap_or_default();
        if event.session.is_some_and(|session| session.status == SessionLog::START) {
            self.series.values_mut().for_each(|points| forget_from(points, step));
        }
        for Scalar { name, value } in event.summary.into_iter().flat_map(|summary| summary.values) {
            let point = ScalarPoint { step, unix_seconds: event.wall_time, value: value.into() };
            let points = self.series.entry(name).or_default();
            forget_from(points, step);
            points.push(point);
        }
    }
}

fn forget_from(points: &mut Vec<ScalarPoint>, step: u64) {
    while points.last().is_some_and(|last| last.step >= step) {
        points.pop();
    }
}

/// The event of the first record, and what comes behind it; none if it is cut or its sums do not agree.
fn first_record(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let (sum, rest) = rest.split_first_chunk::<4>()?;
    if masked_crc(length) != *sum {
        return None;
    }
    let (event, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    let (sum, rest) = rest.split_first_chunk::<4>()?;
    (masked_crc(event) == *sum).then_some((event, rest))
}

/// `tensorflow.Event`, the part of it that scalars are.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ScalarEvent {
    #[prost(double, tag = "1")]
    pub(crate) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(crate) step: i64,
    #[prost(string, optional, tag = "3")]
    pub(crate) file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    pub(crate) summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    pub(crate) session: Option<SessionLog>,
}

/// `tensorflow.Summary`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(crate) values: Vec<Scalar>,
}

/// `tensorflow.Summary.Value` of a scalar.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Scalar {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(float, tag = "2")]
    pub(crate) value: f32,
}

/// `tensorflow.SessionLog`.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(crate) struct SessionLog {
    #[prost(int32, tag = "1")]
    pub(crate) status: i32,
}

impl SessionLog {
    /// Events from this step on are of a new session.
    pub(crate) const START: i32 = 1;
}

/// TensorBoard reads the files of a directory in the order of their names.
pub(crate) fn path(directory: &Path, unix_ms: u64) -> PathBuf {
    directory.join(format!("events.out.tfevents.{:010}.{:03}.coxswain", unix_ms / 1000, unix_ms % 1000))
}

pub(crate) fn record(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length), event, &masked_crc(event)].concat()
}

/// Rotated and shifted, because a CRC of bytes that hold CRCs is a weak one.
fn masked_crc(bytes: &[u8]) -> [u8; 4] {
    CRC_32C.checksum(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scalars(step: i64, loss: f32) -> Vec<u8> {
        let values = vec![Scalar { name: "train/loss".into(), value: loss }];
        let event =
            ScalarEvent { step, wall_time: 5.0, summary: Some(Summary { values }), ..Default::default() };
        record(&event.encode_to_vec())
    }

    fn losses(dir: &Path) -> Vec<(u64, f64)> {
        let log = ScalarLog::read(dir);
        log.series.get("train/loss").into_iter().flatten().map(|point| (point.step, point.value)).collect()
    }

    #[test]
    fn steps_that_were_repeated_have_their_last_value_and_a_cut_file_is_read_to_the_cut() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(ScalarLog::read(dir.path()), ScalarLog::default(), "a run without scalars");
        let files = dir.path().join(DIRECTORY);
        fs::create_dir(&files).unwrap();
        let version = ScalarEvent { file_version: Some(FILE_VERSION.into()), ..Default::default() };
        let mut first = record(&version.encode_to_vec());
        (0..4).for_each(|step| first.extend(scalars(step, step as f32)));
        let restart = ScalarEvent { step: 2, session: Some(SessionLog { status: 1 }), ..Default::default() };
        first.extend(record(&restart.encode_to_vec()));
        fs::write(path(&files, 1_000), &first).unwrap();
        assert_eq!(losses(dir.path()), [(0, 0.0), (1, 1.0)]);
        let second = [scalars(2, 20.0), scalars(3, 30.0)].concat();
        for cut in 0..second.len() {
            fs::write(path(&files, 2_000), &second[..cut]).unwrap();
            let log = ScalarLog::read(dir.path());
            let is_between = cut == 0 || cut == second.len() / 2;
            assert_eq!(log.problems.len(), usize::from(!is_between), "{cut}: {:?}", log.problems);
            assert_eq!(losses(dir.path()).len(), 2 + 2 * cut / second.len(), "{cut}");
        }
        fs::write(path(&files, 2_000), &second).unwrap();
        assert_eq!(losses(dir.path()), [(0, 0.0), (1, 1.0), (2, 20.0), (3, 30.0)]);
        fs::write(path(&files, 3_000), record(b"\xff\xff")).unwrap();
        let problems = ScalarLog::read(dir.path()).problems;
        assert!(problems[0].contains("not a TensorBoard event at byte 0"), "{problems:?}");
    }

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
