//! Data sets: those that ship with the repository, copied to be damaged, and one that is written on the spot.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use parquet::{
    data_type::{ByteArray, ByteArrayType, FloatType, Int64Type},
    file::writer::{SerializedFileWriter, SerializedRowGroupWriter},
    schema::parser::parse_message_type,
};
use serde_json::{Value, json};
use tempfile::TempDir;

pub const CAMERA: &str = "observation.images.front";
/// Frames of each episode of a recording; each is a data file.
pub const LENGTHS: [usize; 3] = [6, 9, 4];

/// A file or directory of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// A copy of a data set.
pub fn copied(from: &Path) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    copy(from, dir.path());
    dir
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() { copy(&path, &to) } else { fs::write(to, fs::read(path).unwrap()).unwrap() }
    }
}

/// The v3.0 data set whose two cameras are videos.
pub fn with_videos() -> TempDir {
    let dir = copied(&repository("worker/data/tests/fixtures/v3.0"));
    let videos = [
        ("videos/observation.images.front/chunk-000/file-000.mp4", "av1_joined.mp4"),
        ("videos/observation.images.front/chunk-000/file-001.mp4", "av1_g2.mp4"),
        ("videos/observation.images.wrist/chunk-001/file-003.mp4", "h264_joined.mp4"),
    ];
    for (path, clip) in videos {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, fs::read(repository("worker/video/tests/fixtures").join(clip)).unwrap()).unwrap();
    }
    dir
}

/// One row of a recording.
pub struct Row {
    pub state: [f32; 2],
    pub action: [f32; 2],
    pub timestamp: f32,
    /// Episode, frame and task, as the row says them.
    pub keys: [i64; 3],
    pub image: Vec<u8>,
}

/// Writes a data set at ten frames a second, in which `change` has changed the rows, by episode and frame.
pub fn recording(change: impl Fn(usize, usize, &mut Row)) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (episode, length) in LENGTHS.into_iter().enumerate() {
        let row = |frame: usize| {
            let mut row = plain(episode, frame);
            change(episode, frame, &mut row);
            row
        };
        let rows: Vec<Row> = (0..length).map(row).collect();
        write_rows(&dir.path().join(format!("data/chunk-000/file-{episode:03}.parquet")), &rows);
    }
    write_metadata(dir.path());
    dir
}

fn plain(episode: usize, frame: usize) -> Row {
    let (e, f) = (episode as f32, frame as f32);
    Row {
        state: [(0.3 * f + e).sin(), 0.1 * f - e],
        action: [(0.5 * f + e).cos(), f - 3.0],
        timestamp: f / 10.0,
        keys: [episode as i64, frame as i64, 0],
        image: png((16 * episode + frame) as u8),
    }
}

/// A picture of two colours.
pub fn png(shade: u8) -> Vec<u8> {
    let mut pixels = vec![shade; 8 * 8 * 3];
    pixels[..24].fill(200);
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, 8, 8);
    encoder.set_color(png::ColorType::Rgb);
    encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
    bytes
}

type Group<'a> = SerializedRowGroupWriter<'a, fs::File>;

fn write_table(path: &Path, fields: &str, write: impl FnOnce(&mut Group<'_>)) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let schema = Arc::new(parse_message_type(&format!("message schema {{ {fields} }}")).unwrap());
    let mut file =
        SerializedFileWriter::new(fs::File::create(path).unwrap(), schema, Default::default()).unwrap();
    let mut group = file.next_row_group().unwrap();
    write(&mut group);
    group.close().unwrap();
    file.close().unwrap();
}

fn integers(group: &mut Group<'_>, values: &[i64]) {
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(values, None, None).unwrap();
    column.close().unwrap();
}

fn floats(group: &mut Group<'_>, values: &[f32], width: usize) {
    let mut column = group.next_column().unwrap().unwrap();
    let definition = vec![1; values.len()];
    let repetition: Vec<i16> = (0..values.len()).map(|at| i16::from(at % width > 0)).collect();
    let levels = (width > 1).then_some((&definition[..], &repetition[..]));
    column
        .typed::<FloatType>()
        .write_batch(values, levels.map(|both| both.0), levels.map(|both| both.1))
        .unwrap();
    column.close().unwrap();
}

fn bytes(group: &mut Group<'_>, values: &[ByteArray]) {
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(values, None, None).unwrap();
    column.close().unwrap();
}

fn write_rows(path: &Path, rows: &[Row]) {
    let fields = format!(
        "repeated float observation.state; repeated float action; required float timestamp; \
         required int64 episode_index; required int64 frame_index; required int64 task_index; \
         required binary {CAMERA};"
    );
    write_table(path, &fields, |group| {
        floats(group, &rows.iter().flat_map(|row| row.state).collect::<Vec<_>>(), 2);
        floats(group, &rows.iter().flat_map(|row| row.action).collect::<Vec<_>>(), 2);
        floats(group, &rows.iter().map(|row| row.timestamp).collect::<Vec<_>>(), 1);
        for key in 0..3 {
            integers(group, &rows.iter().map(|row| row.keys[key]).collect::<Vec<_>>());
        }
        bytes(group, &rows.iter().map(|row| row.image.clone().into()).collect::<Vec<_>>());
    });
}

fn write_metadata(dir: &Path) {
    let count = LENGTHS.len() as i64;
    let fields = "required int64 episode_index; required int64 length; required int64 data/chunk_index; \
                  required int64 data/file_index;";
    write_table(&dir.join("meta/episodes/chunk-000/file-000.parquet"), fields, |group| {
        integers(group, &(0..count).collect::<Vec<_>>());
        integers(group, &LENGTHS.map(|length| length as i64));
        integers(group, &vec![0; LENGTHS.len()]);
        integers(group, &(0..count).collect::<Vec<_>>());
    });
    let tasks = dir.join("meta/tasks.parquet");
    write_table(&tasks, "required int64 task_index; required binary task (UTF8);", |group| {
        integers(group, &[0]);
        bytes(group, &["put the block away".into()]);
    });
    let feature = |dtype: &str, shape: &[usize]| json!({"dtype": dtype, "shape": shape, "names": null});
    let info = json!({
        "codebase_version": "v3.0", "fps": 10, "robot_type": "test",
        "total_episodes": LENGTHS.len(), "total_frames": LENGTHS.iter().sum::<usize>(),
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "features": {
            "observation.state": feature("float32", &[2]), "action": feature("float32", &[2]),
            CAMERA: feature("image", &[8, 8, 3]), "timestamp": feature("float32", &[1]),
            "episode_index": feature("int64", &[1]), "frame_index": feature("int64", &[1]),
            "task_index": feature("int64", &[1]),
        },
    });
    fs::write(dir.join("meta/info.json"), info.to_string()).unwrap();
}

/// Reads one of a data set's JSON files.
pub fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Changes one of a data set's JSON files.
pub fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = read(path);
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}
