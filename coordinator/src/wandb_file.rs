//! A run as Weights & Biases keeps one that is offline: what `wandb sync` uploads and `wandb leet` shows.
//!
//! ```text
//! file      ":W&B" · magic u16 · version u8 · blocks of 32 KiB, the first one with this header in it
//! record    CRC-32 of kind and part u32 · length u16 · kind u8 · part (LevelDB's log, all little-endian);
//!           kind 1: whole, 2, 3, 4: first, middle and last part of one that crosses blocks; the end of a
//!           block that has no room for a record's head is zeros
//! content   wandb_internal.Record: header, run with its config, history of each step, summary, exit
//! ```
//!
//! Formats: `wandb/proto/wandb_internal.proto`, and LevelDB's `doc/log_format.md`.

use std::collections::BTreeMap;

use prost::Message;
use serde_json::Value;

use crate::event_file::ScalarLog;

const MAGIC: [u8; 7] = [b':', b'W', b'&', b'B', 0xe1, 0xbe, 0];
const BLOCK: usize = 1 << 15;
const HEAD: usize = 7;
const CRC_32: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISO_HDLC);
/// What may read it: the oldest version that the format names.
const MIN_CONSUMER: &str = "0.70.0";

/// What a run is called there.
#[derive(Clone, Copy, Debug)]
pub struct RunLabel<'a> {
    /// Letters, digits, `-` and `_`; unique in its project.
    pub id: &'a str,
    /// Where it is listed.
    pub project: &'a str,
    /// How it is listed.
    pub name: &'a str,
    /// Run file.
    pub config: &'a Value,
    /// 0 if it finished.
    pub exit_code: i32,
}

/// The file of a run with these scalars; steps are numbered as in TensorBoard's.
pub fn encode(label: &RunLabel<'_>, log: &ScalarLog) -> Vec<u8> {
    let mut steps = BTreeMap::<u64, (f64, BTreeMap<&str, f64>)>::new();
    for (tag, points) in &log.series {
        for point in points {
            let (at, values) = steps.entry(point.step).or_default();
            *at = point.unix_seconds;
            values.insert(tag, point.value);
        }
    }
    let begin = steps.values().next().map_or(0.0, |(at, _)| *at);
    let end = steps.values().next_back().map_or(0.0, |(at, _)| *at);
    let mut newest = BTreeMap::new();
    let mut file = BlockWriter(MAGIC.to_vec());
    let producer = format!("coxswain {}", coxswain_proto::VERSION);
    let version = VersionInfo { producer, min_consumer: MIN_CONSUMER.to_owned() };
    let config = label.config.as_object().into_iter().flatten();
    let config = config.map(|(key, value)| ConfigItem::new(key, value.to_string())).collect();
    let run = WandbRun {
        run_id: label.id.to_owned(),
        project: label.project.to_owned(),
        config: Some(ConfigItems { items: config }),
        display_name: label.name.to_owned(),
        start_time: Some(StartTime { seconds: begin as i64, nanos: (begin.fract() * 1e9) as i32 }),
    };
    let mut records = vec![
        WandbRecord { header: Some(HeaderRecord { version_info: Some(version) }), ..WandbRecord::default() },
        WandbRecord { run: Some(run), ..WandbRecord::default() },
    ];
    for (step, (at, values)) in &steps {
        newest.extend(values.iter().map(|(tag, value)| (*tag, *value)));
        let own = [("_step", *step as f64), ("_timestamp", *at), ("_runtime", at - begin)];
        let all = values.iter().map(|(tag, value)| (*tag, *value)).chain(own);
        let items = all.map(|(key, value)| NestedItem::new(key, value)).collect();
        let step = Some(HistoryStep { num: *step as i64 });
        records.push(WandbRecord { history: Some(HistoryRecord { items, step }), ..WandbRecord::default() });
    }
    let last = steps.keys().next_back().map_or(0.0, |step| *step as f64);
    let own = [("_step", last), ("_timestamp", end), ("_runtime", end - begin)];
    let items = newest.into_iter().chain(own).map(|(key, value)| NestedItem::new(key, value)).collect();
    records.push(WandbRecord { summary: Some(SummaryRecord { items }), ..WandbRecord::default() });
    let exit = ExitRecord { exit_code: label.exit_code, runtime: (end - begin) as i32 };
    records.push(WandbRecord { exit: Some(exit), ..WandbRecord::default() });
    for (num, record) in (1..).zip(records) {
        file.append(&WandbRecord { num, ..record }.encode_to_vec());
    }
    file.0
}

/// Bytes in blocks.
struct BlockWriter(Vec<u8>);

impl BlockWriter {
    fn append(&mut self, mut record: &[u8]) {
        let mut is_first = true;
        loop {
            let room = BLOCK - self.0.len() % BLOCK;
            if room < HEAD {
                self.0.resize(self.0.len() + room, 0);
                continue;
            }
            let (part, rest) = record.split_at(record.len().min(room - HEAD));
            let kind = match (is_first, rest.is_empty()) {
                (true, true) => 1u8,
                (true, false) => 2,
                (false, false) => 3,
                (false, true) => 4,
            };
            let mut digest = CRC_32.digest();
            digest.update(&[kind]);
            digest.update(part);
            self.0.extend(digest.finalize().to_le_bytes());
            self.0.extend((part.len() as u16).to_le_bytes());
            self.0.push(kind);
            self.0.extend(part);
            if rest.is_empty() {
                return;
            }
            (record, is_first) = (rest, false);
        }
    }
}

/// `wandb_internal.Record`, the kinds of it that are written here.
#[derive(Clone, PartialEq, Message)]
struct WandbRecord {
    #[prost(int64, tag = "1")]
    num: i64,
    #[prost(message, optional, tag = "2")]
    history: Option<HistoryRecord>,
    #[prost(message, optional, tag = "3")]
    summary: Option<SummaryRecord>,
    #[prost(message, optional, tag = "17")]
    run: Option<WandbRun>,
    #[prost(message, optional, tag = "18")]
    exit: Option<ExitRecord>,
    #[prost(message, optional, tag = "21")]
    header: Option<HeaderRecord>,
}

#[derive(Clone, PartialEq, Message)]
struct HeaderRecord {
    #[prost(message, optional, tag = "1")]
    version_info: Option<VersionInfo>,
}

#[derive(Clone, PartialEq, Message)]
struct VersionInfo {
    #[prost(string, tag = "1")]
    producer: String,
    #[prost(string, tag = "2")]
    min_consumer: String,
}

#[derive(Clone, PartialEq, Message)]
struct WandbRun {
    #[prost(string, tag = "1")]
    run_id: String,
    #[prost(string, tag = "3")]
    project: String,
    #[prost(message, optional, tag = "4")]
    config: Option<ConfigItems>,
    #[prost(string, tag = "8")]
    display_name: String,
    #[prost(message, optional, tag = "17")]
    start_time: Option<StartTime>,
}

/// `google.protobuf.Timestamp`.
#[derive(Clone, Copy, PartialEq, Message)]
struct StartTime {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

/// `wandb_internal.ConfigRecord`.
#[derive(Clone, PartialEq, Message)]
struct ConfigItems {
    #[prost(message, repeated, tag = "1")]
    items: Vec<ConfigItem>,
}

#[derive(Clone, PartialEq, Message)]
struct ConfigItem {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "16")]
    value_json: String,
}

#[derive(Clone, PartialEq, Message)]
struct HistoryRecord {
    #[prost(message, repeated, tag = "1")]
    items: Vec<NestedItem>,
    #[prost(message, optional, tag = "2")]
    step: Option<HistoryStep>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct HistoryStep {
    #[prost(int64, tag = "1")]
    num: i64,
}

#[derive(Clone, PartialEq, Message)]
struct SummaryRecord {
    #[prost(message, repeated, tag = "1")]
    items: Vec<NestedItem>,
}

/// An item under a path of keys, here of one.
#[derive(Clone, PartialEq, Message)]
struct NestedItem {
    #[prost(string, repeated, tag = "2")]
    nested_key: Vec<String>,
    #[prost(string, tag = "16")]
    value_json: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct ExitRecord {
    #[prost(int32, tag = "1")]
    exit_code: i32,
    #[prost(int32, tag = "2")]
    runtime: i32,
}

impl ConfigItem {
    fn new(key: &str, value_json: String) -> Self {
        Self { key: key.to_owned(), value_json }
    }
}

impl NestedItem {
    fn new(key: &str, value: f64) -> Self {
        // JSON has no words for these; wandb writes them as texts.
        let value_json = match value {
            v if v.is_nan() => "\"NaN\"".to_owned(),
            v if v.is_infinite() => format!("\"{}Infinity\"", if v < 0.0 { "-" } else { "" }),
            v => Value::from(v).to_string(),
        };
        Self { nested_key: vec![key.to_owned()], value_json }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::event_file::ScalarPoint;

    /// The records of a file, put together again by LevelDB's rules.
    fn records(file: &[u8]) -> Vec<WandbRecord> {
        assert_eq!(file[..MAGIC.len()], MAGIC);
        let (mut at, mut records, mut whole) = (MAGIC.len(), Vec::new(), Vec::new());
        while at < file.len() {
            let room = BLOCK - at % BLOCK;
            if room < HEAD {
                assert!(file[at..at + room].iter().all(|byte| *byte == 0));
                at += room;
                continue;
            }
            let length = usize::from(u16::from_le_bytes([file[at + 4], file[at + 5]]));
            let (kind, part) = (file[at + 6], &file[at + HEAD..][..length]);
            assert!(HEAD + length <= room, "a part stays within its block");
            let sum = CRC_32.checksum(&[&[kind], part].concat());
            assert_eq!(file[at..at + 4], sum.to_le_bytes());
            whole.extend(part);
            if kind == 1 || kind == 4 {
                records.push(WandbRecord::decode(&*std::mem::take(&mut whole)).expect("a record"));
            }
            at += HEAD + length;
        }
        records
    }

    #[test]
    fn a_run_comes_back_from_its_file_whatever_the_blocks_cut() {
        let point = |step: u64| ScalarPoint { step, unix_seconds: 1e9 + step as f64, value: step as f64 };
        let mut log = ScalarLog::default();
        log.series.insert("train/loss".into(), (0..5000).map(point).collect());
        log.series.insert("bad".into(), vec![ScalarPoint { value: f64::NAN, ..point(3) }]);
        let config = json!({"lora": {"rank": 8}, "long": "x".repeat(100_000)});
        let label = RunLabel { id: "a", project: "p", name: "n", config: &config, exit_code: 4 };
        let records = records(&encode(&label, &log));
        assert_eq!(records.len(), 5000 + 4);
        assert!(records.iter().zip(1..).all(|(record, num)| record.num == num));
        let run = records[1].run.clone().expect("the run");
        let items = run.config.expect("its config").items;
        assert_eq!(items[0], ConfigItem::new("lora", "{\"rank\":8}".into()));
        assert_eq!(
            (items[1].value_json.len(), run.start_time.map(|at| at.seconds)),
            (100_002, Some(1_000_000_000))
        );
        let third = records[5].history.clone().expect("a step");
        assert_eq!(third.step, Some(HistoryStep { num: 3 }));
        assert_eq!(
            third.items[0],
            NestedItem { nested_key: vec!["bad".into()], value_json: "\"NaN\"".into() }
        );
        assert_eq!(third.items[1], NestedItem::new("train/loss", 3.0));
        let summary = records[5002].summary.clone().expect("a summary");
        assert!(summary.items.contains(&NestedItem::new("_runtime", 4999.0)));
        assert_eq!(records[5003].exit, Some(ExitRecord { exit_code: 4, runtime: 4999 }));
    }

    #[test]
    fn a_run_without_scalars_is_a_run() {
        let label = RunLabel { id: "a", project: "p", name: "n", config: &Value::Null, exit_code: 0 };
        assert_eq!(records(&encode(&label, &ScalarLog::default())).len(), 4);
    }
}
