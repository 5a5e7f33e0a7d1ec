//! The feature store: how fast records are appended, and read from the page cache, next to a plain copy of
//! the same bytes.
//!
//! ```text
//! cargo bench -p coxswain-feature-store --bench vl_cache -- [--dir DIR] [--mib 256] [--tokens 192]
//!     [--width 768] [--rounds 5] [--cpu]
//! ```
//!
//! A read is everything that a hit costs: look-up, verification of ids and values, decoding to float32 into a
//! buffer that is used again. "First" is the first reading of a namespace just opened, whose pages are in
//! memory but not yet mapped. The copy is `memcpy` of as many stored bytes out of anonymous memory into a
//! buffer of a record's size. Sides take turns, round by round; printed are medians of GB/s (10^9) of stored
//! bytes, and in brackets of the float32 values that come out. `--cpu` counts the time this thread computes,
//! in user mode and in the kernel, instead of the time that passes: on a machine that does other work, that
//! is what can be compared.

use std::{
    hint::black_box,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use coxswain_feature_store::{
    Digest, Ingredients, Namespace, NamespaceDescription, Record, SampleKey, Store,
};
use coxswain_proto::run_spec::CacheDtype;
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};

struct Bench {
    dir: PathBuf,
    /// Float32 bytes of all records.
    bytes: usize,
    tokens: usize,
    width: usize,
    rounds: usize,
    /// Count computing time.
    cpu: bool,
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let value = |flag: &str, default: &str| {
        let at = args.iter().position(|arg| arg == flag).and_then(|at| args.get(at + 1));
        at.map_or(default, String::as_str).to_owned()
    };
    let own = tempfile::tempdir()?;
    let dir = value("--dir", "");
    let bench = Bench {
        dir: if dir.is_empty() { own.path().to_path_buf() } else { dir.into() },
        bytes: value("--mib", "256").parse::<usize>()? << 20,
        tokens: value("--tokens", "192").parse()?,
        width: value("--width", "768").parse()?,
        rounds: value("--rounds", "5").parse()?,
        cpu: args.iter().any(|arg| arg == "--cpu"),
    };
    let record = bench.tokens * bench.width * 4;
    println!(
        "records of {} x {} float32 ({} KiB), {} of them\n",
        bench.tokens,
        bench.width,
        record >> 10,
        bench.records()
    );
    println!("| dtype | append | with fsync | first read | read | memcpy | read / memcpy | one record |");
    println!("|---|---|---|---|---|---|---|---|");
    for dtype in [CacheDtype::Float32, CacheDtype::Bfloat16, CacheDtype::Int8] {
        println!("{}", bench.of(dtype)?);
    }
    Ok(())
}

impl Bench {
    /// Seconds on the clock that counts; differences mean something.
    fn now(&self) -> Result<f64> {
        if !self.cpu {
            static BEGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
            return Ok(BEGIN.get_or_init(Instant::now).elapsed().as_secs_f64());
        }
        let usage = getrusage(UsageWho::RUSAGE_THREAD)?;
        let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
        Ok(Duration::from_micros(u64::try_from(micros)?).as_secs_f64())
    }

    fn records(&self) -> usize {
        (self.bytes / (self.tokens * self.width * 4)).max(1)
    }

    /// One line of the table.
    fn of(&self, dtype: CacheDtype) -> Result<String> {
        let store = Store::open(&self.dir.join(format!("{dtype:?}")), None)?;
        let description = self.description(dtype);
        let (append, synced) = self.append(&store.namespace(&description)?)?;
        let namespace = store.namespace(&description)?;
        let stored = namespace.bytes() as f64;
        let mut buffer = vec![0.0f32; self.tokens * self.width];
        let first = self.read(&namespace, &mut buffer)?;
        let source = vec![1u8; namespace.bytes() as usize];
        let mut target = vec![0u8; source.len() / self.records()];
        let (mut reads, mut copies) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            reads.push(self.read(&namespace, &mut buffer)?);
            let begin = self.now()?;
            for record in source.chunks_exact(target.len()) {
                target.copy_from_slice(black_box(record));
                black_box(&target);
            }
            copies.push(self.now()? - begin);
        }
        let (read, copy) = (median(reads), median(copies));
        let values = (self.records() * self.tokens * self.width * 4) as f64;
        let rate = |seconds: f64| stored / seconds / 1e9;
        Ok(format!(
            "| {dtype:?} | {:.2} | {:.2} | {:.2} | {:.2} ({:.2}) | {:.2} | {:.2} | {:.0} us |",
            rate(append),
            rate(synced),
            rate(first),
            rate(read),
            values / read / 1e9,
            rate(copy),
            copy / read,
            read / self.records() as f64 * 1e6,
        ))
    }

    /// Stores all records; seconds until the last is appended, and until all are on disk.
    fn append(&self, namespace: &Namespace) -> Result<(f64, f64)> {
        let ids: Vec<u32> = (0..self.tokens as u32).collect();
        let values: Vec<f32> =
            (0..self.tokens * self.width).map(|i| (i % 1009) as f32 / 100.0 - 5.0).collect();
        let record = Record { ids: &ids, shapes: &[[1, 16, 16], [1, 16, 16]], values: &values };
        let begin = self.now()?;
        let mut publishing = 0.0;
        let mut writer = namespace.writer()?;
        for number in 0..self.records() {
            writer.append(key(number), &record)?;
            if writer.is_full() || number + 1 == self.records() {
                let last = self.now()?;
                writer.publish()?;
                publishing += self.now()? - last;
                writer = namespace.writer()?;
            }
        }
        let all = self.now()? - begin;
        Ok((all - publishing, all))
    }

    /// Reads all records, not in the order in which they were stored; seconds.
    fn read(&self, namespace: &Namespace, buffer: &mut [f32]) -> Result<f64> {
        let (records, begin) = (self.records(), self.now()?);
        // A prime step visits every record once, unless their number is a multiple of it.
        for number in (0..records).map(|i| i * 7919 % records) {
            let record = namespace.get(&key(number)).context("a record is missing")?;
            ensure!(record.ids().len() == self.tokens, "a record of another length");
            record.read_f32(buffer)?;
            black_box(&buffer);
        }
        Ok(self.now()? - begin)
    }

    fn description(&self, dtype: CacheDtype) -> NamespaceDescription {
        NamespaceDescription {
            tap: "bench".into(),
            dtype,
            width: self.width as u32,
            ingredients: Ingredients {
                weights: Digest([0; 32]),
                adapter: None,
                preprocessing: String::new(),
                prompt: String::new(),
                tokenizer: Digest([0; 32]),
                compute: String::new(),
            },
            made_by: "bench".into(),
        }
    }
}

fn key(number: usize) -> SampleKey {
    SampleKey::new(&[], &number.to_string())
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_unstable_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN)
}
