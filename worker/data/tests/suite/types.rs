//! Tables as other programs write them: integers of any width, marks before texts, other codecs, and the
//! statistics of v2.0.

use std::{fs, path::Path, sync::Arc};

use coxswain_data::lerobot::{Catalog, info::Version};
use parquet::{
    data_type::{ByteArrayType, DataType, DoubleType, FloatType, Int32Type},
    file::writer::{SerializedFileWriter, SerializedRowGroupWriter},
    schema::parser::parse_message_type,
};
use serde_json::json;

use crate::sets::{V21, V30, edit_info, open};

type Group<'a> = SerializedRowGroupWriter<'a, fs::File>;

fn write_table(path: &Path, fields: &str, write: impl FnOnce(&mut Group<'_>)) {
    let schema = Arc::new(parse_message_type(&format!("message schema {{ {fields} }}")).unwrap());
    let mut file =
        SerializedFileWriter::new(fs::File::create(path).unwrap(), schema, Default::default()).unwrap();
    let mut group = file.next_row_group().unwrap();
    write(&mut group);
    group.close().unwrap();
    file.close().unwrap();
}

fn column<T: DataType>(group: &mut Group<'_>, values: &[T::T]) {
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<T>().write_batch(values, None, None).unwrap();
    column.close().unwrap();
}

/// Writes the tables of [`V30`] anew, their numbers in other types.
fn retype(dir: &Path) {
    write_table(
        &dir.join("meta/tasks.parquet"),
        "required int32 task_index; required binary task (UTF8);",
        |group| {
            column::<Int32Type>(group, &[0, 1]);
            column::<ByteArrayType>(group, &["push the block".into(), "lift the block".into()]);
        },
    );
    let camera = |name: &str| {
        ["chunk_index", "file_index"]
            .map(|key| format!("required int32 videos/{name}/{key} (UINT_16);"))
            .concat()
            + &format!("required float videos/{name}/from_timestamp;")
    };
    let fields = [
        "required int32 episode_index; required int32 length (INT_16); required double data/chunk_index;\
         required int32 data/file_index (UINT_32);",
        &camera("observation.images.front"),
        &camera("observation.images.wrist"),
    ];
    write_table(&dir.join("meta/episodes/chunk-000/file-000.parquet"), &fields.concat(), |group| {
        column::<Int32Type>(group, &[0, 1, 2]);
        column::<Int32Type>(group, &V30.episodes.iter().map(|of| of.0 as i32).collect::<Vec<_>>());
        column::<DoubleType>(group, &[0.0; 3]);
        column::<Int32Type>(group, &[0; 3]);
        for (chunk, files, from) in [(0, [0, 0, 1], [0.0, 0.6, 0.2]), (1, [3; 3], [0.5, 2.0, 0.0])] {
            column::<Int32Type>(group, &[chunk; 3]);
            column::<Int32Type>(group, &files);
            column::<FloatType>(group, &from);
        }
    });
}

#[test]
fn integers_of_any_width_and_signs_are_read() {
    let (as_written, other) = (V30.write(), V30.write());
    retype(other.path());
    let [(as_written, of_it), (other, of_other)] = [&as_written, &other].map(|dir| open(dir.path()));
    assert_eq!(other.episodes.episodes, as_written.episodes.episodes);
    assert_eq!(other.tasks.len(), 2);
    for index in [0, 12, 38] {
        for camera in [0, 1] {
            let shown = of_other.frame(&other, camera, index).unwrap();
            assert_eq!(shown, of_it.frame(&as_written, camera, index).unwrap());
        }
    }
}

#[test]
fn a_column_of_something_else_is_named() {
    let dir = V30.write();
    let path = dir.path().join("meta/tasks.parquet");
    write_table(&path, "required binary task_index (UTF8); required binary task (UTF8);", |group| {
        column::<ByteArrayType>(group, &["0".into()]);
        column::<ByteArrayType>(group, &["push".into()]);
    });
    let error = Catalog::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("tasks.parquet") && error.contains("task_index (integers)"), "{error}");
}

#[test]
fn a_codec_that_is_not_read_is_named_with_the_way_to_write_the_file_again() {
    for codec in ["lz4", "brotli"] {
        let dir = V30.write();
        let fixture = format!("{}/tests/fixtures/codecs/{codec}.parquet", env!("CARGO_MANIFEST_DIR"));
        fs::copy(fixture, dir.path().join("meta/tasks.parquet")).unwrap();
        let error = Catalog::open(dir.path()).unwrap_err().to_string();
        let says = format!("column task_index: compressed with {}", codec.to_uppercase());
        assert!(error.contains(&says) && error.contains("compression=\"zstd\""), "{error}");
        assert!(!error.contains("download"), "{error}");
    }
}

#[test]
fn a_mark_before_a_text_is_no_part_of_it() {
    let mark = |dir: &Path, file: &str| {
        let path = dir.join(file);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(path, format!("\u{feff}{text}")).unwrap();
    };
    let dir = V21.write();
    for file in ["info.json", "episodes.jsonl", "tasks.jsonl", "episodes_stats.jsonl"] {
        mark(dir.path(), &format!("meta/{file}"));
    }
    let catalog = Catalog::open(dir.path()).unwrap();
    assert!(catalog.stats.is_some());
    let dir = V30.write();
    mark(dir.path(), "meta/stats.json");
    assert!(Catalog::open(dir.path()).unwrap().stats.is_some());
}

#[test]
fn v2_0_is_read_with_its_statistics_and_so_is_one_that_was_renamed() {
    let of_v21 = Catalog::open(V21.write().path()).unwrap();
    for version in ["v2.0", "v2.1"] {
        let dir = V21.write();
        edit_info(dir.path(), |info| info["codebase_version"] = json!(version));
        let meta = dir.path().join("meta");
        fs::remove_file(meta.join("episodes_stats.jsonl")).unwrap();
        fs::write(meta.join("stats.json"), r#"{"action": {"mean": [0.5, 1.0], "std": [1.0, 2.0]}}"#).unwrap();
        let catalog = Catalog::open(dir.path()).unwrap();
        assert_eq!(catalog.info.version.to_string(), version);
        assert_eq!(catalog.episodes.episodes, of_v21.episodes.episodes);
        assert_eq!(catalog.stats.unwrap().0["action"]["std"], [1.0, 2.0]);
        assert_eq!(catalog.stats_path, meta.join("stats.json"));
    }
    let dir = V21.write();
    edit_info(dir.path(), |info| info["codebase_version"] = json!("v2.0"));
    let catalog = Catalog::open(dir.path()).unwrap();
    assert_eq!((catalog.info.version, catalog.stats), (Version::V2_0, None), "those of v2.1 are not v2.0's");
}
