//! Tests of the store on real files.

mod budget;
mod faults;
mod hostile;
mod names;
mod round_trip;
mod sharing;

use std::path::Path;

use coxswain_proto::run_spec::CacheDtype;

use super::{
    Digest, Ingredients, Namespace, NamespaceDescription, Record, SampleKey, ShardWriter, Store, StoreError,
};

const WIDTH: u32 = 24;

/// A namespace of small records.
fn description(dtype: CacheDtype) -> NamespaceDescription {
    let digest = |text: &str| Digest::of("test", [("text", text.as_bytes())]);
    NamespaceDescription {
        tap: "final, after the norm".into(),
        dtype,
        width: WIDTH,
        ingredients: Ingredients {
            weights: digest("weights"),
            adapter: None,
            preprocessing: "none".into(),
            prompt: "{task}".into(),
            tokenizer: digest("tokenizer"),
            compute: "float32".into(),
        },
        made_by: "test".into(),
    }
}

fn open(dir: &Path, dtype: CacheDtype) -> Namespace {
    Store::open(dir, None).unwrap().namespace(&description(dtype)).unwrap()
}

fn key(number: u64) -> SampleKey {
    SampleKey::new(&[Digest::of_image(&number.to_le_bytes())], "do it")
}

/// Values that depend on the record's number alone.
fn values(number: u64, tokens: usize) -> Vec<f32> {
    let value = |i: usize| ((number as usize * 31 + i * 7) % 101) as f32 / 7.0 - 5.0;
    (0..tokens * WIDTH as usize).map(value).collect()
}

fn ids(number: u64, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| i + number as u32 * 1000).collect()
}

/// False if the namespace has it already.
fn append(writer: &mut ShardWriter, number: u64, tokens: usize) -> bool {
    let (ids, values) = (ids(number, tokens), values(number, tokens));
    let record = Record { ids: &ids, shapes: &[[1, 2, number as u32]], values: &values };
    writer.append(key(number), &record).unwrap()
}

/// A namespace with these records published, `tokens` each.
fn filled(dir: &Path, numbers: std::ops::Range<u64>, tokens: usize) -> Namespace {
    let namespace = open(dir, CacheDtype::Float32);
    let mut writer = namespace.writer().unwrap();
    numbers.for_each(|number| assert!(append(&mut writer, number, tokens)));
    writer.publish().unwrap();
    namespace
}

/// The values of a record, or none if it is a miss, also if it is found damaged.
fn read(namespace: &Namespace, number: u64) -> Option<Vec<f32>> {
    let record = namespace.get(&key(number))?;
    let mut out = vec![f32::NAN; record.tokens() * record.width()];
    record.read_f32(&mut out).ok()?;
    assert_eq!(record.shapes(), [[1, 2, number as u32]]);
    assert_eq!(record.ids(), ids(number, record.tokens()));
    Some(out)
}
