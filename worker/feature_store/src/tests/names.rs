//! What makes another namespace, another sample, another adapter; and what does not.

use std::{collections::HashSet, fs};

use super::{
    super::{AdapterTensor, Coverage, adapter_digest},
    *,
};

#[test]
fn every_ingredient_makes_another_namespace_and_the_maker_does_not() {
    let base = description(CacheDtype::Float32);
    let changes: [fn(&mut NamespaceDescription); 10] = [
        |d| d.ingredients.weights.0[31] ^= 1,
        |d| d.ingredients.adapter = Some(Digest([0; 32])),
        |d| d.ingredients.adapter = Some(Digest([1; 32])),
        |d| d.ingredients.preprocessing.push('.'),
        |d| d.ingredients.prompt.push(' '),
        |d| d.ingredients.tokenizer.0[0] ^= 1,
        |d| d.ingredients.compute = "bfloat16".into(),
        |d| d.tap = "vision".into(),
        |d| d.dtype = CacheDtype::Int8,
        |d| d.width += 1,
    ];
    let mut keys = HashSet::from([base.key()]);
    for change in changes {
        let mut changed = base.clone();
        change(&mut changed);
        assert!(keys.insert(changed.key()), "{changed:?} has the key of another namespace");
    }
    let renamed = NamespaceDescription { made_by: "somebody else".into(), ..base.clone() };
    assert_eq!(renamed.key(), base.key());
}

#[test]
fn a_namespace_is_found_by_its_key_and_described_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let key = filled(dir.path(), 0..3, 2).key();
    let found = store.find(&key).unwrap().unwrap();
    assert_eq!((found.description(), found.known()), (&description(CacheDtype::Float32), 3));
    let hex: Digest = key.to_string().parse().unwrap();
    assert_eq!(hex, key.0);
    assert!(store.find(&super::super::NamespaceKey(Digest([9; 32]))).unwrap().is_none());
    let text = fs::read_to_string(found.dir().join("space.json")).unwrap();
    for says in [
        "\"tap\": \"final, after the norm\"",
        "\"dtype\": \"float32\"",
        "\"prompt\": \"{task}\"",
        "\"made_by\"",
    ] {
        assert!(text.contains(says), "{says} in {text}");
    }
    // Ingredients that do not give the name of their directory are not believed.
    fs::write(found.dir().join("space.json"), text.replace("{task}", "{task}!")).unwrap();
    assert!(store.find(&key).err().unwrap().to_string().contains("is not its ingredients' hash"));
}

#[test]
fn samples_are_named_by_images_in_order_and_prompt() {
    let image = |bytes: &[u8]| Digest::of_image(bytes);
    let all = [
        SampleKey::new(&[image(b"a"), image(b"b")], "go"),
        SampleKey::new(&[image(b"b"), image(b"a")], "go"),
        SampleKey::new(&[image(b"a")], "go"),
        SampleKey::new(&[image(b"ab")], "go"),
        SampleKey::new(&[image(b"a"), image(b"b")], "stop"),
        SampleKey::new(&[], "go"),
    ];
    assert_eq!(HashSet::from(all).len(), all.len());
}

fn adapter() -> Vec<AdapterTensor<'static>> {
    let tensor = |name: &'static str, shape: [usize; 2], from: f32| AdapterTensor {
        name: name.into(),
        shape: shape.to_vec().into(),
        values: (0..shape[0] * shape[1]).map(|i| from + i as f32).collect(),
    };
    vec![tensor("b", [2, 3], 0.5), tensor("a", [4, 1], -1.0)]
}

#[test]
fn one_weight_makes_another_adapter_and_order_does_not() {
    let base = adapter();
    let reversed: Vec<_> = base.iter().rev().cloned().collect();
    assert_eq!(adapter_digest(&base), adapter_digest(&reversed));
    let changes: [fn(&mut Vec<AdapterTensor<'static>>); 4] = [
        |a| a[1].values.to_mut()[3] = f32::from_bits(a[1].values[3].to_bits() + 1),
        |a| a[0].shape = vec![3, 2].into(),
        |a| a[0].name = "c".into(),
        |a| a.truncate(1),
    ];
    let mut digests = HashSet::from([adapter_digest(&base)]);
    for change in changes {
        let mut changed = base.clone();
        change(&mut changed);
        assert!(digests.insert(adapter_digest(&changed)));
    }
}

#[test]
fn the_adapter_of_a_namespace_is_kept_whole_and_no_other_is_taken_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let mut description = description(CacheDtype::Float32);
    description.ingredients.adapter = Some(adapter_digest(&adapter()));
    let namespace = store.namespace(&description).unwrap();
    assert!(namespace.load_adapter().unwrap().is_none());
    namespace.save_adapter(&adapter()).unwrap();
    namespace.save_adapter(&adapter()).unwrap();
    let mut loaded = namespace.load_adapter().unwrap().unwrap();
    loaded.sort_by(|a, b| b.name.cmp(&a.name));
    assert_eq!(loaded, adapter());

    let mut changed = adapter();
    changed[0].values.to_mut()[0] += 1.0;
    assert!(namespace.save_adapter(&changed).unwrap_err().to_string().contains("this namespace expects"));
    let path = namespace.dir().join("adapter.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, &bytes).unwrap();
    assert!(namespace.load_adapter().unwrap_err().to_string().contains("not this namespace's adapter"));
    fs::write(&path, &bytes[..20]).unwrap();
    assert!(namespace.load_adapter().unwrap_err().to_string().contains("not safetensors"));
    // A writer that comes with the right one puts it in the place of a damaged one.
    namespace.save_adapter(&adapter()).unwrap();
    assert_eq!(namespace.load_adapter().unwrap().map(|tensors| tensors.len()), Some(2));
}

#[test]
fn coverage_is_listed_with_everything_else() {
    let dir = tempfile::tempdir().unwrap();
    let namespace = filled(dir.path(), 0..3, 2);
    let coverage = Coverage { run: "run/1".into(), total: 4, stored: 3, among: 3 };
    namespace.note_coverage(&coverage).unwrap();
    namespace.note_coverage(&Coverage { stored: 4, ..coverage.clone() }).unwrap();
    let (namespaces, strange) = Store::existing(dir.path()).unwrap().unwrap().list().unwrap();
    let [report] = &namespaces[..] else { panic!("{namespaces:?}") };
    assert_eq!((report.samples, report.shards, report.unfinished, report.in_use), (3, 1, 0, true));
    assert!(report.coverage.len() == 1 && report.coverage[0].is_complete() && !coverage.is_complete());
    assert!(strange.is_empty() && report.unusable.is_empty() && report.rounding_error == 0.0);
    assert_eq!(report.bytes, super::super::directory::files_below(namespace.dir()));
}

#[test]
fn what_is_called_complete_is_so_after_a_repair_and_after_somebody_removed_shards() {
    let dir = tempfile::tempdir().unwrap();
    let namespace = filled(dir.path(), 0..3, 2);
    let note = |run: &str, total| Coverage { run: run.into(), total, stored: total, among: 3 };
    namespace.note_coverage(&note("all", 3)).unwrap();
    let store = Store::existing(dir.path()).unwrap().unwrap();
    let coverage = || {
        let (namespaces, _) = store.list().unwrap();
        let coverage = namespaces[0].coverage.iter();
        coverage.map(|of| (of.run.clone(), of.stored, of.is_complete())).collect::<Vec<_>>()
    };
    assert_eq!(coverage(), [("all".into(), 3, true)]);
    let shard = |nth: usize| {
        let names = super::super::namespace::shard_names(namespace.dir()).unwrap();
        namespace.dir().join(&names[nth])
    };
    let mut bytes = fs::read(shard(0)).unwrap();
    bytes[super::super::shard::HEADER] ^= 1;
    fs::write(shard(0), bytes).unwrap();
    let damaged = store.verify().unwrap().damaged;
    assert_eq!((damaged.len(), store.repair(&damaged).unwrap()[0].kept), (1, 2));
    assert_eq!(coverage(), [("all".into(), 2, false)]);

    // What others add meanwhile does not make up for it.
    let mut writer = namespace.writer().unwrap();
    (10..15).for_each(|number| assert!(append(&mut writer, number, 2)));
    writer.publish().unwrap();
    assert_eq!(coverage(), [("all".into(), 2, false)]);

    // Somebody else's removal shows in the number of samples.
    namespace.note_coverage(&Coverage { among: 7, ..note("all", 3) }).unwrap();
    assert_eq!(coverage(), [("all".into(), 3, true)]);
    fs::remove_file(shard(1)).unwrap();
    assert_eq!(coverage(), [("all".into(), 0, false)]);

    // Of a shard without an index nobody knows what it had.
    namespace.note_coverage(&Coverage { among: 2, ..note("all", 2) }).unwrap();
    let bytes = fs::read(shard(0)).unwrap();
    fs::write(shard(0), &bytes[..bytes.len() - 1]).unwrap();
    assert_eq!(store.gc(None, false).unwrap().unusable.len(), 1);
    assert_eq!(coverage(), []);
}

#[test]
fn a_store_that_is_no_directory_is_refused_with_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("store");
    fs::write(&file, "something else").unwrap();
    for refused in [Store::open(&file, None).unwrap_err(), Store::existing(&file).unwrap_err()] {
        let text = refused.to_string();
        assert!(text.contains("not a directory") && text.contains("cache.dir"), "{text}");
    }
    let inside = Store::open(&file.join("below"), None).unwrap_err().to_string();
    assert!(inside.contains("Not a directory") && inside.contains("below"), "{inside}");
}

#[test]
fn files_are_read_again_only_if_one_of_them_has_changed() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store"), None).unwrap();
    let ask = |files: &[&Path], name: &str, found: u8| {
        let mut reads = 0;
        let read = || {
            reads += 1;
            Ok::<_, StoreError>(Digest([found; 32]))
        };
        let digest = store.digest_of(files.iter().copied(), name, read).unwrap();
        (digest.0[0], reads)
    };
    // Files that have not changed for longer than the clock's resolution: this program, and what compiled it.
    let program = std::env::current_exe().unwrap();
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let old: [&Path; 2] = [&program, &manifest];
    assert_eq!(ask(&old, "weights", 1), (1, 1));
    assert_eq!(ask(&old, "weights", 2), (1, 0), "remembered");
    assert_eq!(ask(&old, "other weights", 3), (3, 1));
    assert_eq!(ask(&old, "weights", 4), (1, 0));

    // One weight, changed at once and under the same size: not remembered, so not confused.
    let young = dir.path().join("weights");
    fs::write(&young, 1.0f32.to_le_bytes()).unwrap();
    let mixed: [&Path; 2] = [&program, &young];
    assert_eq!(ask(&mixed, "weights", 5), (5, 1), "known of one file only");
    fs::write(&young, 1.5f32.to_le_bytes()).unwrap();
    assert_eq!(ask(&mixed, "weights", 6), (6, 1));

    // A damaged memo costs a reading.
    let memo = dir.path().join("store/keys/files.memo");
    let mut bytes = fs::read(&memo).unwrap();
    bytes[40] ^= 1;
    fs::write(&memo, bytes).unwrap();
    assert_eq!(ask(&old, "weights", 7), (7, 1));
}
